"""Towers by kind. Adding one: a module with `make_image_tower` or `make_text_tower`, and a line in
`architectures.py`.

A maker takes (architecture, n_unc_layers, head, stock) and gives an `Encoder`: the configuration of the whole model,
the number of blocks or stages of the uncertainty branch, a `HeadConfig`, and an open_clip tower to take over, or None.
"""

from __future__ import annotations

from importlib import import_module

from torch import nn

from probemb.models.architectures import IMAGE_TOWERS, TEXT_TOWERS, tower_kind
from probemb.models.encoder import Encoder
from probemb.models.heads import HeadConfig


def make_image_tower(architecture: dict, n_unc_layers: int, head: HeadConfig, stock: nn.Module | None) -> Encoder:
    """The image tower of an architecture. Raises UserError: more branch layers than the tower has."""
    module = import_module(f"{__name__}.{IMAGE_TOWERS[tower_kind(architecture, 'vision_cfg')]}")
    return module.make_image_tower(architecture, n_unc_layers, head, stock)


def make_text_tower(architecture: dict, n_unc_layers: int, head: HeadConfig, stock: nn.Module | None) -> Encoder:
    """The text tower of an architecture. Raises UserError: more branch layers than the tower has."""
    module = import_module(f"{__name__}.{TEXT_TOWERS[tower_kind(architecture, 'text_cfg')]}")
    return module.make_text_tower(architecture, n_unc_layers, head, stock)
