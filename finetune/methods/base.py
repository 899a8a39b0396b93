"""The interface of methods. N pairs of the whole batch of all ranks, D dimensions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat
from torch import Tensor, nn

from probemb.gaussian import Gaussian
from probemb.losses import LossOutput

if TYPE_CHECKING:  # `--help` reads the options of a method, and loads no towers
    from probemb.models import DualEncoder, Encoded


@dataclass
class Batch:
    """One step's pairs, of all ranks. Of methods that compose queries, images are the targets and texts None."""

    images: Encoded  # (N, D) or (N, K, D), with tokens if the method wants them
    texts: Encoded | None
    match: Tensor  # (N, N) in [0, 1], images in rows: same image, mixed and smoothed; which targets have all concepts
    image_index: Tensor | None  # (N,) on the CPU: which image of the training data; None of composed queries
    pair_index: Tensor | None  # (N,) on the CPU: which caption
    epoch: int  # from 0
    step: int  # since the start of the run
    generator: torch.Generator  # on the embeddings' device, seeded alike on every rank
    network: int = 0  # which of the method's networks embedded them
    by_other: Callable[[], tuple[Encoded, Encoded]] | None = None  # the same pairs by the other one, without gradient
    words: Tensor | None = None  # (N, L) int64, the captions' tokens before augmentation, if the method wants them
    parts: Gaussian | None = None  # (N, k, D), of composed queries
    with_unpaired: Batch | None = None  # with more images and texts behind the pairs; match and indices are the pairs'

    @property
    def everything(self) -> Batch:
        return self.with_unpaired or self

    @property
    def image(self) -> Gaussian:
        return self.images.gaussian

    @property
    def text(self) -> Gaussian:
        return self.texts.gaussian


@dataclass(frozen=True)
class Hinge:
    """Triplet loss. Source: VSE++ §3; PCME++ §B.2.

    Args:
        margin: of the hinges; in units of the similarity.
        warmup_epochs: first epochs, with all negatives; then the hardest, with which alone towers from random weights
            collapse.
        hardest: the hardest negative's hinge rather than the sum of all.
    """

    margin: PositiveFloat = 0.2
    warmup_epochs: NonNegativeInt = 1
    hardest: bool = True

    def hardest_in(self, epoch: int) -> bool:
        return self.hardest and epoch >= self.warmup_epochs


class Method:
    """A finetuning method: its options, whose defaults its YAML may replace; what it asks of the encoders; its loss."""

    @dataclass(frozen=True)
    class Options:
        """No options."""

    probabilistic: ClassVar[bool] = False  # log-variances are trained
    # Which tokens the loss reads (`Encoded.tokens`): every one in the embedding space, what a PIE head's attention adds
    # to each embedding ("residuals"), or the trunks' ("trunk").
    wants_tokens: bool | str = False
    wants_features: ClassVar[bool] = False  # the loss reads the trunks' features and the codes (`Encoded.features`)
    wants_words: ClassVar[bool] = False  # it reads the captions' tokens (`Batch.words`)
    whole_items: ClassVar[bool] = False  # SizeAugment would change what is compared or reconstructed
    heads: ClassVar[tuple[str, ...]] = ()  # that it works with; all of them if empty
    over_regions: ClassVar[bool] = False  # it needs a model that reads an image's regions
    takes_unpaired: ClassVar[bool] = False  # it learns from unpaired images and texts too (`Batch.everything`)
    composes: ClassVar[bool] = False  # it learns from composed queries and their targets (`Batch.parts`), not pairs
    ranking: ClassVar[str] = "csd"  # by which its models are validated, and ranked unless something else is asked for
    soft_labels: ClassVar[bool] = False  # mixed images and label smoothing make sense
    trains: tuple[str, ...] = ()  # the model's own scalars that the loss uses; the others stay constant
    # By which scalars its models give a match probability, see `create_model`.
    match: ClassVar[Literal["distance", "samples", "cosine", "none"]] = "none"
    networks: ClassVar[int] = 1  # models trained, 1 or 2: a whole epoch of the first, then one of the second

    def __init__(self, options: Any, model: DualEncoder, data: Any, epochs: int = 1):
        """`data`: the training split, a `CaptionDataset` or `Compositions`."""
        self.options, self.epochs = options, epochs
        # What is saved in checkpoints: `module` is trained by the loss; `aside`, such as a discriminator, by
        # `after_step` with an optimizer of its own, at the same schedule.
        self.module, self.aside = nn.Module(), nn.Module()
        self.aside_optimizer: torch.optim.Optimizer | None = None
        self.build(model, data)

    def build(self, model: DualEncoder, data: Any) -> None:
        """Make what the method has of its own: parameters, decoders, buffers."""

    @classmethod
    def model_options(cls, options: Any) -> dict:
        """Further options of `create_model`, such as the number of embeddings of an item."""
        return {
            "probabilistic": cls.probabilistic, "ranking": cls.ranking, "match": cls.match,
            "temperature_trained": "logit_scale" in cls.trains,
        }  # fmt: skip

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        """The loss of the whole batch; its gradient on every rank is that of the whole batch too."""
        raise NotImplementedError

    def after_step(self, batch: Batch, model: DualEncoder) -> dict[str, Tensor]:
        """Train `aside` after the model's own step, with gradients that start from zero; returns terms for the log.

        Every rank has the whole batch and the same generator, so that nothing is reduced.
        """
        return {}

    def begin_epoch(self, epoch: int) -> None:
        """Called on all ranks before an epoch."""

    def scalars(self, model: DualEncoder) -> dict[str, Tensor]:
        """Trained scalars that are logged, by name: a and b of a match probability."""
        return {name: getattr(model, name) for name in ("scale", "shift") if name in self.trains}


def variant(method: type[Method], **attributes: Any) -> type[Method]:
    """A method with other attributes, such as another composer."""
    return type(method.__name__, (method,), attributes)
