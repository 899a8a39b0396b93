"""Files of weights: written as a whole, read without executing anything, loaded all or nothing; open_clip's tags."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import re
from pathlib import Path

import open_clip
import torch
from open_clip.model import CustomTextCLIP, convert_to_custom_text_state_dict, resize_pos_embed, resize_text_pos_embed
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from probemb.errors import UserError, nearest
from probemb.files import replace_file, replace_text

PREPROCESS_KEYS = ("mean", "std", "interpolation", "resize_mode")
CAPTIONING = "text_decoder."  # CoCa's third part, which embeds nothing
SHA256 = "tensors_sha256"  # in a saved configuration, beside what describes the model


def digest_tensors(digest, state: dict[str, Tensor]) -> None:
    """Feed a hash with the names, shapes, types and bytes of tensors, in the order of their names."""
    for name, tensor in sorted(state.items()):
        digest.update(f"|{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def tensors_sha256(state: dict[str, Tensor]) -> str:
    """64 hexadecimal digits over tensors and their names."""
    digest = hashlib.sha256()
    digest_tensors(digest, state)
    return digest.hexdigest()


def write_model(weights: Path, state: dict[str, Tensor], config: Path, about: dict, embed: bool = False) -> None:
    """Write tensors, and their configuration as JSON with the tensors' SHA-256; each file is replaced as a whole.

    `embed` puts the configuration into the weights file too. Raises UserError: they cannot be written.
    """
    about = {**about, SHA256: tensors_sha256(state)}
    metadata = {"config": json.dumps(about)} if embed else None
    try:
        replace_file(weights, lambda path: save_file(state, path, metadata))
        replace_text(config, json.dumps(about, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The model cannot be written to {weights.parent} ({getattr(error, 'strerror', None) or error}).",
            "Choose a folder that you can write to, on a disk with free space.",
        ) from error


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors file or of a pickled one (read without executing anything), on the CPU.

    A "state_dict" entry and a "module." prefix, as open_clip's trainer writes them, are taken off. Raises UserError: a
    file that is neither, or holds anything but named tensors.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the restricted unpickler fails in many ways on bytes that are no pickle
        raise UserError(
            f"{path} cannot be read as model weights ({_why_unreadable(path, error)}).",
            "Give a .safetensors file, or a .pt file that holds nothing but tensors.",
        ) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(
            f"{path} does not hold a dictionary of tensors.", "Give a file that was saved from a model's state_dict()."
        )
    if all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    return state


def _why_unreadable(path: Path, error: Exception) -> str:
    """The reason in our words: torch's own messages advise to load pickles without protection."""
    if path.suffix == ".safetensors" or not path.is_file():
        return first_line(error)
    if found := re.search(r"\bGLOBAL ([\w.]+)", str(error)):
        return f"it holds a Python object, {found[1]}, which is not loaded"
    return "it holds more than tensors" if isinstance(error, pickle.UnpicklingError) else "it is damaged or cut short"


