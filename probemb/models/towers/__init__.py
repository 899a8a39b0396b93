"""Towers by kind (`architectures.tower_kind`). Adding one: a class or a function that makes it, and a line here."""

from __future__ import annotations

from torch import nn

from probemb import models
from probemb.errors import UserError
from probemb.models.architectures import reads_words, tower_kind
from probemb.models.encoder import Encoder
from probemb.models.options import ModelOptions
from probemb.models.towers import cnn, open_clip, trunks
from probemb.models.towers.words import WordGRU, WordMean

# Of the project: made with the options, the number of layers, and their part of the architecture.
OWN = {"small_cnn": cnn.SmallCNN, "word_gru": WordGRU, "word_mean": WordMean}
OWN["regions"] = lambda **sizes: models.RegionTower(**sizes)  # which pretraining does not load
# Of libraries: functions of the whole architecture, the part, the options, the number of layers, and a stock tower.
MAKERS = {
    "timm": trunks.timm_tower,
    "open_clip.timm": trunks.timm_tower,
    "open_clip.resnet": cnn.image_resnet,
    "open_clip.hf": trunks.text_tower,
    "open_clip.transformer": open_clip.transformer,
}


def make_tower(architecture: dict, part: str, o: ModelOptions, n_unc_layers: int, stock: nn.Module | None) -> Encoder:
    """The tower of a part, "vision_cfg" or "text_cfg"; `stock` is one of open_clip's to take over, None for random."""
    kind, config = tower_kind(architecture, part), architecture[part]
    if o.uncertainty != "branch" and (kind != "open_clip.transformer" or config.get("attentional_pool")):
        raise UserError(
            "An uncertainty token needs open_clip's own transformers, without attention pooling as CoCa's have it.",
            "Set uncertainty to branch, or choose an architecture such as ViT-B-16 or ViT-Tiny-64.",
        )
    if kind not in OWN:
        return MAKERS[kind](architecture, part, o, n_unc_layers, stock)
    if part == "text_cfg" and reads_words(architecture) and not config.get("vocabulary"):
        raise UserError(
            "The text tower reads words, and has no vocabulary.",
            "Build one with `python -m tools.build_vocabulary DATA --out vocabulary.txt`, and name it as vocabulary.",
        )
    return OWN[kind](o=o, n_unc_layers=n_unc_layers, **{key: config[key] for key in config if key != "tower"})
