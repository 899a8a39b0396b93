"""Bounds that the machine sets to counts of processes and threads."""

import os

from probemb.errors import UserError


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_memory() -> int:
    """Bytes of memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
