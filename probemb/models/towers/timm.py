"""timm's image backbones, CNNs and transformers: feature maps as tokens, and an uncertainty branch behind any of them.

Kind "timm" of the project's own architectures:

    "vision_cfg": {"tower": "timm", "timm_model_name": "resnet50", "timm_model_kwargs": {…}, "image_size": 224}

`TimmTower` is also the tower behind open_clip's configurations with a timm backbone: SigLIP, EVA, PE, MobileCLIP, …
Shapes: B items, T tokens, W width of the trunk.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import MethodType

import timm
import torch
from timm.models._manipulate import group_with_matcher
from torch import Tensor, nn

from probemb.errors import UserError, nearest
from probemb.models.architectures import stock_image_tower
from probemb.models.encoder import BothFeatures, Encoder, Place
from probemb.models.heads import Features
from probemb.models.options import ModelOptions
from probemb.models.towers.branch import Branch, check_n_unc_layers, drop_unused, meta_twin
from probemb.models.weights import first_line, load_strictly, read_state_dict

STAGES = (("layer1", "layer2", "layer3", "layer4"), ("s1", "s2", "s3", "s4"))  # ResNets, RegNets
FILES = {"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}  # what timm would open or write
CONTAINERS = ("blocks", "stages", "layers")  # of blocks in transformers, of stages in CNNs

logger = logging.getLogger(__name__)


class TimmTower(Encoder):
    """A timm model with heads of ours.

    Tokens are the feature map's places, or a transformer's tokens behind its last norm. Head "clip" reads the model's
    own pooling; for others the pooled features are the class token or the average, whichever the model pools by, and
    what the model has behind its feature map is dropped. The branch's pooled features are the same of its own tokens.

    Args:
        trunk: made by timm, already of the right image size.
        own_blocks: the uncertainty branch's; with none, the log-variance reads the features of the mean.
        projection: open_clip's, from the model's pooling to D.
    """

    def __init__(
        self,
        trunk: nn.Module,
        own_blocks: list[nn.Module],
        o: ModelOptions,
        image_size: int,
        projection: nn.Module | None = None,
    ):
        super().__init__()
        self.options, self.image_size, own_pooling = o, (image_size, image_size), o.head == "clip"
        if not own_pooling:
            drop_unused(trunk, lambda twin: twin.forward_features(_blank(image_size)))
        trunk.forward = MethodType(_pooled_features if own_pooling else _features, trunk)
        self.trunk = trunk
        self.head = projection if own_pooling and projection is not None else nn.Identity()
        self.uncertainty_blocks = Branch(own_blocks, trunk_blocks(trunk)) if own_blocks else None
        self.branch_blocks = [f"uncertainty_blocks.{i}" for i in range(len(own_blocks))]
        self._n_prefix = getattr(trunk, "num_prefix_tokens", 0)
        self._class_token = getattr(trunk, "global_pool", "") == "token"
        with torch.no_grad():
            mean, unc = meta_twin(self).eval().features(_blank(image_size))
        self.n_tokens, pooled_width = mean.tokens.shape[1], mean.pooled.shape[1]
        own = projection is not None and pooled_width == o.embed_dim
        unc_widths = unc and (unc.tokens.shape[2], unc.pooled.shape[1])
        self.add_heads(o, mean.tokens.shape[2], pooled_width, own, unc_widths)
        self.train(self.training)

    def features(self, pixels: Tensor) -> BothFeatures:
        branch = self.uncertainty_blocks
        if branch is not None:
            branch.listen()
        x, pooled = self.trunk(self.normalized(pixels, next(self.trunk.parameters()).dtype))
        tokens = self._tokens(x)
        pooled = self._pool(tokens) if pooled is None else pooled
        mean = Features(tokens, self.head(pooled))
        if branch is None:
            return mean, Features(tokens, pooled) if self.options.probabilistic else None
        unc_tokens = self._tokens(branch(*branch.heard()))
        return mean, Features(unc_tokens, self._pool(unc_tokens))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        if self.uncertainty_blocks is not None:
            self.uncertainty_blocks.grad_checkpointing = enable
        try:
            self.trunk.set_grad_checkpointing(enable)
        except (AttributeError, AssertionError):
            if enable:
                logger.warning(f"timm's {type(self.trunk).__name__} cannot recompute its blocks; it keeps activations.")

    def place(self, name: str) -> Place:
        """Blocks by timm's groups; the stem is the deepest of them, and what lies behind the blocks has 0."""
        place = super().place(name)
        return Place("trunk", self._depths.get(name, 0)) if place.part == "trunk" else place

    def in_stem(self, name: str) -> bool:
        return self._depths.get(name, 0) == max(self._depths.values(), default=0) > 0

    @cached_property
    def _depths(self) -> dict[str, int]:
        """The depth of each parameter of the trunk; without groups of timm's all have 0.

        timm puts norms that stand alone into the last block's group: those that are registered before the blocks belong
        to the stem, those after them to what lies behind.
        """
        if not hasattr(self.trunk, "group_matcher"):
            return {}
        parameters, in_no_block = dict(self.trunk.named_parameters()), ("", None)
        groups = group_with_matcher([*parameters.items(), in_no_block], self.trunk.group_matcher(), reverse=True)
        in_blocks = {id(p) for block in trunk_blocks(self.trunk) for p in block.parameters()}
        inside = [id(p) in in_blocks for p in parameters.values()]
        depths, deepest = {}, groups[""]
        for place, name in enumerate(parameters):
            depth = deepest - groups[name]
            if depth == 1 and not inside[place] and any(inside):
                depth = 0 if any(inside[:place]) else deepest
            depths[f"trunk.{name}"] = depth
        return depths

    def _tokens(self, x: Tensor) -> Tensor:
        """A feature map in the trunk's layout -> (B, T, W). Raises UserError: it is none."""
        if not isinstance(x, Tensor) or x.ndim not in (3, 4):
            raise UserError(
                f"timm's {type(self.trunk).__name__} gives no feature map or tokens that heads could read.",
                "Choose another backbone of timm, such as resnet50.",
            )
        if x.ndim == 3:
            return x
        if getattr(self.trunk, "output_fmt", "NCHW") == "NHWC":
            return x.flatten(1, 2)
        return x.flatten(2).transpose(1, 2)

    def feature_map(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, W, S, S), the trunk's tokens but for class tokens, in their places.

        Raises UserError: they are no square map.
        """
        tokens = self.features(pixels)[0].tokens[:, self._n_prefix :]
        side = math.isqrt(tokens.shape[1])
        if side * side != tokens.shape[1]:
            raise UserError(
                f"The image tower has {tokens.shape[1]} tokens, which are no square map of places.",
                "Choose another backbone of timm, such as resnet50.",
            )
        return tokens.transpose(1, 2).unflatten(2, (side, side))

    def _pool(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0] if self._class_token else tokens[:, self._n_prefix :].mean(1)


def image_tower(architecture: dict, o: ModelOptions, n_unc_layers: int, stock: nn.Module | None) -> TimmTower:
    """A TimmTower of the project's own configuration; `stock` is a trunk to take over."""
    vision = architecture["vision_cfg"]
    return timm_tower(stock or build_trunk(vision), lambda: build_trunk(vision), vision, n_unc_layers, o)


