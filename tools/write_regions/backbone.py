"""Features of images and of crops by a frozen timm backbone: the places of its feature map, pooled to a grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from probemb.errors import UserError
from probemb.models.dual_encoder import channel_statistics
from probemb.models.heads import HeadConfig
from probemb.models.inputs import create_transforms
from probemb.models.towers.timm_image import TimmTower, pretrained_trunk, timm_tower


@dataclass(frozen=True)
class Backbone:
    """A frozen image tower with its preprocessing.

    Attributes:
        tower: gives a square feature map of `side` x `side` places.
        transform: PIL image -> (3, H, W) uint8, the whole image, squeezed to a square.
        width: of a place's features.
    """

    tower: TimmTower
    transform: Callable[[Image.Image], Tensor]
    side: int
    width: int

    @torch.inference_mode()
    def grid(self, pixels: Tensor, g: int) -> Tensor:
        """(B, 3, H, W) -> (B, g², width) float32, row by row; g of 1 is the average of the map."""
        map_BWss = self.tower.feature_map(pixels).float()
        return F.adaptive_avg_pool2d(map_BWss, g).flatten(2).transpose(1, 2)


def load_backbone(name: str, weights: str, image_size: int, device: str = "cpu") -> Backbone:
    """timm's model `name` with weights: "timm", a tag, or a file.

    Raises:
        UserError: no such model or weights, an image size that it does not take, or no square feature map.
    """
    trunk, wanted = pretrained_trunk({"timm_model_name": name}, weights)
    head = HeadConfig("average", 1, probabilistic=False)
    tower = timm_tower(lambda: None, trunk, name, image_size, 0, head).to(device).eval().requires_grad_(False)
    preprocess = {"size": image_size, "resize_mode": "squash", **wanted}
    tower.normalization = channel_statistics(preprocess)
    transform = create_transforms({"preprocess": preprocess}).evaluate
    with torch.inference_mode():
        found = tower.feature_map(torch.zeros(1, 3, image_size, image_size, device=device))
    return Backbone(tower, transform, found.shape[2], found.shape[1])


def check_grid(backbone: Backbone, g: int, image_size: int) -> None:
    """Raise UserError: the feature map has fewer places than the grid."""
    if g > backbone.side:
        raise UserError(
            f"--grid {g} asks for {g} x {g} regions, and the feature map of images of {image_size} pixels has "
            f"{backbone.side} x {backbone.side} places.",
            f"Set --grid to at most {backbone.side}, or --image-size to {math.ceil(image_size * g / backbone.side)} "
            "or more.",
        )
