"""Towers around a trunk of timm's (any image backbone) or of Hugging Face's (open_clip's text models), with a `Branch`.

`TimmTower` is of open_clip's configurations with a timm backbone (SigLIP, EVA, PE, MobileCLIP, …) and of the project's:

    "vision_cfg": {"tower": "timm", "timm_model_name": "resnet50", "timm_model_kwargs": {…}, "image_size": 224}

The parameters keep open_clip's names. Shapes: B items, T tokens, W width of the trunk.
"""

import logging
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from types import MethodType

import timm
import torch
from open_clip.hf_configs import arch_dict
from open_clip.hf_model import HFTextEncoder
from torch import Tensor, nn

from probemb.errors import UserError, nearest
from probemb.models.architectures import stock_image_tower, stock_text_tower
from probemb.models.encoder import BothFeatures, Branch, Encoder, Place, last_blocks, run_with
from probemb.models.heads import Features
from probemb.models.options import ModelOptions
from probemb.models.weights import load_strictly, read_state_dict, refused

CONTAINERS = ("blocks", "stages", "layers")  # of blocks in transformers, of stages in CNNs
STAGES = (("layer1", "layer2", "layer3", "layer4"), ("s1", "s2", "s3", "s4"))  # ResNets, RegNets
FILES = {"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}  # what timm would open or write

logger = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------------------- images


class TimmTower(Encoder):
    """A timm model with heads of ours.

    Tokens are the feature map's places, or a transformer's tokens behind its last norm. Head "clip" reads the model's
    own pooling, and open_clip's `projection` of it; for others, and the branch, the pooled features are the class token
    or the average, whichever the model pools by. Without `own_blocks`, the log-variance reads the mean's features.
    """

    def __init__(self, trunk: nn.Module, own_blocks: list, o: ModelOptions, size: int, projection: nn.Module | None):
        super().__init__()
        self.options, self.image_size, own_pooling = o, (size, size), o.head == "clip"
        if not own_pooling:
            drop_unused(trunk, size)

        def forward(trunk: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
            x = trunk.forward_features(pixels)
            return x, trunk.forward_head(x) if own_pooling else None

        trunk.forward = MethodType(forward, trunk)
        self.trunk = trunk
        self.head = projection if own_pooling and projection is not None else nn.Identity()
        self.uncertainty_blocks = Branch(own_blocks, trunk_blocks(trunk)) if own_blocks else None
        self.branch_blocks = [f"uncertainty_blocks.{i}" for i in range(len(own_blocks))]
        self.n_prefix = getattr(trunk, "num_prefix_tokens", 0)
        self._class_token = getattr(trunk, "global_pool", "") == "token"
        with torch.no_grad():
            mean, unc = meta_twin(self).eval().features(_blank(size))
        self.n_tokens, pooled_width = mean.tokens.shape[1], mean.pooled.shape[1]
        own = projection is not None and pooled_width == o.embed_dim
        unc_widths = unc and (unc.tokens.shape[2], unc.pooled.shape[1])
        self.add_heads(o, mean.tokens.shape[2], pooled_width, own, unc_widths)
        self.train(self.training)

    def features(self, pixels: Tensor) -> BothFeatures:
        pixels = self.normalized(pixels, next(self.trunk.parameters()).dtype)
        (x, pooled), unc = run_with(self.uncertainty_blocks, lambda: self.trunk(pixels), self.grad_checkpointing)
        tokens = self._tokens(x)
        pooled = self._pool(tokens) if pooled is None else pooled
        mean = Features(tokens, self.head(pooled))
        if unc is None:
            return mean, Features(tokens, pooled) if self.options.probabilistic else None
        unc = self._tokens(unc)
        return mean, Features(unc, self._pool(unc))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        super().set_grad_checkpointing(enable)
        try:
            self.trunk.set_grad_checkpointing(enable)
        except (AttributeError, AssertionError):
            if enable:
                logger.warning(f"timm's {type(self.trunk).__name__} cannot recompute its blocks; it keeps activations.")

    def place(self, name: str) -> Place:
        place, depth = super().place(name), self._depths.get(name, 0)
        in_stem = depth == max(self._depths.values(), default=0) > 0
        return place._replace(depth=depth, in_stem=in_stem) if place.part == "trunk" else place

    @cached_property
    def _depths(self) -> dict[str, int]:
        """The depth of each parameter of the trunk by timm's groups; before the blocks is the stem."""
        names, blocks = [name for name, _ in self.trunk.named_parameters()], trunk_blocks(self.trunk)
        held = {p for block in blocks for p in block.parameters()}
        inside = [name for name, p in self.trunk.named_parameters() if p in held]
        if not inside or not hasattr(self.trunk, "group_matcher"):
            return {}
        groups = timm.models.group_parameters(self.trunk, self.trunk.group_matcher(), reverse=True)
        behind, first = 1 + max(groups[name] for name in inside), names.index(inside[0])
        depths = {f"trunk.{name}": behind if i < first else 0 for i, name in enumerate(names)}
        return depths | {f"trunk.{name}": behind - groups[name] for name in inside}

    def _tokens(self, x: Tensor) -> Tensor:
        if x.ndim == 4 and getattr(self.trunk, "output_fmt", "NCHW") == "NCHW":
            return x.flatten(2).transpose(1, 2)
        return x if x.ndim == 3 else x.flatten(1, 2)

    def _pool(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0] if self._class_token else tokens[:, self.n_prefix :].mean(1)


def timm_tower(architecture: dict, part: str, o: ModelOptions, n_unc_layers: int, stock: nn.Module | None) -> TimmTower:
    vision = architecture[part]

    def make() -> nn.Module:
        return build_trunk(vision) if "tower" in vision else stock_image_tower(architecture)

    def fitted(stock: nn.Module) -> nn.Module:
        trunk = stock if "tower" in vision else stock.trunk
        return fit_image_size(trunk, vision["timm_model_name"], vision.get("image_size", 224))

    stock = stock or make()
    trunk = fitted(stock)
    own = last_blocks(trunk_blocks(trunk), n_unc_layers)
    own = own and last_blocks(trunk_blocks(fitted(make())), n_unc_layers)
    return TimmTower(trunk, own, o, vision.get("image_size", 224), None if "tower" in vision else stock.head)


def build_trunk(vision: dict, pretrained: bool = False) -> nn.Module:
    """timm's model of a "vision_cfg". Raises UserError: it would open files."""
    options = vision.get("timm_model_kwargs", {})
    if files := sorted(FILES & options.keys()):  # an untrusted configuration could name files of this machine
        raise UserError(f"timm_model_kwargs has {', '.join(files)}.", "Name weights as model.pretrained instead.")
    return timm.create_model(vision["timm_model_name"], pretrained, num_classes=0, **options)


def pretrained_trunk(vision: dict, source: str) -> tuple[nn.Module, dict]:
    """A trunk of a "vision_cfg" with timm's weights, and a part of the PreprocessCfg that they ask for.

    `source` is "timm" for the model's default weights, another of its tags, or a file, whose classifier is dropped.
    """
    if Path(source).is_file():
        trunk, state = build_trunk(vision), read_state_dict(source)
        classifier = trunk.default_cfg.get("classifier") or ()
        parts = tuple(f"{part}." for part in ([classifier] if isinstance(classifier, str) else classifier))
        load_strictly(trunk, {key: value for key, value in state.items() if not key.startswith(parts)}, source)
    else:
        name = vision["timm_model_name"]
        tags = ["timm", *(tag.partition(".")[2] for tag in timm.list_pretrained(f"{name}.*"))]
        if source not in tags:
            what = f"'{source}' is neither a file nor a weight tag of timm's {name}.{nearest(source, tags)}"
            raise UserError(what, f"Give a file, or one of: {', '.join(tags)}.")
        name += "" if source == "timm" else f".{source}"
        remedy = "Check the network, or download them elsewhere and name the file as model.image_weights."
        with refused(f"The weights of timm's {name} could not be downloaded", remedy):
            trunk = build_trunk({**vision, "timm_model_name": name}, pretrained=True)
    data = timm.data.resolve_model_data_config(trunk)
    return trunk, {key: data[key] for key in ("mean", "std", "interpolation")}


def trunk_blocks(trunk: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer, the stages of a CNN; none where they are in no known place."""
    for names in STAGES:
        if all(hasattr(trunk, name) for name in names):
            return [getattr(trunk, name) for name in names]
    containers = (getattr(trunk, name, None) for name in CONTAINERS)
    return list(next((x for x in containers if isinstance(x, nn.Sequential | nn.ModuleList)), ()))


def fit_image_size(trunk: nn.Module, name: str, size: int) -> nn.Module:
    """The trunk, made to take images of a size. Raises UserError: it cannot be."""
    remedy = "Set image_size to the model's own, or to a multiple of its patches."
    with torch.no_grad(), refused(f"timm's {name} does not take images of {size} pixels", remedy):
        try:
            meta_twin(trunk).eval()(_blank(size))
        except Exception:  # whatever a model's layers raise about shapes
            trunk.set_input_size((size, size))
            meta_twin(trunk).eval()(_blank(size))
    return trunk


def _blank(image_size: int) -> Tensor:
    return torch.empty(2, 3, image_size, image_size, device="meta")


def meta_twin(module: nn.Module) -> nn.Module:
    """A copy on the meta device: shapes without numbers."""
    memo = {}
    for tensor in (*module.parameters(), *module.buffers()):
        twin = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    return deepcopy(module, memo)


def drop_unused(trunk: nn.Module, image_size: int) -> None:
    """Replace children of a trunk that take no part in its features, so that every parameter gets a gradient."""
    twin, used = meta_twin(trunk), set()
    for name, module in twin.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: used.add(name.partition(".")[0]))
    with torch.no_grad():
        twin.forward_features(_blank(image_size))
    for name, child in list(trunk.named_children()):
        if name not in used and any(True for _ in child.parameters()):
            setattr(trunk, name, nn.Identity())


# -------------------------------------------------------------------------------------------------------------- texts


class HFText(Encoder):
    """A Hugging Face encoder behind open_clip's adapter, whose pooler and projection head "clip" alone keeps."""

    def __init__(self, stock: HFTextEncoder, own_layers: list[nn.Module], o: ModelOptions, context_length: int):
        super().__init__()
        self.context_length, self.pad_id = context_length, stock.config.pad_token_id
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
        mask = tokens != self.pad_id
        run = partial(self.transformer, input_ids=tokens, attention_mask=mask.long())
        out, unc = run_with(self.uncertainty_layers, run, self.grad_checkpointing)
        last = out.last_hidden_state
        pooled = self._pool(last, mask) if self.pooler is None else self.proj(self.pooler(out, mask.long()))
        mean = Features(last, pooled, mask)
        unc = last if unc is None else unc
        return mean, Features(unc, self._pool(unc, mask), mask) if self.options.probabilistic else None

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        super().set_grad_checkpointing(enable)
        if enable:
            self.transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.transformer.gradient_checkpointing_disable()

    def place(self, name: str) -> Place:
        place = super().place(name)
        in_stem = place[:2] == ("trunk", 0) and name.startswith("transformer.") and "embed" in name
        return place._replace(in_stem=in_stem)

    def _pool(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """The first token, or the average of all that are no padding: whichever open_clip pools by."""
        if self._class_token:
            return tokens[:, 0]
        weight = mask[..., None].to(tokens.dtype)
        return (tokens * weight).sum(1) / weight.sum(1).clamp(min=1)


def text_tower(architecture: dict, part: str, o: ModelOptions, n_unc_layers: int, stock: HFTextEncoder) -> HFText:
    length = architecture[part].get("context_length", 77)
    if length > (most := getattr(stock.config, "max_position_embeddings", length)):
        what = f"context_length is {length}, and the text tower has positions for {most} tokens."
        raise UserError(what, f"Set it to at most {most}.")
    own = last_blocks(text_layers(stock.transformer), n_unc_layers)
    own = own and last_blocks(text_layers(stock_text_tower(architecture).transformer), n_unc_layers)
    return HFText(stock, own, o, length)


def text_layers(transformer: nn.Module) -> nn.ModuleList:
    encoder = getattr(transformer, "encoder", transformer)
    return next(getattr(encoder, name) for name in ("layer", "layers", "block") if hasattr(encoder, name))
