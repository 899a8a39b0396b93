"""open_clip's vision transformer, with an uncertainty branch or token; see `blocks.py`."""

from __future__ import annotations

import torch
from open_clip.transformer import Transformer, VisionTransformer
from torch import Tensor, nn

from probemb.errors import UserError
from probemb.models.architectures import check_n_unc_layers, stock_image_tower
from probemb.models.features import Features
from probemb.models.heads import HeadConfig, add_heads
from probemb.models.towers.open_clip.blocks import TransformerTower, first_blocks, project, take_over
from probemb.models.towers.parts import Parts, take_parts


class ImageTransformer(TransformerTower, VisionTransformer):
    """An open_clip vision transformer.

    Args:
        stock: the tower whose parameters this one takes over; not to be used any more.
        branch: the uncertainty branch's blocks (possibly an empty list of them); None with a token, in a point model.
        head: of the mean and the log-variance.
    """

    def __init__(self, stock: VisionTransformer, branch: Transformer | None, head: HeadConfig):
        take_over(self, stock, branch, head.uncertainty, std=stock.transformer.width**-0.5)
        width = self.transformer.width
        if head.kind != "clip":  # other heads read the raw tokens
            self.ln_post, self.proj, self.attn_pool = nn.Identity(), None, None
        add_heads(self, head, width, width, own_projection=True)

    @property
    def n_tokens(self) -> int:
        """T, the class token included."""
        height, width = self.grid_size  # not the positions' shape: ZeRO-3 takes parameters away between two passes
        return height * width + 1

    def features(self, pixels: Tensor) -> tuple[Features, Features | None]:
        """(B, 3, H, W) -> features with T tokens, the class token first.

        The branch's are neither normalised nor pooled by attention: PCME++ has no norm there. [UNC] is normalised.
        """
        return self._features_of(self._embed(pixels, None))

    def parts(self, pixels: Tensor) -> Parts:
        """Every patch, row by row, may be dropped."""
        optional = torch.ones(len(pixels), self.n_tokens - 1, dtype=torch.bool, device=pixels.device)
        return Parts(optional, torch.zeros_like(optional))

    def features_of_parts(self, pixels: Tensor, kept: Tensor) -> tuple[Features, Features | None]:
        """`features` with the class token and n patches, which keep their positions. All images keep n: no -1."""
        return self._features_of(self._embed(pixels, kept))

    def project(self, pooled: Tensor) -> Tensor:
        """CLIP's projection."""
        return project(pooled, self.proj)

    def _embed(self, pixels: Tensor, kept: Tensor | None) -> Tensor:
        """Input of the first block: class token, T - 1 or n patches, maybe [UNC]."""
        patches = self.conv1(self.normalized(pixels, self.conv1.weight.dtype)).flatten(2).transpose(1, 2)
        positions = self.positional_embedding.to(patches.dtype)
        patches = patches + positions[1:]
        class_token = (self.class_embedding.to(patches.dtype) + positions[0]).expand(len(patches), 1, -1)
        if kept is not None:
            tokens = torch.cat([class_token, take_parts(patches, kept)], 1)
        else:
            tokens = self.patch_dropout(torch.cat([class_token, patches], 1))
        return self.ln_pre(self._with_uncertainty_token(tokens))

    def _features_of(self, tokens: Tensor) -> tuple[Features, Features | None]:
        """The blocks and the pooling."""
        mean_tokens, unc_tokens = self._branches(tokens)
        if self.uncertainty_token is not None:
            mean_tokens, unc_tokens = mean_tokens[:, :-1], self.ln_post(mean_tokens[:, -1:])
        pooled = self._pool(mean_tokens)[0]
        if self.published:
            pooled = self.ln_post(pooled)
        mean = Features(mean_tokens, pooled if pooled.ndim == 2 else pooled.mean(1))
        if unc_tokens is None:
            return mean, None
        average = self.pool_type == "avg" and self.uncertainty_token is None
        return mean, Features(unc_tokens, unc_tokens[:, 1:].mean(1) if average else unc_tokens[:, 0])


def make_image_tower(architecture: dict, n_unc_layers: int, head: HeadConfig, stock: VisionTransformer | None = None):
    """An ImageTransformer of open_clip's configuration; `stock` is taken over, None for random weights.

    Raises:
        UserError: more branch blocks than there are, or an uncertainty token beside attention pooling.
    """
    vision = architecture["vision_cfg"]
    check_n_unc_layers(n_unc_layers, vision.get("layers", 12), "image")
    with_token = head.uncertainty != "branch"
    if with_token and vision.get("attentional_pool"):
        raise UserError(
            "The image tower pools by attention (as CoCa's do), so an uncertainty token would have no norm behind it.",
            "Set uncertainty to branch, or choose another architecture, such as ViT-B-16.",
        )
    stock = stock or stock_image_tower(architecture)
    patch = vision.get("patch_size", 16)
    small = {**vision, "layers": max(n_unc_layers, 1), "image_size": patch, "attentional_pool": False}
    branch = None
    if head.probabilistic and not with_token:
        branch = first_blocks(stock_image_tower({**architecture, "embed_dim": 1, "vision_cfg": small}), n_unc_layers)
    return ImageTransformer(stock, branch, head)
