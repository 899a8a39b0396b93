"""Device and precision of a command, threads of a rank, worker processes."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from probemb.cli.machine import cores, refuse_crowd
from probemb.errors import UserError, nearest

if TYPE_CHECKING:
    import torch


BF16 = (8, 0)  # compute capability from which GPUs compute in bf16; torch emulates it slowly on older ones
PRECISIONS = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Device:
    """Device and precision that a model runs with.

    Attributes:
        name: torch's name of the device, such as "cpu" or "cuda:1".
        precision: "fp32" (the model's own), "bf16" or "fp16".
    """

    name: str = "cpu"
    precision: str = "fp32"

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type that autocast computes in; None without autocast."""
        import torch

        name = PRECISIONS[self.precision]
        return None if name is None else getattr(torch, name)

    def autocast(self) -> AbstractContextManager:
        """The context to run the model in."""
        import torch

        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(torch.device(self.name).type, dtype=self.autocast_dtype)


CPU = Device()


def choose_device(device: str, precision: str) -> Device:
    """Resolve --device and --precision ("auto": bf16 on a GPU that has it, fp32 elsewhere). Raises UserError."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"There is no device '{device}'.", "Say --device cpu, cuda or cuda:1.") from error
    if kind not in ("cpu", "cuda"):
        raise UserError(f"--device {device} is not supported.", "Say --device cpu, cuda or cuda:1.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {device} was asked for, but torch sees no GPU here.", "Say --device cpu.")
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"--device {device} was asked for, but there are {torch.cuda.device_count()} GPUs, counted from 0.",
            "Name one of them.",
        )
    if precision == "auto":
        precision = training_precision("auto", torch.cuda.get_device_capability(device) if kind == "cuda" else None)
    if precision not in PRECISIONS:
        raise UserError(
            f"There is no precision '{precision}'.{nearest(precision, PRECISIONS)}",
            "Say --precision auto, fp32 or bf16.",
        )
    return Device(device, precision)


def share_cores(threads: int, workers: int, world_size: int = 1) -> int:
    """Give this rank `threads` CPU threads, or for 0 its share of the machine's cores; returns the machine's ranks.

    Args:
        workers: the rank's data workers.
        world_size: ranks of the run, which are all here where the launcher does not say.

    Raises:
        UserError: all ranks together are too many threads or workers for the machine.
    """
    import torch

    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    refuse_crowd(threads, "engine.threads", here)
    refuse_crowd(workers, "data.workers", here)
    torch.set_num_threads(threads or max(1, cores() // here))
    return here


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of this process' GPU; None without one."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def training_precision(asked: str, capability: tuple[int, int] | None) -> str:
    """ "bf16" or "fp32": for "auto", bf16 on a GPU with it. Raises UserError: bf16 on a GPU without it."""
    if asked == "bf16" and capability and capability < BF16:
        raise UserError(
            f"This GPU (compute capability {capability[0]}.{capability[1]}) has no bf16.",
            "Set engine.precision to auto or fp32.",
        )
    return asked if asked != "auto" else "bf16" if capability and capability >= BF16 else "fp32"


def precision_words(precision: str, capability: tuple[int, int] | None) -> str:
    """The precision, and why it is not bf16, for a run's first lines."""
    return f"{precision} (this GPU has no bf16)" if capability and capability < BF16 else precision


def loader_workers(wanted: int | None, n_images: int, device: str) -> int:
    """Number of processes that decode images: by default none for a small set, else up to 8, and up to half of the
    cores if the model runs on the CPU.
    """
    if wanted is not None:
        return wanted
    if n_images < 512:
        return 0
    return min(8, cores() if device.startswith("cuda") else cores() // 2)
