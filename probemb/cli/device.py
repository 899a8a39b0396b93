"""Where a command computes: device, precision, processes that decode."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from probemb.errors import UserError, nearest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Placement:
    """Where and in which precision the model runs."""

    device: str
    autocast: torch.dtype | None
    precision: str


def place(device: str, precision: str) -> Placement:
    """Resolve --device and --precision ("auto": bf16 on a GPU that has it, fp32 elsewhere).

    Raises:
        UserError: an unknown name, or a GPU that is not there.
    """
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
    known = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision == "auto":
        precision = "bf16" if kind == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if precision not in known:
        raise UserError(
            f"There is no precision '{precision}'.{nearest(precision, known)}", "Say --precision auto, fp32 or bf16."
        )
    return Placement(device, known[precision], precision)


def loader_workers(wanted: int | None, n_images: int, device: str) -> int:
    """Processes that decode images. By default none for a small set, else at most 8 and, beside a CPU model, half of
    the cores."""
    if wanted is not None:
        return wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if n_images < 512:
        return 0
    return min(8, cores if device.startswith("cuda") else cores // 2)
