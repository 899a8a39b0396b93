"""Options of a model, declared once: `create_model`'s keywords, the trainers' `model` options, config.json; and of its
images' augmentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from probemb.errors import UserError, nearest

if TYPE_CHECKING:
    from probemb.models.dual_encoder import DualEncoder

Head = Literal["clip", "gpo", "pie", "mlp", "average", "max-mean"]
Uncertainty = Literal["branch", "token", "prolip-code"]
Direction = Literal["t2i", "i2t"]
Aggregation = Literal["lse", "mean", "sum", "max"]
Norm = Literal["clipped-l2norm", "l2norm", "clipped-l1norm", "l1norm", "softmax", "clipped", "none"]
MATCH_OF_DISTANCE = {"csd": "distance", "match-probability": "samples"}  # "match" of a loss that trains its a and b


@dataclass(frozen=True)
class CrossAttention:
    """Scoring of pairs; the defaults are SCAN's "t-i LSE".

    Attributes:
        direction: "t2i", every word attends to the regions, or "i2t", every region to the words.
        aggregation: of a pair's cosines: "lse" (log Σ exp(lambda_lse · cos) / lambda_lse), "mean", "sum" or "max".
        norm: of the products over the queries; "clipped" lets a tenth of negative ones through first.
        lambda_softmax: inverse temperature of the attention; lambda_lse: of the aggregation "lse".
    """

    direction: Direction = "t2i"
    aggregation: Aggregation = "lse"
    norm: Norm = "clipped-l2norm"
    lambda_softmax: float = 9.0
    lambda_lse: float = 6.0


@dataclass(frozen=True)
class Towers:
    """The towers (see probemb.models.create_model).

    Args:
        name: an architecture of docs/models.md, or a JSON file; one of open_clip's, or of probemb/models/configs.
        pretrained: an open_clip tag, open_clip's weights (file or folder), or a run of `pretrain`; empty for random
            weights.
        head: clip, gpo, pie, mlp, average or max-mean; docs/models.md describes them.
        dropout: share of the features that head max-mean drops in training.
        embed_dim: D; empty for 1024 (heads gpo and pie) or the configuration's own.
        n_unc_layers: blocks of every tower that its uncertainty branch duplicates; [2, 1] for 2 of the image tower and
            1 of the text tower; empty for 1, and 0 where a method has none. Of a branch alone.
        image_size: height and width of an image in pixels; empty for the pretrained run's, or the architecture's.
            Positions of pretrained weights are interpolated.
        context_length: most tokens of a text, as image_size.
        uncertainty: source of the variance: branch (PCME++), token (ProLIP) or prolip-code (its published weights); a
            token is beside the class token.
        vocabulary: of a model that reads words; empty for the pretrained run's, or vocabulary.txt in the folder of the
            training data or above.
        image_weights: of a timm image tower: timm (its default weights), another tag, or a file.
        text_weights: of a Hugging Face text tower: its folder, or a hub name; its tokenizer too, which loading the new
            model needs as well.
        crop_pct: share of an image's shorter side that evaluation's centre crop keeps; 0.875 for 224 of 256 pixels,
            empty for the pretrained run's, or 1.
        batch_norm: statistics of batch norms: batch (of all ranks), frozen (the stored ones) or auto; auto in training
            is batch in a tower that starts from random weights, frozen in a pretrained or locked one.
    """

    name: str = "ViT-B-16"
    pretrained: str | None = None
    head: Head = "clip"
    dropout: ClosedUnitInterval = 0.0
    embed_dim: PositiveInt | None = None
    n_unc_layers: NonNegativeInt | tuple[NonNegativeInt, NonNegativeInt] | None = None
    image_size: PositiveInt | None = None
    context_length: PositiveInt | None = None
    uncertainty: Uncertainty = "branch"
    vocabulary: str | None = None
    image_weights: str | None = None
    text_weights: str | None = None
    crop_pct: PositiveFloat | None = None
    batch_norm: Literal["auto", "batch", "frozen"] = "auto"


@dataclass(frozen=True)
class ModelOptions(Towers):
    """Everything that `create_model` takes; a method or an objective decides what `Towers` lacks.

    Args:
        init_scale, init_shift: a and b of the match probability; None for those of the run in `pretrained`, else 5.
        init_logit_scale, init_logit_bias: exp(logit_scale) and, where match is "cosine", logit_bias; None for those of
            `pretrained`, or of the architecture (then a bias of -10 if it has none).
        probabilistic: False for a point model: every log_var is POINT_LOG_VAR, so that CSD ranks as the cosine does.
        n_embeddings: K embeddings of every item, of head pie.
        pooling: sizes of the head: code_dim and hidden_dim (gpo), hidden_dim and project (pie), layers (mlp).
        uncertainty_bias: whether the log-variance heads have a bias; the published pretraining weights have none.
        unit_features: head clip reads the log-variance from features of unit length (probabilistic VSE++).
        covariance: "ellipsoidal", "spherical-mean" (the mean of the predicted variances, in every dimension) or
            "spherical" (one predicted value). Source: Probabilistic VSE++/VSRN §4.2.
        log_var_range: bounds of the predicted log-variances; beyond them is no gradient.
        log_var_start: where the log-variances start; None for -log D. ProLIP's is -10.
        match: what the loss trains: "distance", a and b of CSD; "samples", those of PCME's sampled form; "cosine", the
            inverse temperature and logit_bias (SigLIP, ProLIP), see `DualEncoder.match_scalars`; "none", neither.
        max_logit_scale: ceiling of exp(logit_scale), None for none; temperature_trained: whether the loss trains it.
        ranking, composed_ranking: that the model is trained for: names of `probemb.evaluation.rankings`.
        attention: fields of `CrossAttention`, of a model that is ranked by it.
        composer: a name of `probemb.compose`, of a model that makes one embedding of several.
        objective: the name of the loss, for display.
        adapter: options of `probemb.models.adapter`, of a model that `finetune.adapt` made.

    Raises UserError: values of a wrong type or range, or that do not go together.
    """

    vocabulary: str | Path | Sequence[str] | None = None
    grad_checkpointing: bool = False
    init_scale: float | None = 1.0
    init_shift: float | None = 1.0
    init_logit_scale: PositiveFloat | None = None
    init_logit_bias: float | None = None
    probabilistic: bool = True
    n_embeddings: PositiveInt = 1
    pooling: dict | None = None
    uncertainty_bias: bool = True
    unit_features: bool = False
    covariance: Literal["ellipsoidal", "spherical-mean", "spherical"] = "ellipsoidal"
    log_var_range: tuple[float, float] | None = None
    log_var_start: float | None = None
    match: Literal["distance", "samples", "cosine", "none"] = "distance"
    max_logit_scale: PositiveFloat | None = 100.0  # CLIP's
    temperature_trained: bool = True
    ranking: str = "csd"
    attention: dict | None = None
    composer: str | None = None
    composed_ranking: Literal["cosine", "density"] = "cosine"
    objective: str | None = None
    adapter: dict | None = None

    def __post_init__(self):
        for name, hint in get_type_hints(ModelOptions).items():
            value, choices = getattr(self, name), get_args(hint) if get_origin(hint) is Literal else ()
            if name not in ("pretrained", "vocabulary", "image_weights") and not _fits(value, hint):
                kind = self.__dataclass_fields__[name].type
                remedy = f"Choose {', '.join(choices)}." if choices else f"Its type is {kind}."
                raise UserError(f"The model's {name} is {value!r}.{nearest(str(value), choices)}", remedy)
        low, high = self.log_var_range or (0, 1)
        point, token = not self.probabilistic, self.uncertainty != "branch"
        for key, wrong, remedy in (
            ("log_var_range", low >= high, "Give two numbers in ascending order, such as [-2.303, 2.303]."),
            ("crop_pct", not 0.1 <= (self.crop_pct or 1) <= 1, "Give a number from 0.1 to 1."),
            ("n_embeddings", self.n_embeddings > 1 and self.head != "pie", "Several are for head pie."),
            ("head", self.uncertainty == "prolip-code" and self.head != "clip", "ProLIP's public code has head clip."),
            ("uncertainty", token and point, "A point model has none: leave it out."),
            ("n_unc_layers", (token or point) and any(self.layers), "It is of an uncertainty branch: leave it out."),
        ):
            if wrong:
                raise UserError(f"The model's {key} is {getattr(self, key)}.", remedy)

    @property
    def layers(self) -> tuple[int, int]:
        """Blocks in the uncertainty branch of the image and of the text tower."""
        n = self.n_unc_layers
        if n is None:
            n = int(self.probabilistic and self.uncertainty == "branch")
        return (n, n) if isinstance(n, int) else tuple(n)

    @property
    def log_var_width(self) -> int:
        """Number of log-variances that are predicted per embedding."""
        return 1 if self.covariance == "spherical" else self.embed_dim

    @property
    def log_var_mean(self) -> float:
        """Log-variance of a new model: `log_var_start`, or -log D, or the middle of a range that leaves that out.

        At -log D an item's variances sum to 1, so that distances start near |mean - mean|² <= 4 for every D.
        """
        start = -math.log(self.embed_dim) if self.log_var_start is None else self.log_var_start
        if self.log_var_range is None or self.log_var_range[0] < start < self.log_var_range[1]:
            return start
        return sum(self.log_var_range) / 2


@dataclass(frozen=True)
class TrainedTowers(Towers):
    """The towers, as options of the trainers.

    Args:
        word_vectors: a file in GloVe's text format that a model's words start from; empty to leave them.
        lock_image: freeze the image tower's trunk; its heads train.
        lock_text: the same of the text tower.
    """

    word_vectors: str | None = None
    lock_image: bool = False
    lock_text: bool = False

    def create(self, data: Iterable[str], loss=None, texts: Iterable[str] | None = None, **more) -> DualEncoder:
        """The model, on the CPU; the same on every rank. Its words have no vectors yet, and nothing is locked.

        A vocabulary may lie beside `data`, or is of `texts`; `loss` may have `scale` and `shift`.
        """
        from probemb.models.create import create_model, vocabulary_for

        options = {field.name: getattr(self, field.name) for field in fields(Towers)}
        if self.lock_image and self.batch_norm == "auto":
            options["batch_norm"] = "frozen"
        options["vocabulary"] = vocabulary_for(self.name, self.vocabulary, self.pretrained, data, texts)
        scalars = {"init_scale": getattr(loss, "scale", 1.0), "init_shift": getattr(loss, "shift", 1.0)}
        return create_model(**options | scalars | more)


@dataclass(frozen=True)
class Augmentation:
    """Random crops and changes of colour of training images.

    Args:
        scale: share of the image's area that a crop keeps, from and to.
        ratio: width by height of a crop, from and to.
        hflip: share of the images that are mirrored; captions that say left or right are wrong for them.
        color_jitter: largest change of brightness, contrast, saturation and hue; empty for none.
        color_jitter_prob: share of the images that it is applied to.
        gray_scale_prob: share of the images that lose their colours.
    """

    scale: tuple[PositiveFloat, PositiveFloat] = (0.9, 1.0)
    ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    hflip: ClosedUnitInterval = 0.0
    color_jitter: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] | None = None
    color_jitter_prob: ClosedUnitInterval = 0.0
    gray_scale_prob: ClosedUnitInterval = 0.0

    def check(self) -> None:
        """Raise UserError for ranges in the wrong order, and for a jitter without images or images without jitter."""
        half_jitter = (self.color_jitter is None) != (self.color_jitter_prob == 0)
        for name, wrong, remedy in (
            ("scale", not self.scale[0] <= self.scale[1] <= 1, "Give the smaller share first, and at most 1."),
            ("ratio", self.ratio[0] > self.ratio[1], "Give the smaller number first."),
            ("color_jitter", (self.color_jitter or (0,))[-1] > 0.5, "Set the fourth number to at most 0.5: every hue."),
            ("color_jitter", half_jitter, "Set it and color_jitter_prob, or neither."),
        ):
            if wrong:
                raise UserError(f"data.augmentation.{name} is {getattr(self, name)}.", remedy)


SAVED = (  # in config.json, beside "name", "architecture" and "preprocess"
    *("head", "embed_dim", "n_unc_layers", "probabilistic", "n_embeddings", "ranking", "attention", "composer"),
    *("composed_ranking", "objective", "match", "max_logit_scale", "temperature_trained", "covariance"),
    *("log_var_range", "uncertainty", "unit_features", "log_var_start", "uncertainty_bias", "pooling", "adapter"),
    "dropout",
)
DEFAULTS = {field.name: field.default for field in fields(ModelOptions) if field.name in SAVED}


def _fits(value: Any, hint: Any) -> bool:
    """True if a value is of a declared type; lists stand for tuples, as in JSON, and every number is finite."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (Union, UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, list | tuple) and len(value) == len(args) and all(map(_fits, value, args))
    if hint is bool or isinstance(value, bool) or not issubclass(hint, int | float):
        return type(value) is hint
    try:
        return isinstance(value, int if issubclass(hint, int) else int | float) and math.isfinite(hint(value))
    except ValueError:  # out of the range of one of jsonargparse's types
        return False
