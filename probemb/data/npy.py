"""Untrusted NumPy array files (.npy): every fault is a ValueError."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np

MAX_HEADER = 10_000  # bytes


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:  # hostile bytes fail in many ways
        raise ValueError(f"{type(error).__name__}: {error}") from None


def read_npy(file: str | os.PathLike | BinaryIO, *, mapped: bool = False) -> np.ndarray:
    """The array of a .npy file, memory-mapped and read-only if `mapped`. Raises ValueError, OSError."""
    with _refusing():
        array = np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("it is an archive of arrays")
    return array


def npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether it is in Fortran's order, and type of an array. Raises ValueError, OSError."""
    with _refusing():
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"its format is {version}")
        return read(file, max_header_size=MAX_HEADER)