def first_line(error: Exception) -> str:
    """The first line of another package's error, for a message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def load_strictly(model: torch.nn.Module, state: dict[str, Tensor], source: str | Path) -> None:
    """`load_state_dict`, all or nothing. Raises UserError: tensors (named) are NaN or Inf, missing, surplus, of another
    shape or kind.
    """
    if broken := [key for key, value in state.items() if not value.isfinite().all()]:
        raise UserError(
            f"{source} holds weights that are NaN or Inf ({len(broken)} tensors: {_some(broken)}).",
            "Name an earlier checkpoint, or train again with a lower learning rate.",
        )
    own = model.state_dict()
    both = [key for key in own if key in state]
    complaints = {
        "missing": [key for key in own if key not in state],
        "not part of this model": [key for key in state if key not in own],
        "of another shape": [key for key in both if own[key].shape != state[key].shape],
        "of another kind of number": [
            key for key in both if own[key].is_floating_point() != state[key].is_floating_point()
        ],
    }
    found = [f"{len(keys)} tensors are {what}: {_some(keys)}" for what, keys in complaints.items() if keys]
    if found:
        raise UserError(
            f"{source} holds the weights of another model ({'; '.join(found)}).",
            "Name the architecture, head and n_unc_layers that the weights were trained with.",
        )
    model.load_state_dict(state)


def _some(keys: list[str]) -> str:
    return f"{', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}"


# ---------------------------------------------------------------------------------------------------- open_clip's


def find_pretrained(name: str, source: str, quick_gelu: bool) -> tuple[Path, dict]:
    """The weights file of a tag of the architecture `name` (downloaded if it is not in the cache) or of a path, and
    what the weights ask of the preprocessing (a part of open_clip's PreprocessCfg; empty for paths).
    """
    if Path(source).is_file():
        return Path(source), {}
    tag = open_clip.get_pretrained_cfg(name, source)
    if not tag:
        tags = open_clip.list_pretrained_tags_by_model(name)
        raise UserError(
            f"'{source}' is neither a file nor a weight tag of {name}.{nearest(source, tags)}",
            f"Give a run, a path to open_clip weights, or one of: {', '.join(tags) or 'no tags for this model'}.",
        )
    check_quick_gelu(source, name, bool(tag.get("quick_gelu", False)), quick_gelu)
    try:
        path = open_clip.download_pretrained(tag)
    except Exception as error:  # whatever the network, the server or the disk raise
        raise UserError(
            f"The weights '{source}' of {name} could not be downloaded ({first_line(error)}).",
            "Check the network, or download them elsewhere and name the file as model.pretrained.",
        ) from error
    return Path(path), {key: tag[key] for key in PREPROCESS_KEYS if tag.get(key)}


def check_quick_gelu(source: str, name: str, trained_with: bool, quick_gelu: bool) -> None:
    """Raise UserError for weights that were trained with another activation than the architecture `name` has."""
    if trained_with != quick_gelu:
        twin = name.removesuffix("-quickgelu") if quick_gelu else f"{name}-quickgelu"
        raise UserError(
            f"The weights '{source}' were trained with another activation than {name} has.",
            f"Name the model {twin} to use them.",
        )


def fill_stock(stock: CustomTextCLIP, state: dict[str, Tensor], path: Path) -> None:
    """Load open_clip's weights, in either of its layouts; position embeddings are resized to fit."""
    state = dict(state)
    if "positional_embedding" in state:  # the layout without a text tower of its own
        state = convert_to_custom_text_state_dict(state)
    for scalar in ("logit_scale", "logit_bias"):
        if scalar in state and getattr(stock, scalar) is not None:
            state[scalar] = state[scalar].reshape(1)
    state = {key: value for key, value in state.items() if not key.startswith(CAPTIONING)}
    _resize_positions(state, stock)
    load_strictly(stock, state, path)


def _resize_positions(state: dict[str, Tensor], stock: CustomTextCLIP) -> None:
    """Position embeddings for another image size or context length; what cannot be resized is left to be refused."""
    image, text = (state.get(f"{tower}.positional_embedding") for tower in ("visual", "text"))
    if image is not None and image.ndim == 2 and math.isqrt(max(len(image) - 1, 0)) ** 2 == len(image) - 1 > 0:
        resize_pos_embed(state, stock)
    pool = "visual.attnpool.positional_embedding"  # a ResNet's
    if pool in state and state[pool].ndim == 2:
        state[pool] = _resize_grid(state[pool], len(stock.visual.attnpool.positional_embedding))
    if text is not None and text.ndim == 2 and text.shape[1] == stock.text.width:
        resize_text_pos_embed(state, stock)


def _resize_grid(positions_TW: Tensor, n: int) -> Tensor:
    """Positions of a square grid behind a class token, interpolated to n; left alone where that is no grid."""
    old, new = math.isqrt(len(positions_TW) - 1), math.isqrt(n - 1)
    if old == new or old**2 != len(positions_TW) - 1:
        return positions_TW
    grid = positions_TW[1:].T.reshape(1, -1, old, old)
    grid = torch.nn.functional.interpolate(grid, (new, new), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([positions_TW[:1], grid.flatten(2)[0].T])
