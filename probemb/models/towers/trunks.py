"""Towers around a trunk of timm's (any image backbone) or of Hugging Face's (open_clip's text models), with a `Branch`.

Kind "timm" of the project's own architectures:

    "vision_cfg": {"tower": "timm", "timm_model_name": "resnet50", "timm_model_kwargs": {…}, "image_size": 224}

`TimmTower` is also the tower behind open_clip's configurations with a timm backbone: SigLIP, EVA, PE, MobileCLIP, …
The parameters keep open_clip's names. Shapes: B items, T tokens, L positions of a text, W width of the trunk.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from types import MethodType

import timm
import torch
from open_clip.hf_configs import arch_dict
from open_clip.hf_model import HFTextEncoder
from torch import Tensor, nn

from probemb.errors import UserError, nearest
from probemb.models.architectures import stock_image_tower, stock_text_tower
from probemb.models.encoder import BothFeatures, Encoder, Place
from probemb.models.heads import Features
from probemb.models.options import ModelOptions
from probemb.models.towers.branch import Branch, last_blocks
from probemb.models.weights import first_line, load_strictly, read_state_dict, refused

CONTAINERS = ("blocks", "stages", "layers")  # of blocks in transformers, of stages in CNNs
STAGES = (("layer1", "layer2", "layer3", "layer4"), ("s1", "s2", "s3", "s4"))  # ResNets, RegNets
FILES = {"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}  # what timm would open or write

logger = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------------------- images


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

        def forward(trunk: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
            """All inside the trunk's own forward pass, where engines that shard parameters have gathered them."""
            x = trunk.forward_features(pixels)
            return x, trunk.forward_head(x) if own_pooling else None

        trunk.forward = MethodType(forward, trunk)
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
        unc_tokens = self._tokens(branch(branch.heard()))
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
        place = super().place(name)
        return Place("trunk", self._depths.get(name, 0)) if place.part == "trunk" else place

    def in_stem(self, name: str) -> bool:
        return self._depths.get(name, 0) == max(self._depths.values(), default=0) > 0

    @cached_property
    def _depths(self) -> dict[str, int]:
        """The depth of each parameter of the trunk by timm's groups. What is in no block belongs to the stem if it is
        registered before the blocks, else to what lies behind; without groups or blocks all have 0.
        """
        names, blocks = [name for name, _ in self.trunk.named_parameters()], trunk_blocks(self.trunk)
        held = {id(p) for block in blocks for p in block.parameters()}
        inside = [name for name, p in self.trunk.named_parameters() if id(p) in held]
        if not inside or not hasattr(self.trunk, "group_matcher"):
            return {}
        groups = timm.models.group_parameters(self.trunk, self.trunk.group_matcher(), reverse=True)
        behind, first = 1 + max(groups[name] for name in inside), names.index(inside[0])
        depths = {f"trunk.{name}": behind if i < first else 0 for i, name in enumerate(names)}
        return depths | {f"trunk.{name}": behind - groups[name] for name in inside}

    def _tokens(self, x: Tensor) -> Tensor:
        """A feature map in the trunk's layout -> (B, T, W)."""
        if x.ndim == 3:
            return x
        if getattr(self.trunk, "output_fmt", "NCHW") == "NHWC":
            return x.flatten(1, 2)
        return x.flatten(2).transpose(1, 2)

    def _pool(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0] if self._class_token else tokens[:, self._n_prefix :].mean(1)

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


def image_tower(architecture: dict, o: ModelOptions, n_unc_layers: int, stock: nn.Module | None) -> TimmTower:
    """A TimmTower of the project's own configuration; `stock` is a trunk to take over."""
    vision = architecture["vision_cfg"]
    return timm_tower(stock or build_trunk(vision), lambda: build_trunk(vision), vision, n_unc_layers, o)


def open_clip_tower(architecture: dict, o: ModelOptions, n_unc_layers: int, stock: nn.Module | None) -> TimmTower:
    """A TimmTower of open_clip's configuration."""
    stock = stock or stock_image_tower(architecture)
    fresh = lambda: stock_image_tower(architecture).trunk  # noqa: E731
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
    fit_image_size(trunk, vision["timm_model_name"], size)
    own = last_blocks(trunk_blocks(trunk), n_unc_layers)
    if own:
        other = fresh()
        fit_image_size(other, vision["timm_model_name"], size)
        own = last_blocks(trunk_blocks(other), n_unc_layers)
    return TimmTower(trunk, own, o, size, projection)


