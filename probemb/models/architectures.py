"""Architectures by name: open_clip's configurations, and the project's own in `configs/`, in the same form.

{"embed_dim", "vision_cfg", "text_cfg", maybe "quick_gelu", "init_logit_scale", "init_logit_bias"}. A tower of ours has
a "tower" key in its part, the name of a kind below; all other keys of that part are the tower's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import open_clip
import torch
from open_clip.model import CustomTextCLIP, _build_text_tower, _build_vision_tower
from torch import nn

from probemb.errors import UserError, nearest

OWN = {path.stem: path for path in sorted((Path(__file__).parent / "configs").glob("*.json"))}
# Modules of `towers/` by the kind of tower, see `tower_kind`.
IMAGE_TOWERS = {
    "open_clip.transformer": "open_clip.vision_transformer",
    "open_clip.timm": "open_clip.timm",
    "open_clip.resnet": "open_clip.resnet",
    "timm": "timm_image",
    "small_cnn": "small_cnn",
    "regions": "regions",
}
TEXT_TOWERS = {
    "open_clip.transformer": "open_clip.text_transformer",
    "open_clip.hf": "open_clip.hf",
    "word_gru": "word_gru",
    "word_mean": "word_mean",
}
REGION_TOWERS = {"regions"}  # read precomputed regions instead of pixels
WORD_TOWERS = {"word_gru", "word_mean"}  # read words of a vocabulary: text_cfg["vocabulary"]
TOKEN_TOWERS = {"open_clip.transformer"}  # have a place for an uncertainty token
# The tokenizer of SigLIP, and of ProLIP's weights: an end token, repeated, is the padding.
SIGLIP = {"name": "timm/ViT-B-16-SigLIP", "i18n": "timm/ViT-B-16-SigLIP-i18n-256", "vocab_size": 32000, "pad_id": 1}
FOREIGN = {  # parts of open_clip's architectures that embed something else, by key
    "audio_cfg": "it embeds audio and no images (CLAP)",
    "genlip_cfg": "it generates captions and embeds no texts (GenLIP)",
    "genlap_cfg": "it generates captions of audio (GenLAP)",
}
SIZES = {
    *("layers", "width", "widths", "hidden", "heads", "head_width", "mlp_ratio", "patch_size", "image_size"),
    *("context_length", "vocab_size", "regions", "features", "convolutions", "groups"),
}
VECTOR_TOWERS = {"word_mean"}  # pool word vectors that are inputs: their pooled features depend on no weight


def architecture(name: str, image_size: int | None = None) -> dict:
    """The configuration of a name, a fresh copy.

    `image_size` replaces the configuration's own, in pixels.

    Raises:
        UserError: for an unknown name, or an architecture that cannot be made probabilistic.
    """
    config = read_architecture(name)
    if config is None:
        raise UserError(
            f"There is no model '{name}'.{nearest(name, supported_names())}",
            f"Name one of open_clip's models (open_clip.list_models() prints them) or {', '.join(OWN)}.",
        )
    if why := obstacle(config):
        raise UserError(
            f"The model '{name}' cannot become probabilistic here: {why}.", "Choose another, such as ViT-B-16."
        )
    if image_size is not None:
        if reads_regions(config):
            raise UserError(f"{name} reads regions, which have no image_size.", "Leave image_size out.")
        patch_size = config["vision_cfg"].get("patch_size") or 1  # a ResNet has null
        if image_size < patch_size:
            raise UserError(
                f"An image of {image_size} pixels is smaller than one patch of {name} ({patch_size} pixels).",
                f"Set image_size to a multiple of {patch_size}.",
            )
        config["vision_cfg"]["image_size"] = image_size
    return config


def read_architecture(name: str) -> dict | None:
    """The configuration of a name, supported or not; None for an unknown one."""
    if name in OWN:
        return json.loads(OWN[name].read_text(encoding="utf-8"))
    config = open_clip.get_model_config(name) if ":" not in name else None
    return config and complete(config)


def complete(config: dict) -> dict:
    """A configuration of open_clip's with what these leave out: the padding of SigLIP's tokenizer. Changes it."""
    if config.get("text_cfg", {}).get("hf_tokenizer_name") in (SIGLIP["name"], SIGLIP["i18n"]):
        config["text_cfg"].setdefault("pad_id", SIGLIP["pad_id"])
    return config


def supported_names() -> list[str]:
    """Names that `architecture` accepts."""
    return [name for name in (*OWN, *open_clip.list_models()) if obstacle(read_architecture(name)) is None]


def check_sizes(config: dict, state: dict[str, torch.Tensor]) -> None:
    """Raise ValueError for an untrusted architecture with invalid sizes, or sizes that its weights cannot have."""
    largest = max((n for tensor in state.values() for n in tensor.shape), default=0)
    most = {"layers": len(state), **dict.fromkeys(("width", "hidden", "vocab_size", "features"), largest)}
    for part in ("vision_cfg", "text_cfg"):
        for key in SIZES & config[part].keys():
            found = config[part][key]
            for size in found if isinstance(found, list) else [found]:
                if size is not None and not (type(size) in (int, float) and 0 < size <= most.get(key, 10**5)):
                    raise ValueError(f"{part} has {key} {found}")


def check_memory(make: Callable[[], nn.Module], state: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if a model of an untrusted configuration has tensors far larger than its weights, which resized
    position embeddings may exceed. `make` builds it; here without memory.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        wanted = make().state_dict()
    largest = max((tensor.numel() for tensor in state.values()), default=0)
    for name, tensor in wanted.items():
        if tensor.numel() > 16 * (state[name].numel() if name in state else largest):
            raise ValueError(f"{name} has {tensor.numel():,} numbers, far more than the weights")


def tower_kind(config: dict, part: str) -> str:
    """The kind of tower that a part ("vision_cfg" or "text_cfg") of an architecture describes: a key of `towers`, or
    "none" where the architecture has no such part.
    """
    cfg = config.get(part)
    if cfg is None:
        return "none"
    if "tower" in cfg:
        return cfg["tower"]
    if cfg.get("timm_model_name"):
        return "open_clip.timm"
    if cfg.get("hf_model_name"):
        return "open_clip.hf"
    return "open_clip.resnet" if isinstance(cfg.get("layers", 12), list | tuple) else "open_clip.transformer"


def reads_words(config: dict | None) -> bool:
    """True if an architecture's text tower needs a vocabulary."""
    return config is not None and tower_kind(config, "text_cfg") in WORD_TOWERS


