"""Architectures by name: open_clip's ViT configurations, and three small ones of our own in `configs/`."""

from __future__ import annotations

from pathlib import Path

import open_clip

from probemb.errors import UserError, nearest

# Adds names to open_clip's list and takes none away: ours do not occur there.
open_clip.add_model_config(Path(__file__).parent / "configs")


def architecture(name: str, image_size: int | None = None) -> dict:
    """The open_clip configuration `name` ({"embed_dim", "vision_cfg", "text_cfg", maybe "quick_gelu"}), a fresh copy.

    `image_size` replaces the configuration's own, in pixels.

    Raises:
        UserError: for a name that open_clip does not know, or a model that is not a ViT with a transformer for text.
    """
    config = open_clip.get_model_config(name) if ":" not in name else None
    if config is None:
        known = supported_names()
        raise UserError(
            f"There is no model '{name}'.{nearest(name, known)}",
            "Name one of open_clip's ViT configurations (open_clip.list_models() prints them) "
            "or ViT-Micro-32, ViT-Tiny-64, ViT-Small-112.",
        )
    check_supported(config, name)
    if image_size is not None:
        patch_size = config["vision_cfg"]["patch_size"]
        if image_size < patch_size:
            raise UserError(
                f"An image of {image_size} pixels is smaller than one patch of {name} ({patch_size} pixels).",
                f"Set image_size to a multiple of {patch_size}.",
            )
        config["vision_cfg"]["image_size"] = image_size
    return config


def supported_names() -> list[str]:
    """Names that `architecture` accepts."""
    return [name for name in open_clip.list_models() if _obstacle(open_clip.get_model_config(name)) is None]


def check_supported(config: dict, name: str) -> None:
    """Refuses what has no transformer blocks to duplicate.

    Raises:
        UserError: names the part that stands in the way.
    """
    obstacle = _obstacle(config)
    if obstacle:
        raise UserError(
            f"The model '{name}' cannot become probabilistic here: {obstacle}.",
            "Choose a ViT configuration with open_clip's own text transformer, such as ViT-B-16.",
        )


def _obstacle(config: dict) -> str | None:
    vision, text = config["vision_cfg"], config["text_cfg"]
    if "multimodal_cfg" in config:
        return "it is a captioning model with a third tower (CoCa)"
    if vision.get("timm_model_name"):
        return "its image tower is a timm model"
    if not isinstance(vision.get("layers", 12), int):
        return "its image tower is a ResNet"
    if vision.get("attentional_pool"):
        return "its image tower pools by attention"
    if text.get("hf_model_name"):
        return "its text tower is a Hugging Face model"
    if text.get("embed_cls") or text.get("proj_bias") or text.get("proj_type", "linear") != "linear":
        return "its text tower has a class token or a projection other than a plain matrix"
    if config.get("init_logit_bias") is not None:
        return "it was made for a sigmoid loss with a logit bias"
    return None
