"""open_clip's image towers with a timm backbone: SigLIP, EVA, PE, MobileCLIP, ConvNeXt, ViTamin, …

The parameters keep open_clip's names (`trunk.…` and `head.…`), so that its weights load.
"""

from __future__ import annotations

from torch import nn

from probemb.models.architectures import stock_image_tower
from probemb.models.heads import HeadConfig
from probemb.models.towers.timm_image import TimmTower, timm_tower


def make_image_tower(
    architecture: dict, n_unc_layers: int, head: HeadConfig, stock: nn.Module | None = None
) -> TimmTower:
    """A TimmTower of open_clip's configuration; `stock` is taken over, None for random weights."""
    vision = architecture["vision_cfg"]
    stock = stock or stock_image_tower(architecture)
    return timm_tower(
        lambda: stock_image_tower(architecture).trunk,
        stock.trunk,
        vision["timm_model_name"],
        vision.get("image_size", 224),
        n_unc_layers,
        head,
        stock.head,
    )
