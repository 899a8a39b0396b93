"""open_clip's own ResNets (RN50 to RN50x64), with their last stages again as the uncertainty branch.

The parameters keep open_clip's names. Shapes: B items, T places of the feature map, W its width.
"""

from __future__ import annotations

from open_clip.modified_resnet import ModifiedResNet
from torch import Tensor, nn

from probemb.errors import UserError
from probemb.gaussian import at_least_float32
from probemb.models.architectures import check_n_unc_layers, stock_image_tower
from probemb.models.encoder import Encoder, Place
from probemb.models.features import Features
from probemb.models.heads import HeadConfig, add_heads

STAGES = ("layer1", "layer2", "layer3", "layer4")


class ImageResNet(Encoder, ModifiedResNet):
    """An open_clip ResNet.

    Args:
        stock: the tower whose parameters this one takes over; not to be used any more.
        own_stages: the uncertainty branch's stages (possibly none); None for a point model.
        head: of the mean and the log-variance. Only "clip" keeps the attention pooling, which projects to D.
    """

    def __init__(self, stock: ModifiedResNet, own_stages: list[nn.Module] | None, head: HeadConfig):
        nn.Module.__init__(self)
        self.__dict__.update(stock.__dict__)
        self.uncertainty_stages = None if own_stages is None else nn.ModuleList(own_stages)
        self.n_tokens = (self.image_size // 32) ** 2
        self.image_size = (self.image_size, self.image_size)
        width = self.layer4[-1].conv3.out_channels
        if head.kind == "clip":
            add_heads(self, head, width, head.embed_dim, own_projection=True, unc_widths=(width, width))
        else:
            self.attnpool = None
            add_heads(self, head, width, width)
        self.train(self.training)

    def features(self, pixels: Tensor) -> tuple[Features, Features | None]:
        """(B, 3, H, W) -> features; pooled by attention for the mean, by the average for the log-variance."""
        x = self.stem(self.normalized(pixels, self.conv1.weight.dtype))
        own = self.uncertainty_stages
        first = len(STAGES) - len(own or ())
        for i, name in enumerate(STAGES):
            if i == first:
                start = x
            x = getattr(self, name)(x)
        tokens = _tokens(x)
        mean = Features(tokens, tokens.mean(1) if self.attnpool is None else self.attnpool(x))
        if own is None:
            return mean, None
        if len(own) == 0:
            start = x
        for stage in own:
            start = stage(start)
        unc_tokens = _tokens(start)
        return mean, Features(unc_tokens, unc_tokens.mean(1))

    def project(self, pooled: Tensor) -> Tensor:
        """The pooled features, which the attention pooling has brought to D already."""
        return at_least_float32(pooled)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Nothing: open_clip's ResNets keep their activations."""

    def place(self, name: str) -> Place:
        """By stage; the stem and the attention pooling are in none."""
        part, _, rest = name.partition(".")
        if part in ("mean_head", "log_var_head"):
            return Place("head")
        if part == "uncertainty_stages":
            return Place("branch", len(self.uncertainty_stages) - int(rest.partition(".")[0]))
        return Place("trunk", len(STAGES) - STAGES.index(part) if part in STAGES else 0)

    def in_stem(self, name: str) -> bool:
        """True for what is neither in a stage nor in the attention pooling."""
        return self.place(name) == ("trunk", 0) and not name.startswith("attnpool.")


def make_image_tower(
    architecture: dict, n_unc_layers: int, head: HeadConfig, stock: ModifiedResNet | None = None
) -> ImageResNet:
    """An ImageResNet of open_clip's configuration; `stock` is taken over, None for random weights."""
    check_n_unc_layers(n_unc_layers, len(STAGES), "image")
    size = architecture["vision_cfg"].get("image_size", 224)
    if size % 32:
        raise UserError(
            f"A ResNet of open_clip does not take images of {size} pixels.", "Set image_size to a multiple of 32."
        )
    stock = stock or stock_image_tower(architecture)
    own = [] if head.probabilistic else None
    if n_unc_layers and head.probabilistic:
        fresh = stock_image_tower(architecture)
        own = [getattr(fresh, name) for name in STAGES[-n_unc_layers:]]
    return ImageResNet(stock, own, head)


def _tokens(x: Tensor) -> Tensor:
    """(B, W, h, w) -> (B, T, W)."""
    return x.flatten(2).transpose(1, 2)
