"""load_model: a saved model with its adapter, tokenizer and transforms, ready for use."""

import json
import os
import weakref
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from probemb.models import formats, hub
from probemb.models.adapter import with_adapter
from probemb.models.architectures import is_open_clip, read_architecture
from probemb.models.dual_encoder import DualEncoder
from probemb.models.inputs import Transforms, create_tokenizer, create_transforms
from probemb.models.weights import tensors_sha256

_loaded: dict[str, weakref.ref] = {}  # the models that this process has loaded, by name, for the reports that it writes


class LoadedModel(NamedTuple):
    """A model for inference and what prepares its input."""

    model: DualEncoder
    tokenizer: Callable[[list[str]], Tensor]
    transforms: Transforms


def load_model(path_or_name: str | Path, device: str | torch.device = "cpu", resize: str = "pil") -> LoadedModel:
    """Load a model for inference: `model, tokenizer, transforms = load_model("runs/x")`.

    It is in evaluation mode and its parameters need no gradient; to train it, `model.train().requires_grad_()`.

    `path_or_name` is a run folder (its `model/` is read), a model folder, a .safetensors file, or a Hugging Face hub
    name such as "SanghyukChun/PCMEPP-ViT-B-16-CC3M-12M-RedCaps" (with "hf-hub:" in front of it, no folder is looked
    at). Published weights of PCME++ and ProLIP are recognised, and so is open_clip's layout, of point models, as is
    ARCHITECTURE:WEIGHTS, with a name or the file of open_clip's weights ("ViT-B-16:laion2b_s34b_b88k").

    Raises UserError: nothing is found, or the weights are not this project's or do not fit their configuration.
    """
    if named := _architecture_and_weights(path_or_name):
        model, weights = formats.named_open_clip(*named)
    else:
        weights, config = hub.locate(path_or_name)
        model = hub.build_saved(weights, config, with_adapter)
    model = model.to(device).eval().requires_grad_(False)
    _loaded[str(path_or_name)] = weakref.ref(model)
    return LoadedModel(model, create_tokenizer(model, weights.parent), create_transforms(model, resize=resize))


def lasting_name(path_or_name: str | Path) -> str:
    """A name for `load_model` that holds in every working directory: a path made absolute, or a hub name as it is."""
    if named := _architecture_and_weights(path_or_name):
        return f"{named[0]}:{lasting_name(named[1])}"
    path = Path(path_or_name)
    return str(path.absolute()) if path.exists() else str(path_or_name)


def _architecture_and_weights(source: str | Path) -> tuple[str, str] | None:
    """The parts of ARCHITECTURE:WEIGHTS; None for any other name, and for a path of that name."""
    name, _, weights = str(source).partition(":")
    named = weights and not os.path.exists(source) and (config := read_architecture(name)) and is_open_clip(config)
    return (name, weights) if named else None


def weights_sha256(model: torch.nn.Module) -> str:
    """64 hexadecimal digits over a model's configuration and its weights."""
    return tensors_sha256(model.state_dict(), json.dumps(model.config, sort_keys=True, default=str))


_sha256_of = lru_cache(maxsize=8)(lambda model: weights_sha256(model()))


def loaded_weights() -> dict[str, str]:
    """`weights_sha256` of each loaded model that is still in use."""
    return {name: _sha256_of(model) for name, model in _loaded.items() if model() is not None}
