"""The authors' published PCME++ and ProLIP weights, in this project's layout.

Source: the public codes of PCME++ and ProLIP (their Hugging Face model classes) and the layouts of their state dicts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from open_clip.transform import PreprocessCfg
from torch import Tensor

from probemb.errors import UserError
from probemb.models.architectures import SIGLIP, build_stock, check_memory, check_sizes
from probemb.models.dual_encoder import POOLING, DualEncoder, plain
from probemb.models.pretrained import load_strictly

# What the authors' configuration may say about the towers; they ignore everything else in it.
VISION_KEYS = ("layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size", "ls_init_value")
TEXT_KEYS = ("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "ls_init_value")
PROLIP_TEXT_KEYS = ("norm_kwargs", "hf_tokenizer_name")
MARKS = ("visual.uncertainty_proj", "uncertainty_text_projection", "negative_scale", "shift")


PROLIP_MARKS = ("visual.unc_embedding", "visual.uncertainty_proj.weight", "text.unc_emb", "logit_bias")


def is_pcmepp(state: dict[str, Tensor]) -> bool:
    """True if a state dict is in the layout of PCME++."""
    return all(mark in state for mark in MARKS)


def is_prolip(state: dict[str, Tensor]) -> bool:
    """True if a state dict is in the layout of ProLIP."""
    return all(mark in state for mark in PROLIP_MARKS)


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
    return _read(partial(_read_pcmepp, source), state_dict, config, f"{source} is not a complete PCME++ model")


def _read_pcmepp(source: str | Path, state_dict: dict[str, Tensor], config: dict) -> DualEncoder:
    architecture, n_unc_layers = _pcmepp_architecture(state_dict, config)
    model = _model("PCMEPP", architecture, n_unc_layers=n_unc_layers, uncertainty_bias=False)
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


def import_prolip(state_dict: dict[str, Tensor], config: dict, source: str | Path = "the state dict") -> DualEncoder:
    """A model with the authors' weights: head "clip", uncertainty "prolip-code".

    [UNC] here is one vector: theirs is an embedding and a row of the position embeddings, which are added.

    Args:
        state_dict: in the authors' layout (`visual.unc_embedding`, `text.text_uncertainty_projection.weight`, …).
        config, source: as for `import_pcmepp`.

    Raises:
        UserError: if configuration and weights do not fit each other.
    """
    return _read(partial(_read_prolip, source), state_dict, config, f"{source} is not a complete ProLIP model")


def _read_prolip(source: str | Path, state_dict: dict[str, Tensor], config: dict) -> DualEncoder:
    architecture = _prolip_architecture(state_dict, config)
    about = {"objective": "prolip", "match": "cosine", "max_logit_scale": None}
    model = _model("ProLIP", architecture, n_unc_layers=0, uncertainty_bias=True, uncertainty="prolip-code", **about)
    heads = {
        "visual.uncertainty_proj.": "visual.log_var_head.",
        "text.text_uncertainty_projection.": "text.log_var_head.",
    }
    state = dict(state_dict)
    for theirs, ours in heads.items():
        state |= {
            f"{ours}{end}": state.pop(f"{theirs}{end}") for end in ("weight", "bias") if f"{theirs}{end}" in state
        }
    for tower, token, row in (
        ("visual", "unc_embedding", 1),
        ("text", "unc_emb", architecture["text_cfg"]["context_length"]),
    ):
        positions = state[f"{tower}.positional_embedding"]
        state[f"{tower}.uncertainty_token"] = state.pop(f"{tower}.{token}") + positions[row]
        state[f"{tower}.positional_embedding"] = torch.cat([positions[:row], positions[row + 1 :]])
    scale, bias = (state.pop(name).reshape(1) for name in ("logit_scale", "logit_bias"))
    state |= {"logit_scale": scale, "logit_bias": bias}
    load_strictly(model, state, source)
    return model


def _model(name: str, architecture: dict, **more) -> DualEncoder:
    """A model of the authors' with random weights; images are prepared as for CLIP."""
    config = {"name": name, "head": "clip", "embed_dim": architecture["embed_dim"], "pooling": dict(POOLING)}
    preprocess = plain(vars(PreprocessCfg(size=architecture["vision_cfg"]["image_size"])))
    return DualEncoder({**config, "architecture": architecture, "preprocess": preprocess, **more})


