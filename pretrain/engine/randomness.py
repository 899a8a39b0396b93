"""The random state of this process: every generator as tensors, for checkpoints."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from probemb import distributed


def make_deterministic() -> None:
    """Let every operator give the same bits again, or fail; call before the GPU is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True)


def random_state() -> dict[str, Tensor]:
    """This process' generators (torch on the CPU and on its GPU, numpy, python), as tensors."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    _, words, next_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss]),
        "numpy_gauss": torch.tensor([gauss], dtype=torch.float64),
        "python": torch.tensor(words),
        "python_gauss": torch.tensor([] if next_gauss is None else [next_gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def choose_random_state(stored: Mapping[str, Tensor], stored_ranks: int) -> dict[str, Tensor] | int:
    """This rank's part of {"RANK.GENERATOR": tensor}, or a seed drawn from rank 0's if it has none.

    Raises:
        ValueError: a state is missing or invalid.
    """
    rank = distributed.rank()
    try:
        if rank >= stored_ranks:
            digest = hashlib.sha256(bytes(stored["0.torch"].tolist()) + rank.to_bytes(8, "little")).digest()
            return int.from_bytes(digest[:4], "little")
        state = {name.removeprefix(f"{rank}."): t for name, t in stored.items() if name.startswith(f"{rank}.")}
        torch.Generator().set_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.Generator("cuda").set_state(state["cuda"])
        np.random.RandomState().set_state(_numpy_state(state))
        random.Random().setstate(_python_state(state))
    except (RuntimeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"no random state for rank {rank}: {error!r}") from None
    return state


def _numpy_state(state: dict[str, Tensor]) -> tuple:
    *keys, position, has_gauss = state["numpy"].tolist()
    return "MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, state["numpy_gauss"].tolist()[0]


def _python_state(state: dict[str, Tensor]) -> tuple:
    gauss = state["python_gauss"].tolist()
    return 3, tuple(state["python"].tolist()), gauss[0] if gauss else None


def set_random_state(state: dict[str, Tensor] | int) -> None:
    """Restore a result of `random_state` or `choose_random_state`, without the GPU's part if there is no GPU."""
    if isinstance(state, int):
        torch.manual_seed(state)
        np.random.seed(state)
        random.seed(state)
        return
    torch.set_rng_state(state["torch"])
    np.random.set_state(_numpy_state(state))
    random.setstate(_python_state(state))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
