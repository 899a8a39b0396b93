"""Architectures by name: open_clip's configurations, and the project's own in `configs/` or in a file, of one form.

{"embed_dim", "vision_cfg", "text_cfg", maybe "quick_gelu", "init_logit_scale", "init_logit_bias"}. A tower of ours has
a "tower" key in its part, a kind of `towers`; the other keys are its arguments.
"""

import json
import math
from importlib.util import find_spec
from pathlib import Path

import open_clip
import torch
from open_clip.model import _build_text_tower, _build_vision_tower
from torch import nn

from probemb.errors import UserError, nearest
from probemb.models.weights import refused

OWN = {path.stem: path for path in sorted((Path(__file__).parent / "configs").glob("*.json"))}
# The tokenizer of SigLIP, and of ProLIP's weights: an end token, repeated, is the padding.
SIGLIP = {"name": "timm/ViT-B-16-SigLIP", "i18n": "timm/ViT-B-16-SigLIP-i18n-256", "vocab_size": 32000, "pad_id": 1}


def architecture(name: str) -> dict:
    """A copy of the configuration of a name. Raises UserError: unknown, or it cannot be made probabilistic."""
    config = read_architecture(name)
    if config is None or (why := obstacle(config)):
        what = f"'{name}' cannot become probabilistic: {why}." if config else f"There is no model '{name}'."
        raise UserError(
            f"{what}{nearest(name, supported_names())}",
            f"Name one of open_clip's models (open_clip.list_models() prints them), the path of a JSON such as "
            f"probemb/models/configs/*.json, or {', '.join(OWN)}.",
        )
    return config


def read_architecture(name: str) -> dict | None:
    """The configuration of a name or in a .json file, supported or not; None for an unknown name. Raises UserError."""
    if name in OWN:
        return json.loads(OWN[name].read_text(encoding="utf-8"))
    if name.endswith(".json"):
        remedy = f"Write it as one of the project's, such as {next(iter(OWN.values()))}."
        with refused(f"{name} is no architecture", remedy):
            config = complete(json.loads(Path(name).read_text(encoding="utf-8")))
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                if tower_kind(config, "text_cfg") != "open_clip.hf":  # whose folder text_weights may name
                    Stock(config)
            return config
    config = open_clip.get_model_config(name) if ":" not in name else None
    return config and complete(config)


def complete(config: dict) -> dict:
    """Add what open_clip's configurations leave out, in place: the padding of SigLIP's tokenizer."""
    if config.get("text_cfg", {}).get("hf_tokenizer_name") in (SIGLIP["name"], SIGLIP["i18n"]):
        config["text_cfg"].setdefault("pad_id", SIGLIP["pad_id"])
    return config


def supported_names() -> list[str]:
    return [name for name in (*OWN, *open_clip.list_models()) if obstacle(read_architecture(name)) is None]


def obstacle(config: dict) -> str | None:
    """Reason that an architecture cannot be made probabilistic; None if it can."""
    vision, text = config.get("vision_cfg"), config.get("text_cfg")
    if not vision or not text or "genlip_cfg" in config:
        return "it does not embed both images and texts"
    if "naflex" in f"{vision.get('timm_model_name')} {vision.get('timm_model_kwargs')}":
        return "it reads images as patches of any number and shape (NaFlex)"
    if text.get("hf_model_name") and find_spec("transformers") is None:
        return "its text tower needs the package transformers (pip install 'probemb[hf]')"
    return None


def tower_kind(config: dict, part: str) -> str:
    """The kind of tower, a key of `towers`' tables, of a part ("vision_cfg" or "text_cfg")."""
    cfg = config[part]
    if "tower" in cfg:
        return cfg["tower"]
    if cfg.get("timm_model_name"):
        return "open_clip.timm"
    if cfg.get("hf_model_name"):
        return "open_clip.hf"
    return "open_clip.resnet" if isinstance(cfg.get("layers", 12), list | tuple) else "open_clip.transformer"


def reads_words(config: dict | None) -> bool:
    """True if an architecture's text tower reads words of a vocabulary: text_cfg["vocabulary"]."""
    return config is not None and config["text_cfg"].get("tower") in ("word_gru", "word_mean")


def reads_regions(config: dict | None) -> bool:
    """True if an architecture's image tower reads precomputed regions instead of pixels."""
    return config is not None and config["vision_cfg"].get("tower") == "regions"


def is_open_clip(config: dict) -> bool:
    """True if open_clip can build the whole architecture, so that its weights can be loaded and exported."""
    return "tower" not in config["vision_cfg"] and "tower" not in config["text_cfg"]


class Stock(nn.Module):
    """The deterministic model behind a probabilistic one, as open_clip's `CustomTextCLIP`; a tower of ours is None."""

    def __init__(self, config: dict):
        super().__init__()
        self.visual = None if "tower" in config["vision_cfg"] else stock_image_tower(config)
        self.text = None if "tower" in config["text_cfg"] else stock_text_tower(config)
        scale, bias = config.get("init_logit_scale", math.log(1 / 0.07)), config.get("init_logit_bias")
        self.logit_scale = nn.Parameter(torch.full((1,), float(scale)))
        self.logit_bias = None if bias is None else nn.Parameter(torch.full((1,), float(bias)))


def stock_image_tower(config: dict) -> nn.Module:
    return _build_vision_tower(config["embed_dim"], config["vision_cfg"], config.get("quick_gelu", False))


def stock_text_tower(config: dict, pretrained: bool = False) -> nn.Module:
    """open_clip's, with random weights; `pretrained`: those of Hugging Face's model."""
    text = config["text_cfg"]
    text = {**text, "hf_model_pretrained": pretrained} if text.get("hf_model_name") else text
    remedy = "Check the network, or name a folder of the model's files (model.text_weights; in a JSON, hf_model_name)."
    with refused(f"The text tower '{text.get('hf_model_name')}' could not be built", remedy):
        return _build_text_tower(config["embed_dim"], text, config.get("quick_gelu", False))


for _path in OWN.values():
    if is_open_clip(json.loads(_path.read_text(encoding="utf-8"))):
        open_clip.add_model_config(_path)  # adds a name to open_clip's list and takes none away