def build_trunk(vision: dict, pretrained: bool = False) -> nn.Module:
    """timm's model of a "vision_cfg". Raises UserError: there is none, or it would open files."""
    name = vision["timm_model_name"]
    if not timm.is_model(name):
        raise UserError(f"timm has no model '{name}'.", "timm.list_models() prints the names that it has.")
    options = vision.get("timm_model_kwargs", {})
    if files := sorted(FILES & options.keys()):  # an untrusted configuration could name files of this machine
        raise UserError(f"timm_model_kwargs has {', '.join(files)}.", "Name weights as model.pretrained instead.")
    return timm.create_model(name, pretrained, num_classes=0, **options)


def pretrained_trunk(vision: dict, source: str) -> tuple[nn.Module, dict]:
    """A trunk of a "vision_cfg" with timm's weights, and the preprocessing that they ask for (a part of open_clip's
    PreprocessCfg).

    `source` is "timm" for the model's default weights, another of its tags, or a file with a state dict; a classifier
    in it is dropped. Raises UserError: none of these, no network, or the weights of another model.
    """
    name = vision["timm_model_name"]
    tags = [tag.partition(".")[2] for tag in timm.list_pretrained(f"{name}.*")]
    if Path(source).is_file():
        trunk, state = build_trunk(vision), read_state_dict(source)
        classifier = trunk.default_cfg.get("classifier") or ()
        parts = tuple(f"{part}." for part in ([classifier] if isinstance(classifier, str) else classifier))
        load_strictly(trunk, {key: value for key, value in state.items() if not key.startswith(parts)}, source)
    elif source != "timm" and source not in tags:
        raise UserError(
            f"'{source}' is neither a file nor a weight tag of timm's {name}.{nearest(source, tags)}",
            f"Give a file, or one of: timm, {', '.join(tags) or 'no tags for this model'}.",
        )
    else:
        tagged = name if source == "timm" else f"{name}.{source}"
        remedy = "Check the network, or download them elsewhere and name the file as model.image_weights."
        with refused(f"The weights of timm's {tagged} could not be downloaded", remedy):
            trunk = build_trunk({**vision, "timm_model_name": tagged}, pretrained=True)
    data = timm.data.resolve_model_data_config(trunk)
    return trunk, {key: data[key] for key in ("mean", "std", "interpolation")}


def trunk_blocks(trunk: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer, the stages of a CNN; none where timm's model has neither in a known place."""
    for names in STAGES:
        if all(hasattr(trunk, name) for name in names):
            return [getattr(trunk, name) for name in names]
    containers = (getattr(trunk, name, None) for name in CONTAINERS)
    return list(next((x for x in containers if isinstance(x, nn.Sequential | nn.ModuleList)), ()))


def fit_image_size(trunk: nn.Module, name: str, image_size: int) -> None:
    """Make a trunk take images of a size. Raises UserError: it cannot be."""
    failures = []
    for fit in (lambda: None, lambda: trunk.set_input_size((image_size, image_size))):
        try:
            fit()
            with torch.no_grad():
                meta_twin(trunk).eval()(_blank(image_size))
            return
        except Exception as error:  # whatever a model's layers raise about shapes, or timm as it cannot resize this one
            failures.append(error)
    own = getattr(trunk, "default_cfg", {}).get("input_size", (3, 224, 224))[-1]
    raise UserError(
        f"timm's {name} does not take images of {image_size} pixels ({first_line(failures[0])}).",
        f"Set image_size to {own}, or to a multiple of its patches.",
    )


def _blank(image_size: int) -> Tensor:
    return torch.empty(2, 3, image_size, image_size, device="meta")


def meta_twin(module: nn.Module) -> nn.Module:
    """A copy on the meta device: shapes without numbers, for dry runs that cost no memory."""
    memo = {}
    for tensor in (*module.parameters(), *module.buffers()):
        twin = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    return deepcopy(module, memo)


def drop_unused(trunk: nn.Module, run: Callable[[nn.Module], object]) -> None:
    """Replace children of a trunk that take no part in `run(trunk)`, so that every parameter gets a gradient."""
    twin, used = meta_twin(trunk), set()
    for name, module in twin.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: used.add(name.partition(".")[0]))
    with torch.no_grad():
        run(twin)
    for name, child in list(trunk.named_children()):
        if name not in used and any(True for _ in child.parameters()):
            setattr(trunk, name, nn.Identity())


