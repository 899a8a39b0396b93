"""Random numbers that are functions of a seed and a sample, without changing the global random states."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def isolated_randomness() -> Iterator[None]:
    """Restore the global random states of torch (CPU), numpy and Python on exit."""
    states = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.random.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def seed_all(seed: int) -> None:
    """Seed torch (CPU), numpy and Python for transforms."""
    # torch.manual_seed would also queue a call for every CUDA device, at each sample.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def number_of(*parts: int | str) -> int:
    """64 random bits that are a function of the parts."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


def stream_of(*parts: int | str) -> np.random.RandomState:
    """A stream of random numbers that is a function of the parts.

    RandomState's numbers are the same in every version of numpy, in contrast to Generator's.
    """
    number = number_of(*parts)
    return np.random.RandomState([number & 0xFFFFFFFF, number >> 32])