def reads_vectors(config: dict | None) -> bool:
    """True if an architecture's pooled text features are inputs, which depend on no weight."""
    return config is not None and tower_kind(config, "text_cfg") in VECTOR_TOWERS


def reads_regions(config: dict | None) -> bool:
    """True if an architecture's image tower reads precomputed regions instead of pixels."""
    return config is not None and tower_kind(config, "vision_cfg") in REGION_TOWERS


def check_uncertainty_token(config: dict) -> None:
    """Raise UserError for an architecture that has no place for an uncertainty token."""
    kinds = {part: tower_kind(config, f"{cfg}_cfg") for part, cfg in (("image", "vision"), ("text", "text"))}
    for part, kind in kinds.items():
        if kind not in TOKEN_TOWERS:
            raise UserError(
                f"An uncertainty token needs open_clip's own transformers, and the {part} tower is of the kind {kind}.",
                "Set uncertainty to branch, or choose an architecture such as ViT-B-16 or ViT-Tiny-64.",
            )


def bidirectional_text(config: dict) -> dict:
    """An architecture with ProLIP's text tower: every word sees every other, and a class token is what is pooled."""
    return {**config, "text_cfg": {**config["text_cfg"], "embed_cls": True, "no_causal_mask": True}}


def is_open_clip(config: dict) -> bool:
    """True if open_clip can build the whole architecture, so that its weights can be loaded and exported."""
    return "tower" not in config["vision_cfg"] and "tower" not in config["text_cfg"]


