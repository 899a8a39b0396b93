"""The machine of a command: its cores and memory, the device and precision of a model, threads and workers."""

import os
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from probemb.errors import UserError

BF16 = (8, 0)  # compute capability from which GPUs compute in bf16; torch emulates it slowly on older ones
PRECISIONS = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_memory() -> int:
    """Bytes of memory of the machine, or of this process's container or Slurm job if that may have less."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits()])


def memory_limits(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """The memory limits, in bytes, of this process's control group and those around it, versions 1 and 2."""
    groups, limits = {Path()}, []
    with suppress(OSError):
        for line in own.read_text().splitlines():
            group = Path(line.split(":", 2)[2].lstrip("/"))  # "0::/slurm/job_7" in version 2
            groups |= {group, *group.parents}
    for group in groups:
        for file in (root / group / "memory.max", root / "memory" / group / "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # absent, or "max"
                limits.append(int(file.read_text()))
    return limits


@dataclass(frozen=True)
class Device:
    """Device and precision that a model runs with; "fp32" is the model's own."""

    name: str = "cpu"
    precision: str = "fp32"

    def autocast(self) -> AbstractContextManager:
        """The context to run the model in."""
        import torch

        dtype = PRECISIONS[self.precision]
        return torch.autocast(torch.device(self.name).type, getattr(torch, dtype)) if dtype else nullcontext()


CPU = Device()


def choose_device(device: str, precision: str) -> Device:
    """Resolve --device and --precision ("auto": bf16 on a GPU that has it, fp32 elsewhere). Raises UserError."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device not in ("cpu", *["cuda"] * bool(gpus), *(f"cuda:{i}" for i in range(gpus))):
        raise UserError(f"There is no device '{device}': torch sees {gpus} GPUs.", "Say --device cpu, cuda or cuda:0.")
    if precision == "auto":
        precision = training_precision("auto", torch.cuda.get_device_capability(device) if device != "cpu" else None)
    if precision not in PRECISIONS:
        raise UserError(f"There is no precision '{precision}'.", "Say --precision auto, fp32 or bf16.")
    return Device(device, precision)


def training_device(threads: int) -> str:
    """This rank's device, for `threads` CPU threads, or for 0 its share of the machine's cores. Raises UserError."""
    import torch

    own = os.environ.get("LOCAL_RANK", "0")
    # Ranks of this machine, as torchrun or deepspeed says; without a word, other ranks are on other machines.
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or int(own) + 1)
    torch.set_num_threads(threads or max(1, cores() // here))
    if not torch.cuda.is_available():
        return "cpu"
    if here > torch.cuda.device_count():
        what = f"The launcher starts {here} processes on a machine with {torch.cuda.device_count()} GPUs."
        raise UserError(what, "Start one process per GPU (--nproc-per-node), or hide the GPUs: CUDA_VISIBLE_DEVICES= .")
    return f"cuda:{own}"


def gpu_capability() -> tuple[int, int] | None:
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def training_precision(asked: str, capability: tuple[int, int] | None) -> str:
    """ "bf16" or "fp32": for "auto", bf16 on a GPU with it. Raises UserError: bf16 on a GPU without it."""
    if asked == "bf16" and capability and capability < BF16:
        what = f"This GPU (compute capability {capability[0]}.{capability[1]}) has no bf16."
        raise UserError(what, "Set engine.precision to auto or fp32.")
    return asked if asked != "auto" else "bf16" if capability and capability >= BF16 else "fp32"


def loader_workers(wanted: int | None, n_images: int, device: str) -> int:
    """Processes that decode images, by default none for a small set, and up to half of the cores without a GPU."""
    if wanted is not None:
        return wanted
    return 0 if n_images < 512 else min(8, cores() if device.startswith("cuda") else cores() // 2)