def _read(reader: Callable, state: dict[str, Tensor], config: dict, complaint: str) -> DualEncoder:
    """Read weights and configuration with `reader`. Raises UserError: something is missing or malformed there."""
    try:
        return reader(state, config)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError, AssertionError) as error:
        raise UserError(
            f"{complaint} ({type(error).__name__}: {error}).",
            "Download both config.json and the weights again.",
        ) from error


def _pcmepp_architecture(state: dict[str, Tensor], config: dict) -> tuple[dict, int | list[int]]:
    """open_clip's configuration and the number of uncertainty blocks (two where the towers differ)."""
    architecture = _architecture(state, config, "", n_prefix=1, text_keys=TEXT_KEYS)
    image, text = _depth(state, "visual.uncertainty_transformer"), _depth(state, "uncertainty_transformer")
    return architecture, image if image == text else [image, text]


def _prolip_architecture(state: dict[str, Tensor], config: dict) -> dict:
    """open_clip's configuration, with the class token behind a text that is not causal."""
    architecture = _architecture(state, config, "text.", n_prefix=2, text_keys=(*TEXT_KEYS, *PROLIP_TEXT_KEYS))
    text = architecture["text_cfg"]
    text["context_length"] = len(state["text.positional_embedding"]) - 2
    text |= {"embed_cls": True, "no_causal_mask": True, "pool_type": "last"}
    text |= {"proj_bias": "text.text_projection.bias" in state}
    if text["vocab_size"] == SIGLIP["vocab_size"]:
        text |= {"pad_id": SIGLIP["pad_id"], "tokenizer_kwargs": {"clean": "canonicalize"}}
        text.setdefault("hf_tokenizer_name", SIGLIP["name"])
    return {**architecture, "init_logit_bias": state["logit_bias"].item()}


def _architecture(
    state: dict[str, Tensor], config: dict, text_prefix: str, n_prefix: int, text_keys: tuple[str, ...]
) -> dict:
    """open_clip's configuration, from the shapes, then from theirs.

    Args:
        text_prefix: of the text tower's tensors.
        n_prefix: tokens before the patches of an image.
        text_keys: what to take of their text_cfg.
    """
    conv, embedding = state["visual.conv1.weight"], state[f"{text_prefix}token_embedding.weight"]
    patch, width = conv.shape[-1], conv.shape[0]
    grid = round((len(state["visual.positional_embedding"]) - n_prefix) ** 0.5)
    vision = {"layers": _depth(state, "visual.transformer"), "width": width, "patch_size": patch}
    vision |= {"image_size": grid * patch, "head_width": 64}
    text = {"context_length": len(state[f"{text_prefix}positional_embedding"]), "vocab_size": len(embedding)}
    text |= {"width": embedding.shape[1], "heads": max(embedding.shape[1] // 64, 1)}
    text |= {"layers": _depth(state, f"{text_prefix}transformer")}
    theirs_vision, theirs_text = config.get("vision_cfg") or {}, config.get("text_cfg") or {}
    vision |= {key: theirs_vision[key] for key in VISION_KEYS if theirs_vision.get(key) is not None}
    text |= {key: theirs_text[key] for key in text_keys if theirs_text.get(key) is not None}
    check_sizes({"vision_cfg": vision, "text_cfg": text}, state)
    architecture = {
        "embed_dim": state["visual.proj"].shape[1],
        "vision_cfg": vision,
        "text_cfg": text,
        "quick_gelu": bool(config.get("quick_gelu", False)),
    }
    check_memory(lambda: build_stock(architecture), state)
    return architecture


def _depth(state: dict[str, Tensor], transformer: str) -> int:
    """Number of blocks of a transformer."""
    pattern = re.compile(re.escape(transformer) + r"\.resblocks\.(\d+)\.")
    return 1 + max((int(match[1]) for match in map(pattern.match, state) if match), default=-1)