def open_clip_tower(architecture: dict, o: ModelOptions, n_unc_layers: int, stock: nn.Module | None) -> TimmTower:
    """A TimmTower of open_clip's configuration. The parameters keep open_clip's names (`trunk.…` and `head.…`)."""
    stock = stock or stock_image_tower(architecture)

    def fresh() -> nn.Module:
        return stock_image_tower(architecture).trunk

    return timm_tower(stock.trunk, fresh, architecture["vision_cfg"], n_unc_layers, o, stock.head)


def timm_tower(
    trunk: nn.Module,
    fresh: Callable[[], nn.Module],
    vision: dict,
    n_unc_layers: int,
    o: ModelOptions,
    projection: nn.Module | None = None,
) -> TimmTower:
    """A TimmTower of `trunk`, whose uncertainty branch is of another trunk that `fresh()` gives.

    Raises UserError: an image size that the model cannot take, or more branch layers than it has.
    """
    size = vision.get("image_size", 224)
    check_n_unc_layers(n_unc_layers, len(trunk_blocks(trunk)), "image")
    resized = fit_image_size(trunk, vision["timm_model_name"], size)
    own = []
    if n_unc_layers and o.probabilistic:
        other = fresh()
        if resized:
            other.set_input_size((size, size))
        own = trunk_blocks(other)[-n_unc_layers:]
    return TimmTower(trunk, own, o, size, projection)