# -------------------------------------------------------------------------------------------------------------- texts


class HFText(Encoder):
    """A Hugging Face encoder (RoBERTa, mT5, …) behind open_clip's adapter, whose pooler and projection head "clip"
    alone keeps. It needs the package transformers, and the model's configuration from the hub or its cache.

    Without `own_layers` for the uncertainty branch, the log-variance reads the last layer's tokens of the mean.
    """

    def __init__(self, stock: HFTextEncoder, own_layers: list[nn.Module], o: ModelOptions, context_length: int):
        super().__init__()
        self.context_length = context_length
        self.pad_id = stock.config.pad_token_id
        self.transformer = stock.transformer
        self.pooler, self.proj = (stock.pooler, stock.proj) if o.head == "clip" else (None, nn.Identity())
        self._class_token = "cls" in type(stock.pooler).__name__.lower()
        layers = text_layers(self.transformer)
        self.uncertainty_layers = Branch(own_layers, layers) if own_layers else None
        where = next(name for name, module in self.named_modules() if module is layers)
        self.blocks = [f"{where}.{i}" for i in range(len(layers))]
        self.branch_blocks = [f"uncertainty_layers.{i}" for i in range(len(own_layers))]
        width = getattr(stock.config, arch_dict[stock.config.model_type]["config_names"]["width"])
        self.add_heads(o, width, width, own_projection=o.head == "clip")
        if self.pooler is None and getattr(self.transformer, "pooler", None) is not None:
            self.transformer.pooler = None  # BERT's, which no other head reads

    def features(self, tokens: Tensor) -> BothFeatures:
        branch = self.uncertainty_layers
        if branch is not None:
            branch.listen()
        mask = tokens != self.pad_id
        out = self.transformer(input_ids=tokens, attention_mask=mask.long())
        last = out.last_hidden_state
        pooled = self._pool(last, mask) if self.pooler is None else self.proj(self.pooler(out, mask.long()))
        mean = Features(last, pooled, mask)
        if not self.options.probabilistic:
            return mean, None
        unc = last if branch is None else branch(branch.heard())
        return mean, Features(unc, self._pool(unc, mask), mask)

    def trim(self, tokens: Tensor) -> Tensor:
        position = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        return tokens[:, : max(1, int((position * (tokens != self.pad_id)).max()))]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        if self.uncertainty_layers is not None:
            self.uncertainty_layers.grad_checkpointing = enable
        if enable:
            self.transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.transformer.gradient_checkpointing_disable()

    def in_stem(self, name: str) -> bool:
        return name.startswith("transformer.") and "embed" in name and self.place(name) == ("trunk", 0)

    def _pool(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """The first token, or the average of all that are no padding: whichever open_clip pools by."""
        if self._class_token:
            return tokens[:, 0]
        weight = mask[..., None].to(tokens.dtype)
        return (tokens * weight).sum(1) / weight.sum(1).clamp(min=1)


def text_tower(architecture: dict, o: ModelOptions, n_unc_layers: int, stock: HFTextEncoder | None) -> HFText:
    """An HFText of open_clip's configuration. Raises UserError: that cannot be read from the hub."""
    stock = stock or stock_text_tower(architecture)
    own = last_blocks(text_layers(stock.transformer), n_unc_layers)
    if own:
        own = last_blocks(text_layers(stock_text_tower(architecture).transformer), n_unc_layers)
    return HFText(stock, own, o, architecture["text_cfg"].get("context_length", 77))


def text_layers(transformer: nn.Module) -> nn.ModuleList:
    """The layers of a Hugging Face encoder."""
    encoder = getattr(transformer, "encoder", transformer)
    return next(getattr(encoder, name) for name in ("layer", "layers", "block") if hasattr(encoder, name))