def check_n_unc_layers(n: int, available: int, which: str) -> None:
    """Raise UserError for an uncertainty branch longer than its tower."""
    if not 0 <= n <= available:
        raise UserError(
            f"n_unc_layers is {n}, but the {which} tower has {available} blocks.",
            f"Set it to a number from 0 to {available}; two numbers are for image and text.",
        )


class Stock(nn.Module):
    """The deterministic model behind a probabilistic one, as far as open_clip knows its towers.

    Attributes:
        visual, text: open_clip's towers; None for one of ours.
        logit_scale: (1,) log of the inverse temperature.
        logit_bias: (1,), or None where the architecture was not made for a sigmoid loss.
    """

    def __init__(self, config: dict):
        super().__init__()
        self.visual = None if "tower" in config["vision_cfg"] else stock_image_tower(config)
        self.text = None if "tower" in config["text_cfg"] else stock_text_tower(config)
        bias = config.get("init_logit_bias")
        self.logit_scale = nn.Parameter(torch.full((1,), float(config.get("init_logit_scale", np.log(1 / 0.07)))))
        self.logit_bias = None if bias is None else nn.Parameter(torch.full((1,), float(bias)))


def build_stock(config: dict) -> CustomTextCLIP | Stock:
    """The deterministic model of an architecture: open_clip's own if it can build it."""
    if not is_open_clip(config):
        return Stock(config)
    # Of a captioning model (CoCa) only the two towers: its decoder, "multimodal_cfg", has no part in embeddings.
    options = {key: value for key, value in config.items() if key not in ("custom_text", "multimodal_cfg")}
    options["text_cfg"] = _random_text(config["text_cfg"])
    with _hub_errors(config):
        return CustomTextCLIP(**options, nonscalar_logit_scale=True)


def stock_parameter_names(config: dict) -> list[str]:
    """The keys of the deterministic model's state dict."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return list(build_stock(config).state_dict())


def stock_image_tower(config: dict) -> nn.Module:
    """open_clip's image tower of a configuration, with random weights."""
    return _build_vision_tower(config["embed_dim"], config["vision_cfg"], config.get("quick_gelu", False))


def stock_text_tower(config: dict) -> nn.Module:
    """open_clip's text tower of a configuration, with random weights."""
    with _hub_errors(config):
        return _build_text_tower(config["embed_dim"], _random_text(config["text_cfg"]), config.get("quick_gelu", False))


def _random_text(text: dict) -> dict:
    """A text configuration whose Hugging Face model, if it has one, is built without downloading its weights."""
    return {**text, "hf_model_pretrained": False} if text.get("hf_model_name") else text


@contextmanager
def _hub_errors(config: dict) -> Iterator[None]:
    """UserError for a Hugging Face configuration that cannot be read."""
    try:
        yield
    except OSError as error:  # what transformers raises without network, and for a name that does not exist
        raise UserError(
            f"The configuration of the text tower '{config['text_cfg'].get('hf_model_name')}' could not be read.",
            "Check the network, or give hf_model_name a folder that holds the model's config.json.",
        ) from error


def obstacle(config: dict) -> str | None:
    """Reason that an architecture cannot be made probabilistic; None if it can."""
    for part, what in FOREIGN.items():
        if part in config:
            return what
    image, text = tower_kind(config, "vision_cfg"), tower_kind(config, "text_cfg")
    if image == "none":
        return "it has no image tower"
    if text == "none":
        return "it has no text tower of its own (MaMMUT)"
    name, more = (config["vision_cfg"].get(key) for key in ("timm_model_name", "timm_model_kwargs"))
    if "naflex" in str(name) or (isinstance(more, dict) and more.get("use_naflex")):
        return "it reads images as patches of any number and shape (NaFlex)"
    if image not in IMAGE_TOWERS:
        return f"there is no image tower of the kind {image}"
    if text not in TEXT_TOWERS:
        return f"there is no text tower of the kind {text}"
    if text == "open_clip.hf" and find_spec("transformers") is None:
        return "its text tower needs the package transformers (pip install 'probemb[hf]')"
    return None


for _path in OWN.values():
    if is_open_clip(json.loads(_path.read_text(encoding="utf-8"))):
        open_clip.add_model_config(_path)  # adds a name to open_clip's list and takes none away