def pretrained_trunk(vision: dict, source: str) -> tuple[nn.Module, dict]:
    """A trunk of a "vision_cfg" with timm's weights, and the preprocessing that they ask for (a part of open_clip's
    PreprocessCfg).

    `source` is "timm" for the model's default weights, another of its tags, or a file with a state dict; a classifier
    in it is dropped. Raises UserError: none of these, no network, or the weights of another model.
    """
    name = vision["timm_model_name"]
    if Path(source).is_file():
        trunk = build_trunk(vision)
        state = read_state_dict(source)
        classifier = trunk.default_cfg.get("classifier") or ()
        prefixes = tuple(f"{part}." for part in ([classifier] if isinstance(classifier, str) else classifier))
        load_strictly(trunk, {key: value for key, value in state.items() if not key.startswith(prefixes)}, source)
    else:
        tags = [tag.partition(".")[2] for tag in timm.list_pretrained(f"{name}.*")]
        if source != "timm" and source not in tags:
            raise UserError(
                f"'{source}' is neither a file nor a weight tag of timm's {name}.{nearest(source, tags)}",
                f"Give a file, or one of: timm, {', '.join(tags) or 'no tags for this model'}.",
            )
        tagged = name if source == "timm" else f"{name}.{source}"
        try:
            trunk = build_trunk({**vision, "timm_model_name": tagged}, pretrained=True)
        except UserError:
            raise
        except Exception as error:  # whatever the network, the server or the disk raise
            raise UserError(
                f"The weights of timm's {tagged} could not be downloaded ({type(error).__name__}).",
                "Check the network, or download them elsewhere and name the file as model.image_weights.",
            ) from error
    data = timm.data.resolve_model_data_config(trunk)
    return trunk, {key: data[key] for key in ("mean", "std", "interpolation")}


def build_trunk(vision: dict, pretrained: bool = False) -> nn.Module:
    """timm's model of a "vision_cfg". Raises UserError: there is none, or it would open files."""
    name = vision["timm_model_name"]
    if not timm.is_model(name):
        raise UserError(f"timm has no model '{name}'.", "timm.list_models() prints the names that it has.")
    options = vision.get("timm_model_kwargs", {})
    if files := sorted(FILES & options.keys()):  # an untrusted configuration could name files of this machine
        raise UserError(f"timm_model_kwargs has {', '.join(files)}.", "Name weights as model.pretrained instead.")
    return timm.create_model(name, pretrained, num_classes=0, **options)


def trunk_blocks(trunk: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer, the stages of a CNN; none where timm's model has neither in a known place."""
    for names in STAGES:
        if all(hasattr(trunk, name) for name in names):
            return [getattr(trunk, name) for name in names]
    for name in CONTAINERS:
        if isinstance(getattr(trunk, name, None), nn.Sequential | nn.ModuleList):
            return list(getattr(trunk, name))
    return []


def fit_image_size(trunk: nn.Module, name: str, image_size: int) -> bool:
    """Make a trunk take images of a size; True if it had to be resized. Raises UserError: it cannot be."""
    error = _failure(trunk, image_size)
    if error is None:
        return False
    try:
        trunk.set_input_size((image_size, image_size))
        error = _failure(trunk, image_size)
    except AttributeError:
        pass  # timm cannot resize this model
    except (AssertionError, RuntimeError, ValueError, TypeError) as failure:
        error = failure
    if error is None:
        return True
    own = getattr(trunk, "default_cfg", {}).get("input_size", (3, 224, 224))[-1]
    raise UserError(
        f"timm's {name} does not take images of {image_size} pixels ({first_line(error)}).",
        f"Set image_size to {own}, or to a multiple of its patches.",
    )


def _failure(trunk: nn.Module, image_size: int) -> Exception | None:
    """Reason that a trunk does not run on images of a size; None if it does."""
    try:
        with torch.no_grad():
            meta_twin(trunk).eval()(_blank(image_size))
    except Exception as error:  # whatever a model's layers raise about shapes
        return error
    return None


def _blank(image_size: int) -> Tensor:
    return torch.empty(2, 3, image_size, image_size, device="meta")


def _features(trunk: nn.Module, pixels: Tensor) -> tuple[Tensor, None]:
    """The forward pass of a trunk: all inside it, where engines that shard parameters have gathered them."""
    return trunk.forward_features(pixels), None


def _pooled_features(trunk: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """The same, with the trunk's own pooling."""
    x = trunk.forward_features(pixels)
    return x, trunk.forward_head(x)
