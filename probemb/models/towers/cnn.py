"""Convolutional image towers: open_clip's ResNets, and a small one that learns from few images on a CPU.

Tokens are the places of the last feature map. The last `n_unc_layers` stages exist twice: the branch has its own.
Shapes: B images, T tokens, W channels of the last map.
"""

from collections.abc import Sequence
from itertools import pairwise

from open_clip.modified_resnet import ModifiedResNet
from torch import Tensor, nn

from probemb.errors import UserError
from probemb.models.architectures import stock_image_tower
from probemb.models.encoder import BothFeatures, Encoder, Place, last_blocks, run_both
from probemb.models.heads import Features
from probemb.models.options import ModelOptions

STAGES = [f"layer{i}" for i in (1, 2, 3, 4)]  # of a ResNet


class CNN(Encoder):
    """A stem and stages; pooled by the average, or for the mean by attention if there is any."""

    def features(self, pixels: Tensor) -> BothFeatures:
        stages, own = ([self.get_submodule(name) for name in names] for names in (self.blocks, self.branch_blocks))
        x = self.stem(self.normalized(pixels, next(self.parameters()).dtype))
        x, unc = run_both(stages, own if self.options.probabilistic else None, x)
        mean, attention = _pooled(x), getattr(self, "attnpool", None)
        mean = mean if attention is None else mean._replace(pooled=attention(x))
        return mean, None if unc is None else _pooled(unc)


def _pooled(x: Tensor) -> Features:
    tokens = x.flatten(2).transpose(1, 2)  # (B, T, W)
    return Features(tokens, tokens.mean(1))


class SmallCNN(CNN):
    """A stem and stages of 3 x 3 `convolutions` with GroupNorm and ReLU, `widths` wide; each halves the map."""

    stem_prefixes = ("stem.",)

    def __init__(
        self, o: ModelOptions, n_unc_layers: int, image_size: int = 64,
        widths: Sequence[int] = (24, 48, 96, 192), convolutions: int = 2, groups: int = 8,
    ):  # fmt: skip
        super().__init__()
        self.image_size = (image_size, image_size)
        self.n_tokens = (-(-image_size // 2 ** len(widths))) ** 2
        self.stem = _stage(3, widths[0], 1, groups)
        self.stages = nn.ModuleList(_stage(*sizes, convolutions, groups) for sizes in pairwise(widths))
        own = last_blocks(list(pairwise(widths)), n_unc_layers)
        self.branch = nn.ModuleList(_stage(*s, convolutions, groups) for s in own) if o.probabilistic else None
        self.blocks = [f"stages.{i}" for i in range(len(self.stages))]
        self.branch_blocks = [f"branch.{i}" for i in range(n_unc_layers)]
        self.add_heads(o, widths[-1], widths[-1])


def _stage(channels: int, width: int, convolutions: int, groups: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index in range(convolutions):
        inputs, stride = (channels, 2) if index == 0 else (width, 1)
        layers += [nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.GroupNorm(groups, width), nn.ReLU()]
    return nn.Sequential(*layers)


class ImageResNet(CNN, ModifiedResNet):
    """An open_clip ResNet (RN50 to RN50x64); the mean is pooled by attention, the log-variance by the average."""

    blocks = STAGES

    def __init__(self, stock: ModifiedResNet, own_stages: list[nn.Module], o: ModelOptions):
        nn.Module.__init__(self)
        self.__dict__.update(stock.__dict__)
        self.uncertainty_stages = nn.ModuleList(own_stages)
        self.branch_blocks = [f"uncertainty_stages.{i}" for i in range(len(own_stages))]
        self.n_tokens = (self.image_size // 32) ** 2
        self.image_size = (self.image_size, self.image_size)
        width = self.layer4[-1].conv3.out_channels
        if o.head == "clip":  # the only one that keeps the attention pooling, which projects to D
            self.add_heads(o, width, o.embed_dim, own_projection=True, unc_widths=(width, width))
        else:
            self.attnpool = None
            self.add_heads(o, width, width)
        self.train(self.training)

    def place(self, name: str) -> Place:
        place = super().place(name)
        return place._replace(in_stem=place[:2] == ("trunk", 0) and not name.startswith("attnpool."))


def image_resnet(architecture: dict, part: str, o: ModelOptions, n_unc_layers: int, stock: ModifiedResNet) -> Encoder:
    if (size := architecture[part].get("image_size", 224)) % 32:
        what = f"A ResNet of open_clip does not take images of {size} pixels."
        raise UserError(what, "Set image_size to a multiple of 32.")
    names = last_blocks(STAGES, n_unc_layers)
    fresh = stock_image_tower(architecture) if names else None
    return ImageResNet(stock, [getattr(fresh, name) for name in names], o)
