"""A small convolutional image tower that learns from few images on a CPU.

A stem with stride 2, then stages of 3 x 3 convolutions, of which the first halves the map. Every convolution is
followed by GroupNorm and ReLU: batch statistics would make an image's embedding depend on the rank's other images.
The last u stages exist twice: the uncertainty branch has its own.

Shapes: B images, C channels, T = height x width of the last map.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from probemb.models.architectures import check_n_unc_layers
from probemb.models.encoder import Encoder, Place
from probemb.models.features import Features
from probemb.models.heads import HeadConfig, add_heads

STAGE = re.compile(r"(stages|branch)\.(\d+)\.")


def make_image_tower(architecture: dict, n_unc_layers: int, head: HeadConfig, stock: nn.Module | None) -> SmallCNN:
    """The tower of an architecture, whose vision_cfg has the arguments of `SmallCNN`."""
    config = {key: value for key, value in architecture["vision_cfg"].items() if key != "tower"}
    return SmallCNN(n_unc_layers, head, **config)


class SmallCNN(Encoder):
    """A stem and stages of convolutions; tokens are the last map's cells, pooled features their mean.

    Args:
        n_unc_layers: stages of the uncertainty branch.
        head: of the mean and the log-variance.
        image_size: side in pixels.
        widths: channels of the stem and of every stage, multiples of `groups`.
        convolutions: of a stage.
        groups: of GroupNorm.
    """

    def __init__(
        self,
        n_unc_layers: int,
        head: HeadConfig,
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
        if head.probabilistic:
            own = sizes[len(sizes) - n_unc_layers :]
            self.branch = nn.ModuleList(_stage(*size, convolutions, groups) for size in own)
        add_heads(self, head, widths[-1], widths[-1])

    def features(self, pixels: Tensor) -> tuple[Features, Features | None]:
        """(B, 3, H, W) -> features with T tokens, row by row."""
        x = self.stem(self.normalized(pixels, self.stem[0].weight.dtype))
        shared = len(self.stages) - len(self.branch or ())
        for stage in self.stages[:shared]:
            x = stage(x)
        mean = _features(self.stages[shared:], x)
        return mean, None if self.branch is None else _features(self.branch, x)

    def place(self, name: str) -> Place:
        """Stages by their depth."""
        if name.startswith(("mean_head.", "log_var_head.")):
            return Place("head")
        stage = STAGE.match(name)
        if stage is None:
            return Place("trunk")
        stages = self.stages if stage[1] == "stages" else self.branch
        return Place("trunk" if stage[1] == "stages" else "branch", len(stages) - int(stage[2]))

    def in_stem(self, name: str) -> bool:
        """The stem."""
        return name.startswith("stem.")


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
    tokens = x.flatten(2).transpose(1, 2)
    return Features(tokens, tokens.mean(1))
