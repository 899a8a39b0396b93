"""The machine of a command: its cores and memory, the device and precision of a model, threads and workers."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.errors import UserError

if TYPE_CHECKING:
    import torch

BF16 = (8, 0)  # compute capability from which GPUs compute in bf16; torch emulates it slowly on older ones
PRECISIONS = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


COMPUTING = max(64, 4 * cores())  # processes, or threads, that compute; more only cost memory
WAITING = 64 * COMPUTING  # threads that wait for the network


def refuse_crowd(count: int, option: str, ranks: int = 1, most: int = COMPUTING) -> None:
    """Raise UserError if so many for each of the machine's ranks are more than `most` in total."""
    if count * ranks > most:
        each = f", for each of {ranks} processes on this machine" if ranks > 1 else ""
        raise UserError(
            f"{option} is {count}{each}.",
            f"Set it to at most {most // ranks}: this machine has {cores()} CPU core{'s' * (cores() > 1)}.",
        )


def machine_memory() -> int:
    """Bytes of memory of the machine, or of this process's container or Slurm job if that may have less."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits()])


def memory_limits(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """The memory limits, in bytes, of this process's control group and those around it, versions 1 and 2."""
    files = [root / "memory.max", root / "memory" / "memory.limit_in_bytes"]
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, group = line.split(":", 2)  # "0::/slurm/job_7" in version 2
            inner = Path(group.lstrip("/"))
            for folder in (inner, *inner.parents):
                files.append(root / folder / "memory.max")
                if "memory" in controllers.split(","):
                    files.append(root / "memory" / folder / "memory.limit_in_bytes")
    limits = []
    for file in files:
        with suppress(OSError, ValueError):  # absent, or "max"
            limits.append(int(file.read_text()))
    return limits


@dataclass(frozen=True)
class Device:
    """Device and precision that a model runs with: torch's name, such as "cuda:1"; "fp32" (the model's own), …."""

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

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device not in ("cpu", "cuda", *(f"cuda:{i}" for i in range(gpus))) or (device == "cuda" and not gpus):
        raise UserError(f"There is no device '{device}': torch sees {gpus} GPUs.", "Say --device cpu, cuda or cuda:0.")
    if precision == "auto":
        precision = training_precision("auto", torch.cuda.get_device_capability(device) if device != "cpu" else None)
    if precision not in PRECISIONS:
        raise UserError(f"There is no precision '{precision}'.", "Say --precision auto, fp32 or bf16.")
    return Device(device, precision)


def share_cores(threads: int, workers: int, world_size: int = 1) -> int:
    """Give this rank `threads` CPU threads, or for 0 its share of the machine's cores; returns the machine's ranks.

    `workers`: the rank's data workers; `world_size`: ranks of the run, all here where the launcher does not say.
    Raises UserError: all ranks together are too many threads or workers for the machine.
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


def loader_workers(wanted: int | None, n_images: int, device: str) -> int:
    """Number of processes that decode images: by default none for a small set, else up to 8, and up to half of the
    cores if the model runs on the CPU.
    """
    if wanted is not None:
        return wanted
    if n_images < 512:
        return 0
    return min(8, cores() if device.startswith("cuda") else cores() // 2)
