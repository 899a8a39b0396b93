"""Towers by kind (`architectures.tower_kind`). Adding one: a function that makes it, and a line here.

A maker takes (architecture, options, n_unc_layers, stock) and gives an `Encoder`: the configuration of the whole model,
the number of blocks or stages of the uncertainty branch, and an open_clip tower to take over, or None for a random one.
"""

from __future__ import annotations

from torch import nn

from probemb.errors import UserError
from probemb.models.architectures import tower_kind
from probemb.models.encoder import Encoder
from probemb.models.options import ModelOptions
from probemb.models.towers import hf, open_clip, timm
from probemb.models.towers.regions import RegionTower
from probemb.models.towers.small_cnn import SmallCNN
from probemb.models.towers.words import WordGRU, WordMean


def _own(part: dict) -> dict:
    """The arguments of a tower of ours, which its part of an architecture has."""
    return {key: value for key, value in part.items() if key not in ("tower", "vocabulary")}


def _words(architecture: dict) -> list[str]:
    """The vocabulary. Raises UserError: there is none."""
    if vocabulary := architecture["text_cfg"].get("vocabulary"):
        return vocabulary
    raise UserError(
        "The text tower reads words, and has no vocabulary.",
        "Build one with `python -m tools.build_vocabulary DATA --out vocabulary.txt`, and name it as vocabulary.",
    )


IMAGE_TOWERS = {
    "open_clip.transformer": open_clip.image_transformer,
    "open_clip.resnet": open_clip.image_resnet,
    "open_clip.timm": timm.open_clip_tower,
    "timm": timm.image_tower,
    "small_cnn": lambda config, o, n, stock: SmallCNN(o, n, **_own(config["vision_cfg"])),
    "regions": lambda config, o, n, stock: RegionTower(o, n, **_own(config["vision_cfg"])),
}
TEXT_TOWERS = {
    "open_clip.transformer": open_clip.text_transformer,
    "open_clip.hf": hf.text_tower,
    "word_gru": lambda config, o, n, stock: WordGRU(_words(config), o, n, **_own(config["text_cfg"])),
    "word_mean": lambda config, o, n, stock: WordMean(_words(config), o, n, **_own(config["text_cfg"])),
}


def make_tower(architecture: dict, part: str, o: ModelOptions, n_unc_layers: int, stock: nn.Module | None) -> Encoder:
    """The tower of a part, "vision_cfg" or "text_cfg".

    Raises:
        UserError: more branch layers than the tower has, or no place for an uncertainty token.
    """
    kind, which = tower_kind(architecture, part), "image" if part == "vision_cfg" else "text"
    if o.uncertainty != "branch" and kind != "open_clip.transformer":
        raise UserError(
            f"An uncertainty token needs open_clip's own transformers, and the {which} tower is of the kind {kind}.",
            "Set uncertainty to branch, or choose an architecture such as ViT-B-16 or ViT-Tiny-64.",
        )
    makers = IMAGE_TOWERS if part == "vision_cfg" else TEXT_TOWERS
    if kind not in makers:
        raise UserError(f"There is no {which} tower of the kind '{kind}'.", f"Choose one of {', '.join(makers)}.")
    return makers[kind](architecture, o, n_unc_layers, stock)
