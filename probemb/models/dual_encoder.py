"""DualEncoder: two towers that embed images and texts as diagonal normal distributions in one space (PCME++ §3.3).

`create.py` makes one from a name, `hub.py` from a file. Also: rules by the position of parameters.
"""

import json
import math
from copy import deepcopy
from functools import partial
from typing import Literal, NamedTuple

import torch
from open_clip.transform import PreprocessCfg
from torch import Tensor, nn

from probemb import models
from probemb.compose import COMPOSERS
from probemb.errors import UserError, nearest
from probemb.gaussian import Gaussian
from probemb.models.architectures import Stock, reads_words, tower_kind
from probemb.models.encoder import Encoder, Place
from probemb.models.options import DEFAULTS, SAVED, CrossAttention, ModelOptions
from probemb.models.towers import cnn, open_clip, trunks
from probemb.models.towers.regions import RegionTower
from probemb.models.towers.words import WordGRU, WordMean


class ModelOutput(NamedTuple):
    """A forward pass of both towers (B, D), and scalars of shape (1,): the inverse temperature, a and b."""

    image: Gaussian
    text: Gaussian
    logit_scale: Tensor
    scale: Tensor
    shift: Tensor


class DualEncoder(nn.Module):
    """Both towers and the learnable scalars; `create_model` makes one from a name.

    Args:
        config: as `model.config` returns it: "name" (for display), "architecture" (open_clip's form, see
            `architectures.py`), "preprocess" (open_clip's PreprocessCfg), and `options.SAVED`.
        stock: the deterministic model (`Stock`) whose parameters the new model takes over; None for random ones.

    Attributes:
        options: `ModelOptions` of the configuration.
        visual, text: the towers, each an `Encoder`; everything that open_clip has too has open_clip's names.
        logit_scale, and scale and shift or logit_bias: parameters of shape (1,), see `match_scalars`. Where "match" is
            not "cosine", logit_bias is a buffer of SigLIP's architectures, which an export reads.
        composer: makes one embedding of several, of models that were trained to; else None.
        adapter: gives the towers' embeddings another uncertainty; None unless `with_adapter` made the model.
    """

    def __init__(self, config: dict, stock: nn.Module | None = None):
        super().__init__()
        self._config = config = {**DEFAULTS, **deepcopy(config)}
        self.options = o = ModelOptions(**{key: config[key] for key in SAVED})
        shape = config["architecture"]
        stock = stock or Stock(shape)
        self.visual = make_tower(shape, "vision_cfg", o, o.layers[0], stock.visual)
        self.visual.normalization = channel_statistics(config["preprocess"])
        self.text = make_tower(shape, "text_cfg", o, o.layers[1], stock.text)
        self.logit_scale = stock.logit_scale
        if o.composer not in (None, *COMPOSERS):
            what = f"There is no composer '{o.composer}'.{nearest(o.composer, COMPOSERS)}"
            raise UserError(what, f"Choose one of {', '.join(COMPOSERS)}.")
        self.composer = None if o.composer is None else COMPOSERS[o.composer](o.embed_dim)
        self.adapter: nn.Module | None = None
        if o.match == "cosine":
            self.logit_bias = stock.logit_bias
        else:
            if stock.logit_bias is not None:
                self.register_buffer("logit_bias", stock.logit_bias.detach())
            self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor, tokens: Tensor, kept: Tensor | None = None) -> ModelOutput:
        image, text = self.encode_image(images, kept=kept), self.encode_text(tokens)
        return ModelOutput(image, text, self.inverse_temperature(), *self.match_scalars())

    def encode_image(self, pixels: Tensor, token_mask: Tensor | None = None, kept: Tensor | None = None) -> Gaussian:
        """(B, 3, H, W) uint8, or float that is normalised -> Gaussian (B, D) in at least float32, mean l2-normalised.

        `token_mask`: (B, T) bool, tokens that take part in pooling. `kept`: (B, n) int64, see `draw_parts`.
        """
        _check_tensor(pixels, "pixels (B, 3, H, W)", "transforms.evaluate(image)[None]")
        encode = partial(self.visual, pixels, token_mask, kept=kept)
        return self.adapter.adapt(self.adapter.image, self.visual, encode) if self.adapter else encode().gaussian

    def encode_text(self, tokens: Tensor, token_mask: Tensor | None = None, kept: Tensor | None = None) -> Gaussian:
        """(B, L) int64, L at most the context length -> Gaussian (B, D), as `encode_image`; `kept` is of tokens."""
        _check_tensor(tokens, "tokens (B, L)", 'tokenizer(["a dog"])')
        encode = partial(self.text, tokens, token_mask, kept=kept)
        return self.adapter.adapt(self.adapter.text, self.text, encode) if self.adapter else encode().gaussian

    def cut_padding(self, tokens: Tensor, device: torch.device | None = None, multiple: int = 1) -> Tensor:
        """(B, L) tokens without the columns behind the longest text, or behind the next `multiple` of columns: the same
        embeddings in less time."""
        if self.text.feature_layout is None:
            tokens = tokens[:, : -(-self.text.trim(tokens).shape[1] // multiple) * multiple]
        return tokens.to(device, non_blocking=True).contiguous()

    def normalized(self, images: Tensor) -> Tensor:
        """uint8 images as the floats that `encode_image` also takes, to change them: 0 is the mean colour."""
        return self.visual.normalized(images, torch.float32) if images.dtype == torch.uint8 else images

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.visual.set_grad_checkpointing(enable)
        self.text.set_grad_checkpointing(enable)

    # --------------------------------------------------------------------------------------------------------- scalars

    def scalars(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters(recurse=False))

    def inverse_temperature(self) -> Tensor:
        """exp(logit_scale), (1,), at most `max_logit_scale`."""
        scale, limit = self.logit_scale.exp(), self.options.max_logit_scale
        return scale if limit is None else ceiling(scale, limit)

    def match_scalars(self) -> tuple[Tensor, Tensor]:
        """a and b of the match probability sigmoid(-a CSD + b), (1,) each, with gradient.

        Where "match" is "distance" they are the parameters scale and shift (PCME++ Eq. 2). Where it is "cosine", the
        model was trained on sigmoid(s (cosine - u / 2) + logit_bias), u = u_image + u_text and s the inverse
        temperature (SigLIP; ProLIP §3.2). Of unit means that is the same function: a = s / 2, b = s + logit_bias.
        Where it is "samples", scale and shift are those of PCME's form; where it is "none", they mean nothing.
        """
        if self.options.match == "cosine":
            s = self.inverse_temperature()
            return s / 2, s + self.logit_bias
        # Copies: ZeRO-3 with recomputed blocks loses track of a parameter that is an output.
        return self.scale.clone(), self.shift.clone()

    @property
    def match_model(self) -> models.MatchModel:
        """The match probability as it stands, and the temperature; a point model has none by a and b of normals."""
        forms = {"cosine": "csd", **({"distance": "csd", "samples": "samples"} if self.probabilistic else {})}
        a, b = (x.item() for x in self.match_scalars())
        temperature = self.inverse_temperature().item() if self.options.temperature_trained else None
        return models.MatchModel(a, b, forms.get(self.options.match, "none"), self.probabilistic, temperature)

    def match_probability(
        self, image: Gaussian, text: Gaussian, among: Literal["images", "texts"] | None = None
    ) -> Tensor:
        """The probability that each image and text match, (N, M), see `MatchModel.probability`."""
        return self.match_model.probability(image, text, among)

    # -------------------------------------------------------------------------------------------------------- questions

    @property
    def config(self) -> dict:
        """A copy of the configuration that `DualEncoder(config)` rebuilds this model from; plain JSON types."""
        return deepcopy(self._config)

    @property
    def ranking(self) -> str:
        """Ranking that the model was trained for, a name of `probemb.evaluation.rankings`; CSD of points is "mean"."""
        return "mean" if self.options.ranking == "csd" and not self.probabilistic else self.options.ranking

    @property
    def attention(self) -> CrossAttention | None:
        return None if self.options.attention is None else CrossAttention(**self.options.attention)

    probabilistic = property(lambda self: self.options.probabilistic or self.adapter is not None)
    objective = property(lambda self: self.options.objective)
    composed_ranking = property(lambda self: self.options.composed_ranking)
    n_embeddings = property(lambda self: self.options.n_embeddings)
    embed_dim = property(lambda self: self.options.embed_dim)
    context_length = property(lambda self: self.text.context_length)
    image_size = property(lambda self: self.visual.image_size[0])  # height and width in pixels
    image_tower = property(lambda self: self.visual)
    text_tower = property(lambda self: self.text)
    batch_statistics = property(lambda self: self.visual.batch_statistics or self.text.batch_statistics)

    def place(self, name: str) -> Place:
        part, _, rest = name.partition(".")
        if part not in ("visual", "text"):
            return Place("composer" if part == "composer" else "scalar")
        return getattr(self, part).place(rest)._replace(tower="image" if part == "visual" else "text")


def _check_tensor(x: Tensor, wanted: str, made_by: str) -> None:
    if not isinstance(x, Tensor):
        what = f"The model takes {wanted}, not {type(x).__name__}."
        raise UserError(what, f"Give it {made_by}, with model, tokenizer, transforms = load_model(...).")


def channel_statistics(preprocess: dict) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in open_clip's PreprocessCfg. Raises ValueError, TypeError."""
    wanted = PreprocessCfg(**{key: value for key, value in preprocess.items() if key != "crop_pct"})
    mean, std = (tuple(map(float, x if isinstance(x, list | tuple) else (x,) * 3)) for x in (wanted.mean, wanted.std))
    if not (len(mean) == len(std) == 3 and all(map(math.isfinite, mean + std)) and min(std) > 0):
        raise ValueError(f"a mean of {mean} and a deviation of {std} in place of three numbers each")
    if not 0.1 <= preprocess.get("crop_pct", 1) <= 1:  # less would enlarge images without bounds
        raise ValueError(f"a crop_pct of {preprocess['crop_pct']}")
    return mean, std


def ceiling(x: Tensor, limit: float) -> Tensor:
    """min(x, limit), whose gradient at the limit may lower x but not raise it."""
    at_limit = x >= limit
    y = torch.where(at_limit, limit + (x - x.detach()), x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad.masked_fill(at_limit & (grad < 0), 0))
    return y


def plain(value):
    """As read back from JSON, so that a configuration equals its own copy on disk."""
    return json.loads(json.dumps(value))


# --------------------------------------------------------------------------------------------------------------- towers

# Of the project: made with the options, the number of layers, and their part of the architecture.
OWN = {"small_cnn": cnn.SmallCNN, "regions": RegionTower, "word_gru": WordGRU, "word_mean": WordMean}
# Of libraries: functions of the whole architecture, the part, the options, the number of layers, and a stock tower.
MAKERS = {
    "timm": trunks.timm_tower,
    "open_clip.timm": trunks.timm_tower,
    "open_clip.resnet": cnn.image_resnet,
    "open_clip.hf": trunks.text_tower,
    "open_clip.transformer": open_clip.transformer,
}


def make_tower(architecture: dict, part: str, o: ModelOptions, n_unc_layers: int, stock: nn.Module | None) -> Encoder:
    """The tower of a part, "vision_cfg" or "text_cfg"; `stock` is one of a library to take over, None for ours."""
    kind, config = tower_kind(architecture, part), architecture[part]
    if o.uncertainty != "branch" and (kind != "open_clip.transformer" or config.get("attentional_pool")):
        raise UserError(
            "An uncertainty token needs open_clip's own transformers, without attention pooling as CoCa's have it.",
            "Set uncertainty to branch, or choose an architecture such as ViT-B-16 or ViT-Tiny-64.",
        )
    if kind not in OWN:
        return MAKERS[kind](architecture, part, o, n_unc_layers, stock)
    if part == "text_cfg" and reads_words(architecture) and not config.get("vocabulary"):
        raise UserError(
            "The text tower reads words, and has no vocabulary.",
            "Build one with `python -m tools.build_vocabulary DATA --out vocabulary.txt`, and name it as vocabulary.",
        )
    return OWN[kind](o=o, n_unc_layers=n_unc_layers, **{key: config[key] for key in config if key != "tower"})


# ------------------------------------------------------------------- weight decay, learning rates by layer, and locks


def no_weight_decay(name: str, param: Tensor) -> bool:
    """True for what no weight decay is for, as in open_clip: norms, biases, vectors and scalars."""
    return param.ndim < 2 or name.rpartition(".")[2] in ("logit_scale", "logit_bias", "scale", "shift")


def layer_rates(model: DualEncoder, decay: float, stem: bool = True) -> dict[str, float]:
    """Multipliers of the learning rate of every parameter: decay^depth, of a block k (0 … L - 1) decay^(L - k).

    With `stem`, what lies before the blocks has decay^(L + 1); else 1, as in PCME++'s public code.
    """
    places = {name: model.place(name) for name, _ in model.named_parameters()}
    n_blocks = {"image": 0, "text": 0}
    for place in places.values():
        if place.part == "trunk" and not place.in_stem:
            n_blocks[place.tower] = max(n_blocks[place.tower], place.depth)

    def depth(place: Place) -> int:
        return (n_blocks[place.tower] + 1) * stem if place.in_stem else place.depth

    return {name: decay ** depth(place) for name, place in places.items()}


def freeze_backbones(
    model: DualEncoder, image: bool, text: bool = False, image_groups: int = 0, text_groups: int = 0
) -> None:
    """Freeze or thaw each tower's pretrained part (`Place.pretrained`); frozen batch norms keep their statistics.

    The last groups train nevertheless: what lies behind the blocks (the last norm, the projection), then the last
    block, and so on.
    """
    locks = {"image": (image, image_groups), "text": (text, text_groups)}
    for name, parameter in model.named_parameters():
        place = model.place(name)
        if not place.pretrained:
            continue
        locked, groups = locks[place.tower]
        frozen = locked and (place.depth >= groups or place.in_stem)
        if parameter.requires_grad == frozen:
            parameter.requires_grad_(not frozen)
            parameter.grad = None
