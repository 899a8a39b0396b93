"""A small convolutional image tower that learns from few images on a CPU.

A stem with stride 2, then stages of 3 x 3 convolutions, of which the first halves the map. Every convolution is
followed by GroupNorm and ReLU: batch statistics would make an image's embedding depend on the rank's other images.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from probemb.models.encoder import BothFeatures, Encoder
from probemb.models.heads import Features
from probemb.models.options import ModelOptions
from probemb.models.towers.branch import check_n_unc_layers


class SmallCNN(Encoder):
    """A stem and stages of convolutions; tokens are the last map's cells, pooled features their mean.

    `widths` are the channels of the stem and of every stage, multiples of `groups` (of GroupNorm); `convolutions` are
    those of a stage. The last `n_unc_layers` stages exist twice: the uncertainty branch has its own.
    """

    stem_prefixes = ("stem.",)

    def __init__(
        self,
        o: ModelOptions,
        n_unc_layers: int,
        image_size: int = 64,
        widths: Sequence[int] = (24, 48, 96, 192),
        convolutions: int = 2,
        groups: int = 8,
    ):
        super().__init__()
        sizes = list(pairwise(widths))
        check_n_unc_layers(n_unc_layers, len(sizes), "image")
        self.image_size = (image_size, image_size)
        self.n_tokens = (-(-image_size // 2 ** len(widths))) ** 2
        self.stem = _stage(3, widths[0], 1, groups)
        self.stages = nn.ModuleList(_stage(*size, convolutions, groups) for size in sizes)
        self.branch = None
        if o.probabilistic:
            own = sizes[len(sizes) - n_unc_layers :]
            self.branch = nn.ModuleList(_stage(*size, convolutions, groups) for size in own)
        self.blocks = [f"stages.{i}" for i in range(len(sizes))]
        self.branch_blocks = [f"branch.{i}" for i in range(n_unc_layers)]
        self.add_heads(o, widths[-1], widths[-1])

    def features(self, pixels: Tensor) -> BothFeatures:
        x = self.stem(self.normalized(pixels, self.stem[0].weight.dtype))
        shared = len(self.stages) - len(self.branch or ())
        for stage in self.stages[:shared]:
            x = stage(x)
        mean = _features(self.stages[shared:], x)
        return mean, None if self.branch is None else _features(self.branch, x)


def _stage(channels: int, width: int, convolutions: int, groups: int) -> nn.Sequential:
    """Convolutions from `channels` to `width`, the first with stride 2."""
    layers: list[nn.Module] = []
    for index in range(convolutions):
        inputs, stride = (channels, 2) if index == 0 else (width, 1)
        layers += [nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.GroupNorm(groups, width), nn.ReLU()]
    return nn.Sequential(*layers)


def _features(stages: nn.ModuleList, x: Tensor) -> Features:
    for stage in stages:
        x = stage(x)
    tokens = x.flatten(2).transpose(1, 2)  # (B, T, W)
    return Features(tokens, tokens.mean(1))
