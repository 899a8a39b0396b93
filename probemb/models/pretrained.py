"""Weights as a starting point: open_clip's tags and local files, and models that this project has trained."""

from __future__ import annotations

import codecs
import logging
import math
import pickle
import re
from dataclasses import asdict
from pathlib import Path

import open_clip
import torch
from open_clip.model import (
    CLIPTextCfg,
    CLIPVisionCfg,
    CustomTextCLIP,
    convert_to_custom_text_state_dict,
    resize_pos_embed,
    resize_text_pos_embed,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from probemb.errors import UserError, nearest
from probemb.models.dual_encoder import DualEncoder, per_tower

SCALARS = ("logit_scale", "logit_bias", "scale", "shift")
PREPROCESS_KEYS = ("mean", "std", "interpolation", "resize_mode")
CAPTIONING = "text_decoder."  # CoCa's third part, which embeds nothing
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PREFIX = "hf-hub:"  # open_clip's: looks nowhere else
# First parts of paths that people keep models under: runs/x that is missing is a wrong path, not a hub's repository.
LOCAL_FOLDERS = {
    *("checkpoint", "checkpoints", "data", "demo", "exp", "experiments", "export", "exports", "indexes", "embeddings"),
    *("logs", "model", "models", "out", "output", "outputs", "results", "run", "runs", "tmp", "weights"),
}

logger = logging.getLogger(__name__)


def find_pretrained(name: str, source: str, quick_gelu: bool) -> tuple[Path, dict]:
    """The weights file of a tag (downloaded if it is not in the cache) or of a path, for the configuration `name`.

    Returns:
        the file, and what the weights ask of the preprocessing (a part of open_clip's PreprocessCfg; empty for paths).

    Raises:
        UserError: for an unknown tag, no network, or a tag whose weights were trained with another activation than the
            configuration's.
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
    check_quick_gelu(source, name, bool(tag.get("quick_gelu", False)), {"quick_gelu": quick_gelu})
    try:
        path = open_clip.download_pretrained(tag)
    except Exception as error:  # whatever the network, the server or the disk raise
        raise UserError(
            f"The weights '{source}' of {name} could not be downloaded ({_first_line(error)}).",
            "Check the network, or download them elsewhere and name the file as model.pretrained.",
        ) from error
    return Path(path), {key: tag[key] for key in PREPROCESS_KEYS if tag.get(key)}


def check_quick_gelu(source: str, name: str, trained_with: bool, architecture: dict) -> None:
    """Raise UserError for weights that were trained with another activation than the architecture `name` has."""
    quick_gelu = bool(architecture.get("quick_gelu", False))
    if trained_with != quick_gelu:
        twin = name.removesuffix("-quickgelu") if quick_gelu else f"{name}-quickgelu"
        raise UserError(
            f"The weights '{source}' were trained with another activation than {name} has.",
            f"Name the model {twin} to use them.",
        )


def fill_stock(stock: CustomTextCLIP, path: Path) -> None:
    """Loads a file of open_clip weights, in either of open_clip's layouts; position embeddings are resized to fit.

    Raises:
        UserError: for a file that cannot be read, or the weights of another model.
    """
    fill_from_state(stock, read_state_dict(path), path)


def fill_from_state(stock: CustomTextCLIP, state: dict[str, Tensor], path: Path) -> None:
    """`fill_stock`, of what the file holds."""
    state = dict(state)
    if "positional_embedding" in state:  # the layout without a text tower of its own
        state = convert_to_custom_text_state_dict(state)
    for scalar in ("logit_scale", "logit_bias"):
        if scalar in state and getattr(stock, scalar) is not None:
            state[scalar] = state[scalar].reshape(1)
    state = {key: value for key, value in state.items() if not key.startswith(CAPTIONING)}
    _resize_positions(state, stock)
    load_strictly(stock, state, path)


def is_saved_model(source: str) -> bool:
    """True if `load_model` should read a source: a folder, weights with their configuration inside, or a hub name."""
    path = Path(source)
    if path.is_file():
        try:
            with safe_open(path, framework="pt") as file:
                return "config" in (file.metadata() or {})
        except (SafetensorError, OSError):
            return False
    return path.is_dir() or is_hub_name(source)


def is_hub_name(source: str) -> bool:
    """True if a source is looked up on the hub: hf-hub:owner/name, or owner/name that does not look like a local path.

    A path is local if its first folder is here, or is called as people call folders of models (runs/x).
    """
    if source.startswith(HUB_PREFIX):
        return bool(HUB_NAME.fullmatch(source.removeprefix(HUB_PREFIX)))
    owner = source.partition("/")[0]
    local = owner.lower() in LOCAL_FOLDERS or Path(source).parent.is_dir() or source.endswith((".safetensors", ".pt"))
    return bool(HUB_NAME.fullmatch(source)) and not local


def fill_from_model(model: DualEncoder, source: DualEncoder, where: str) -> None:
    """Copies what two models of one architecture have in common, and resizes nothing.

    The trunk, the mean branch's blocks and the scalars always; the heads if both models have the same kind; the
    uncertainty branch if both have as many blocks in it (or the token, if both have one), and its head if that is of
    the same kind and size too; the composer if both have the same one. What is not copied stays as it is (random in a
    new model), as the heads do on the way from "clip" to "gpo".

    Args:
        where: what to call the source in errors.

    Raises:
        UserError: names both sides where the architecture, the image size, or a head of the same kind differ.
    """
    ours, theirs = model.config, source.config
    same_head = ours["head"] == theirs["head"]
    same_branch = (
        model.probabilistic
        and source.probabilistic
        and ours["uncertainty"] == theirs["uncertainty"]
        and per_tower(ours["n_unc_layers"]) == per_tower(theirs["n_unc_layers"])
    )
    same_composer = type(model.composer) is type(source.composer) and ours["embed_dim"] == theirs["embed_dim"]
    same_size = (ours["covariance"] == "spherical") == (theirs["covariance"] == "spherical")  # as many outputs
    check_architecture(ours, theirs, where)
    if ours["head"] == "clip" != theirs["head"]:
        raise UserError(
            f"{where} has a '{theirs['head']}' head and no projection for the 'clip' head of this model.",
            f"Choose head '{theirs['head']}', or start from a model with head 'clip'.",
        )
    if same_head:
        keys = ["embed_dim"]
        keys += ["pooling"] if ours["head"] == "gpo" else []
        keys += ["uncertainty_bias"] if same_branch else []
        for key in keys:
            if ours[key] != theirs[key]:
                raise UserError(
                    f"{where} has {key} {theirs[key]}, this model has {ours[key]}.",
                    f"Set {key} to {theirs[key]}, or choose another head to start with a random one.",
                )
    if model.probabilistic and source.probabilistic and not same_branch:
        logger.warning(
            f"{where} has {_uncertainty(theirs)}, this model has {_uncertainty(ours)}: the uncertainty starts from "
            "random weights."
        )
    own, given = model.state_dict(), source.state_dict()

    def taken(key: str) -> bool:
        tower, _, name = key.partition(".")
        if tower == "composer":
            return same_composer
        if tower not in ("visual", "text"):
            return tower not in SCALARS or tower in given  # models differ in which they have
        if name.startswith("mean_head."):
            return same_head
        if name.startswith("log_var_head."):
            return same_branch and same_head and same_size
        return same_branch or getattr(model, tower).place(name).part != "branch"

    load_strictly(model, {key: given[key] if taken(key) else own[key] for key in own}, where)


def _uncertainty(config: dict) -> str:
    if config["uncertainty"] != "branch":
        return f"an uncertainty token ({config['uncertainty']})"
    return f"{config['n_unc_layers']} blocks in its uncertainty branch"


def check_architecture(ours: dict, theirs: dict, where: str) -> None:
    """Raise UserError where the architectures of two configurations of models differ; `where`: the source of theirs."""
    here, there = _full_architecture(ours["architecture"]), _full_architecture(theirs["architecture"])
    different = [key for key in {**here, **there} if here.get(key) != there.get(key)]
    if different:
        listed = ", ".join(
            [f"{key} {shortened(there.get(key))} against {shortened(here.get(key))}" for key in different[:4]]
            + ["…"] * bool(different[4:])
        )
        raise UserError(
            f"{where} is a {theirs['name']} and does not fit {ours['name']} ({listed}).",
            "Name the architecture and the image size that it was trained with.",
        )


def shortened(value) -> str:
    """A value of a configuration, in a message."""
    return f"of {len(value):,} words" if isinstance(value, list) and len(value) > 8 else str(value)


def _full_architecture(config: dict) -> dict:
    """Everything that a configuration says or leaves to open_clip's defaults, but for the projection."""
    flat = {"quick_gelu": bool(config.get("quick_gelu", False))}
    for part, label, defaults in (("vision_cfg", "image", CLIPVisionCfg), ("text_cfg", "text", CLIPTextCfg)):
        cfg = config[part] if "tower" in config[part] else asdict(defaults(**config[part]))
        flat |= {f"{label} {key}": value for key, value in cfg.items()}
    return flat


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors file or of a pickled one (read without executing anything), on the CPU.

    A "state_dict" entry and a "module." prefix, as open_clip's trainer writes them, are taken off.

    Raises:
        UserError: for a file that is neither, or holds anything but named tensors.
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
        return _first_line(error)
    with path.open("rb") as file:
        head = file.read(4096)
    if _is_text(head):  # a word of it may look like the name of an object in a pickle
        return "it is text, no file of weights"
    if found := re.search(r"\bGLOBAL ([\w.]+)", str(error)):
        return f"it holds a Python object, {found[1]}, which is not loaded"
    if not head.startswith(b"PK"):
        return "it is damaged, or no file of weights"
    unpickled = isinstance(error, pickle.UnpicklingError)
    return "it holds more than tensors" if unpickled else "its archive is damaged or cut short"


def _is_text(head: bytes) -> bool:
    """True if the start of a file is UTF-8 without control characters."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return all(char.isprintable() or char.isspace() for char in text)


def load_strictly(model: torch.nn.Module, state: dict[str, Tensor], source: str | Path) -> None:
    """`load_state_dict`, all or nothing.

    Raises:
        UserError: names the first tensors that are NaN or Inf, missing, surplus, of another shape or kind; the model is
            then unchanged.
    """
    if broken := [key for key, value in state.items() if not value.isfinite().all()]:
        raise UserError(
            f"{source} holds weights that are NaN or Inf ({len(broken)} tensors: {_some(broken)}).",
            "Name an earlier checkpoint, or train again with a lower learning rate.",
        )
    own = model.state_dict()
    complaints = {
        "missing": [key for key in own if key not in state],
        "not part of this model": [key for key in state if key not in own],
        "of another shape": [key for key in own if key in state and own[key].shape != state[key].shape],
        "no floating-point numbers, or should be none": [
            key for key in own if key in state and own[key].is_floating_point() != state[key].is_floating_point()
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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
