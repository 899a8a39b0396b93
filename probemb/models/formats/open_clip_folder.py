"""Folders in open_clip's layout, which `tools.export` writes and open_clip's hub repositories have.

open_clip_config.json           {"model_cfg", "preprocess_cfg"}
open_clip_model.safetensors     the weights, or
open_clip_pytorch_model.bin     pickled ones, which are read without executing anything
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from open_clip.transform import PreprocessCfg

from probemb.errors import UserError
from probemb.models.architectures import build_stock, check_memory, check_sizes, complete, is_open_clip, obstacle
from probemb.models.dual_encoder import POOLING, DualEncoder, plain
from probemb.models.inputs import create_transforms
from probemb.models.pretrained import PREPROCESS_KEYS, check_architecture, check_quick_gelu, fill_from_state

WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")  # the first one is taken
CONFIG = "open_clip_config.json"
PREPROCESSING = {*vars(PreprocessCfg()), "crop_pct"}  # the last one is ours, and open_clip ignores it
# What differs without another function of the weights: sizes that positions are resized to, texts that come tokenised,
# where random weights are replaced from, and what only training does.
FREE = {"image_size", "context_length", "hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode", "pad_id"}
FREE |= {"timm_model_pretrained", "hf_model_pretrained", "patch_dropout", "timm_drop", "timm_drop_path"}


class OpenClipFiles(NamedTuple):
    """The two files of a folder."""

    weights: Path
    config: Path


def find_open_clip(folder: Path) -> OpenClipFiles | None:
    """The files of a folder in open_clip's layout; None for any other."""
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None or not (folder / CONFIG).is_file():
        return None
    return OpenClipFiles(weights, folder / CONFIG)


def starting_point(about: dict, source: Path, name: str, architecture: dict) -> dict:
    """Preprocessing that weights require of a model that starts from them, as `find_pretrained` gives it.

    Args:
        about: the content of the configuration `source`.
        name, architecture: of the model that is to start from the weights.

    Raises:
        UserError: the configuration is malformed, or of another architecture.
    """
    theirs = _architecture(about, source)
    check_quick_gelu(str(source.parent), name, bool(theirs.get("quick_gelu", False)), architecture)
    same = dict(theirs)
    for part in ("vision_cfg", "text_cfg"):
        ours = architecture[part]
        same[part] = {key: value for key, value in theirs[part].items() if key not in FREE}
        same[part] |= {key: ours[key] for key in FREE & ours.keys()}
    try:
        check_architecture(
            {"name": name, "architecture": architecture}, {"name": "CLIP", "architecture": same}, str(source.parent)
        )
    except TypeError as error:  # a key that open_clip does not know
        raise _malformed(source, error) from error
    return {key: value for key, value in _preprocessing(about, source).items() if key in PREPROCESS_KEYS}


def import_open_clip(state: dict, about: dict, weights: Path, source: Path) -> DualEncoder:
    """A point model with open_clip's weights: head "clip", no uncertainty.

    Args:
        state: the tensors of the file `weights`; about: the content of the configuration `source`.

    Raises:
        UserError: the configuration is malformed, or of an architecture or of weights that cannot be read.
    """
    architecture = _architecture(about, source)
    try:
        check_sizes(architecture, state)
        check_memory(lambda: build_stock(architecture), state)
        stock = build_stock(architecture)
        config = {
            "name": "CLIP",
            "head": "clip",
            "embed_dim": architecture["embed_dim"],
            "n_unc_layers": 0,
            "probabilistic": False,
            "match": "distance" if stock.logit_bias is None else "cosine",
            "max_logit_scale": None,
            "uncertainty_bias": True,
            "pooling": dict(POOLING),
            "architecture": architecture,
            "preprocess": {
                **plain(vars(PreprocessCfg(size=architecture["vision_cfg"].get("image_size", 224)))),
                **_preprocessing(about, source),
            },
        }
        fill_from_state(stock, state, weights)
        model = DualEncoder(config, stock)
        create_transforms(model)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, AssertionError) as error:
        raise _malformed(source, error) from error
    return model


def _architecture(about: dict, source: Path) -> dict:
    """The architecture of a configuration. Raises UserError."""
    config = about.get("model_cfg")
    parts = [config.get(part) for part in ("vision_cfg", "text_cfg")] if isinstance(config, dict) else [None]
    if not all(isinstance(part, dict) for part in parts) or not isinstance(config.get("embed_dim"), int):
        raise _malformed(source, "model_cfg lacks embed_dim, vision_cfg or text_cfg")
    config = complete(plain(config))
    if config["vision_cfg"].get("timm_model_name"):
        config["vision_cfg"]["timm_model_pretrained"] = False  # the weights are here, and none are fetched
    if not is_open_clip(config) or (why := obstacle(config)):
        raise _malformed(source, why if is_open_clip(config) else "it is no architecture of open_clip's")
    return config


def _preprocessing(about: dict, source: Path) -> dict:
    """Its preprocessing. Raises UserError."""
    found = about.get("preprocess_cfg") or {}
    if not isinstance(found, dict):
        raise _malformed(source, "preprocess_cfg is no JSON object")
    return {key: plain(value) for key, value in found.items() if key in PREPROCESSING and value is not None}


def _malformed(source: Path, why: object) -> UserError:
    reason = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    return UserError(
        f"{source} describes no model that can be built here ({reason}).",
        "Fetch the folder again, or name another model.",
    )
