"""SHA-256 of models: one that identifies a model, and one that shows damage to its file."""

from __future__ import annotations

import hashlib
import json
import weakref
from functools import lru_cache

import torch
from torch import Tensor

loaded: dict[str, weakref.ref] = {}  # the models that this process has loaded, by name, for the reports that it writes


def loaded_weights() -> dict[str, str]:
    """`weights_sha256` of each loaded model that is still in use."""
    return {name: _sha256_of(model) for name, model in loaded.items() if model() is not None}


@lru_cache(maxsize=8)
def _sha256_of(model: weakref.ref) -> str:
    return weights_sha256(model())


def digest_model(digest, model: torch.nn.Module) -> None:
    """Feed a hash with everything that a model's embeddings depend on: its configuration and its weights."""
    digest.update(json.dumps(model.config, sort_keys=True, default=str).encode())
    _digest_tensors(digest, model.state_dict())


def weights_sha256(model: torch.nn.Module) -> str:
    """Identify a model, wherever its files lie: 64 hexadecimal digits over `digest_model`."""
    digest = hashlib.sha256()
    digest_model(digest, model)
    return digest.hexdigest()


def tensors_sha256(state: dict[str, Tensor]) -> str:
    """64 hexadecimal digits over the names, shapes, types and bytes of tensors, in the order of their names."""
    digest = hashlib.sha256()
    _digest_tensors(digest, state)
    return digest.hexdigest()


def _digest_tensors(digest, state: dict[str, Tensor]) -> None:
    for name, tensor in sorted(state.items()):
        digest.update(f"|{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
