"""Bounds that the machine sets to counts of processes and threads."""

import os
from contextlib import suppress
from pathlib import Path

from probemb.errors import UserError


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


COMPUTING = max(64, 4 * cores())  # processes, or threads, that compute; more only cost memory
WAITING = 64 * COMPUTING  # threads that wait for the network


def refuse_crowd(count: int, option: str, ranks: int = 1, most: int = COMPUTING) -> None:
    """Raise UserError if so many for each of the machine's ranks are more than `most` in total."""
    if count * ranks > most:
        each = f", for each of {ranks} processes on this machine" if ranks > 1 else ""
        raise UserError(
            f"{option} is {count}{each}.",
            f"Set it to at most {most // ranks}: {describe_cores()}.",
        )


def describe_cores() -> str:
    """The reason of a bound, in words."""
    return f"this machine has {cores()} CPU core{'s' * (cores() > 1)}"
