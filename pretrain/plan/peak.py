"""The speed that GPUs could reach: peaks from data sheets, and the step's FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pretrain.config import Config
from probemb.errors import UserError, nearest

if TYPE_CHECKING:
    import torch

# Dense TFLOP/s by a part of the device's name, the more special names first: bf16 on tensor cores, and float32 outside
# of them, as torch computes it by default. From NVIDIA's and AMD's data sheets.
PEAKS = {
    "B200": (2250.0, 75.0),
    "GH200": (989.0, 67.0),
    "H200": (989.0, 67.0),
    "H100 NVL": (835.0, 60.0),
    "H100 PCIe": (756.0, 51.0),
    "H100": (989.0, 67.0),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A40": (150.0, 37.4),
    "A30": (165.0, 10.3),
    "A10G": (70.0, 35.0),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "MI300X": (1307.0, 163.4),
    "MI250X": (191.5, 23.9),  # one of its two dies, which are two devices
}


def peak_flops(name: str, precision: str) -> float | None:
    """FLOP/s of a device, by the name that torch gives it, at "bf16" or "fp32"; None if unknown."""
    known = _find(name)
    return known and 1e12 * PEAKS[known][0 if precision == "bf16" else 1]


def _find(name: str) -> str | None:
    words = f" {name} ".replace("-", " ").replace("_", " ").upper()
    return next((known for known in PEAKS if f" {known.upper()} " in words), None)


def named_gpu(name: str) -> str:
    """The name in PEAKS of a GPU as people write it, such as "h200" or "a100-80gb". Raises UserError."""
    if (known := _find(name)) is None:
        what = f"The peak of the GPU '{name}' is not known.{nearest(name, PEAKS)}"
        raise UserError(what, f"Name one of {', '.join(PEAKS)}, or pass --peak-tflops from its data sheet.")
    return known


def gpu_of_this_machine() -> str | None:
    """The name in PEAKS of the first GPU here; None without one, or for one that is not there."""
    import torch

    return _find(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def images_at_peak(
    config: Config, precision: str, world_size: int, device: torch.device
) -> Callable[[float], float] | None:
    """Images per second of all ranks if the devices reached their peak, for a mean length of the texts in tokens.

    Counts the model's FLOPs, without recomputation. None where the device's peak is unknown, as a CPU's.
    """
    import torch

    if device.type != "cuda" or not (peak := peak_flops(torch.cuda.get_device_name(device), precision)):
        return None
    return images_at(world_size * peak, config, precision, world_size)


def images_at(peak: float, config: Config, precision: str, world_size: int) -> Callable[[float], float]:
    """The same for a peak of all ranks together, in FLOP/s."""
    from pretrain.plan.cost import flops
    from pretrain.plan.trace import Setting, build

    model = build(config)

    def work(tokens: int) -> float:
        setting = Setting.of(config, world_size, tokens, half=precision == "bf16", gpu=False)
        setting = replace(setting, parts=1, checkpointing=False)
        return flops(model, setting)["model_per_step"]

    # Linear in the length but for attention, a small part: two lengths suffice.
    long, short = model.context_length, max(1, model.context_length // 4)
    most, least = work(long), work(short)

    def speed(tokens: float) -> float:
        return config.batch_size * peak / (least + (most - least) * (tokens - short) / max(1, long - short))

    return speed
