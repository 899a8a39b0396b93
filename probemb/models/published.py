"""The authors' published PCME++ weights, in this project's layout.

Source: the public code of PCME++ (its Hugging Face model class) and the layout of its state dict.
"""

from __future__ import annotations

import re
from pathlib import Path

from open_clip.transform import PreprocessCfg
from torch import Tensor

from probemb.errors import UserError
from probemb.models.dual_encoder import POOLING, DualEncoder, plain
from probemb.models.pretrained import load_strictly

# What the authors' configuration may say about the towers; they ignore everything else in it.
VISION_KEYS = ("layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size", "ls_init_value")
TEXT_KEYS = ("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "ls_init_value")
MARKS = ("visual.uncertainty_proj", "uncertainty_text_projection", "negative_scale", "shift")


def is_pcmepp(state: dict[str, Tensor]) -> bool:
    """Whether a state dict is in the authors' layout."""
    return all(mark in state for mark in MARKS)


def import_pcmepp(state_dict: dict[str, Tensor], config: dict, source: str | Path = "the state dict") -> DualEncoder:
    """A model with the authors' weights: head "clip", no bias in the log-variance heads.

    Args:
        state_dict: in the authors' layout (`visual.uncertainty_transformer…`, `uncertainty_text_projection`, …).
        config: theirs: {"embed_dim", "vision_cfg", "text_cfg", maybe "quick_gelu"}. What it leaves out is read from
            the shapes of the weights; heads are 64 wide.
        source: named in errors.

    Raises:
        UserError: if configuration and weights do not fit each other.
    """
    try:
        architecture, n_unc_layers = _architecture(state_dict, config)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"{source} is not a complete PCME++ model ({type(error).__name__}: {error}).",
            "Download both config.json and the weights again.",
        ) from error
    model = DualEncoder(
        {
            "name": "PCMEPP",
            "head": "clip",
            "embed_dim": architecture["embed_dim"],
            "n_unc_layers": n_unc_layers,
            "uncertainty_bias": False,
            "pooling": dict(POOLING),
            "architecture": architecture,
            "preprocess": plain(vars(PreprocessCfg(size=architecture["vision_cfg"]["image_size"]))),
        }
    )
    own = {"visual.uncertainty_proj": "visual.log_var_head.weight"}
    own |= {"uncertainty_text_projection": "text.log_var_head.weight"}
    own |= {"logit_scale": "logit_scale", "negative_scale": "scale", "shift": "shift"}
    state = {}
    for key, value in state_dict.items():
        name = own.get(key, key if key.startswith("visual.") else f"text.{key}")
        if name.endswith("log_var_head.weight"):
            value = value.T
        state[name] = value.reshape(1) if key in ("logit_scale", "negative_scale", "shift") else value
    load_strictly(model, state, source)
    return model


def _architecture(state: dict[str, Tensor], config: dict) -> tuple[dict, int | list[int]]:
    """open_clip's configuration and the number of uncertainty blocks (two where the towers differ).

    From the shapes, then from the configuration.
    """
    conv, embedding = state["visual.conv1.weight"], state["token_embedding.weight"]
    patch, width = conv.shape[-1], conv.shape[0]
    grid = round((len(state["visual.positional_embedding"]) - 1) ** 0.5)
    vision = {"layers": _depth(state, "visual.transformer"), "width": width, "patch_size": patch}
    vision |= {"image_size": grid * patch, "head_width": 64}
    text = {"context_length": len(state["positional_embedding"]), "vocab_size": len(embedding)}
    text |= {"width": embedding.shape[1], "heads": max(embedding.shape[1] // 64, 1)}
    text |= {"layers": _depth(state, "transformer")}
    theirs_vision, theirs_text = config.get("vision_cfg") or {}, config.get("text_cfg") or {}
    vision |= {key: theirs_vision[key] for key in VISION_KEYS if theirs_vision.get(key) is not None}
    text |= {key: theirs_text[key] for key in TEXT_KEYS if theirs_text.get(key) is not None}
    architecture = {
        "embed_dim": state["visual.proj"].shape[1],
        "vision_cfg": vision,
        "text_cfg": text,
        "quick_gelu": bool(config.get("quick_gelu", False)),
    }
    image, text = _depth(state, "visual.uncertainty_transformer"), _depth(state, "uncertainty_transformer")
    return architecture, image if image == text else [image, text]


def _depth(state: dict[str, Tensor], transformer: str) -> int:
    """Number of blocks of a transformer."""
    pattern = re.compile(re.escape(transformer) + r"\.resblocks\.(\d+)\.")
    return 1 + max((int(match[1]) for match in map(pattern.match, state) if match), default=-1)
