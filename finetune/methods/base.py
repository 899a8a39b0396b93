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
    """One step's pairs, of all ranks.

    images, texts Encoded (N, D), with tokens if the method wants them; `image` and `text` are their Gaussians
    match         (N, N) in [0, 1], images in rows: same image, mixed and smoothed
    image_index   (N,) on the CPU: which image of the training data
    pair_index    (N,) on the CPU: which caption of the training data
    epoch         from 0
    step          since the start of the run
    generator     on the embeddings' device, seeded alike on every rank
    network       which of the method's networks embedded them, from 0
    by_other      () -> images, texts: the same pairs, embedded by the other network without gradient; None if alone
    words         (N, L) int64, the captions' tokens before augmentation, if the method wants them, else None
    parts         Gaussian (N, k, D), of methods that compose queries: then images are the targets, texts None, match
                  says which targets have all concepts of a query, and pair_index which combination was asked for
    everything    the same with unpaired images and texts behind the pairs (`data.unpaired`); match and indices are of
                  the pairs alone; the batch itself without any
    """

    images: Encoded
    texts: Encoded | None
    match: Tensor
    image_index: Tensor
    pair_index: Tensor
    epoch: int
    step: int
    generator: torch.Generator
    network: int = 0
    by_other: Callable[[], tuple[Encoded, Encoded]] | None = None
    words: Tensor | None = None
    parts: Gaussian | None = None
    with_unpaired: Batch | None = None

    @property
    def everything(self) -> Batch:
        return self.with_unpaired or self

    @property
    def image(self) -> Gaussian:
        """(N, D) or (N, K, D)."""
        return self.images.gaussian

    @property
    def text(self) -> Gaussian:
        """(N, D) or (N, K, D)."""
        return self.texts.gaussian


@dataclass(frozen=True)
class Hinge:
    """Options of a triplet loss.

    Args:
        margin: of the hinges, in units of the similarity.
        warmup_epochs: first epochs, with all negatives, then the hardest; towers from random weights collapse with the
            hardest alone.
    """

    margin: PositiveFloat = 0.2
    warmup_epochs: NonNegativeInt = 1


class Method:
    """A finetuning method: its options, what it asks of the encoders, and its loss.

    Attributes:
        Options: frozen dataclass of what `loss` in the configuration takes; its values are the published ones.
        probabilistic: whether log-variances are trained; otherwise the model is a point model.
        wants_tokens: whether the loss reads every token in the embedding space (`Encoded.tokens`), or with "residuals"
            what a PIE head's attention adds to each embedding, with "trunk" the trunks' tokens.
        wants_features: whether it reads the trunks' features and the codes (`Encoded.features`, `.codes`).
        wants_words: whether it reads the captions' tokens (`Batch.words`).
        whole_items: whether SizeAugment would change what it compares or reconstructs.
        heads: the heads that it works with; all of them if empty.
        over_regions: whether it reasons over an image's regions, and needs a model that reads them.
        takes_unpaired: whether it learns from unpaired images and texts too (`Batch.everything`).
        composes: whether it learns from composed queries and their targets (`Batch.parts`) instead of pairs.
        ranking: by which its models are validated, and ranked wherever nothing else is asked for.
        soft_labels: whether mixed images and label smoothing make sense.
        trained: False only evaluates the pretrained model.
        trains: the model's own scalars that the loss uses; the others stay constant.
        match: by which scalars its models give a match probability, see `create_model`.
        note: text after the method's name in a run's first lines, "" for none.
        networks: number of models trained, 1 or 2; with 2, a whole epoch of the first, then one of the second.
        options: this run's Options; epochs: of this run.
        module: parameters and buffers of the method itself, saved in checkpoints; its parameters are trained.
        aside: what `after_step` trains with `aside_optimizer`, such as a discriminator; saved in checkpoints too.
        aside_optimizer: over the parameters of `aside`, at the same schedule; None without any.
    """

    @dataclass(frozen=True)
    class Options:
        """No options."""

    probabilistic: ClassVar[bool] = False
    wants_tokens: bool | str = False
    wants_features: ClassVar[bool] = False
    wants_words: ClassVar[bool] = False
    whole_items: ClassVar[bool] = False
    heads: ClassVar[tuple[str, ...]] = ()
    over_regions: ClassVar[bool] = False
    takes_unpaired: ClassVar[bool] = False
    composes: ClassVar[bool] = False
    ranking: ClassVar[str] = "csd"
    soft_labels: ClassVar[bool] = False
    trained: ClassVar[bool] = True
    trains: tuple[str, ...] = ()
    match: ClassVar[Literal["distance", "samples", "cosine", "none"]] = "none"
    note: ClassVar[str] = ""
    networks: ClassVar[int] = 1

    def __init__(self, options: Any, model: DualEncoder, data: Any, epochs: int = 1):
        """`data`: the training split, a `CaptionDataset` or `Compositions`."""
        self.options, self.epochs = options, epochs
        self.module, self.aside = nn.Module(), nn.Module()
        self.aside_optimizer: torch.optim.Optimizer | None = None
        self.build(model, data)

    def build(self, model: DualEncoder, data: Any) -> None:
        """Make what the method has of its own: its loss, decoders, buffers."""

    @classmethod
    def model_options(cls, options: Any) -> dict:
        """Further options of `create_model`, such as the number of embeddings of an item."""
        return {
            "probabilistic": cls.probabilistic, "ranking": cls.ranking, "match": cls.match,
            "temperature_trained": "logit_scale" in cls.trains or not cls.trained,
        }  # fmt: skip

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        """The loss of the whole batch; its gradient on every rank is that of the whole batch too."""
        raise NotImplementedError

    def after_step(self, batch: Batch, model: DualEncoder) -> dict[str, Tensor]:
        """Train `aside` after the model's own step, with gradients that start from zero; returns terms for the log.

        The batch is that of all ranks and the generator is seeded alike, so every rank computes the same gradient from
        the detached embeddings, and nothing is reduced.
        """
        return {}

    def begin_epoch(self, epoch: int) -> None:
        """Called on all ranks before an epoch."""

    def scalars(self, model: DualEncoder) -> dict[str, Tensor]:
        """Trained scalars that are logged, by name."""
        return {name: getattr(model, name) for name in self.trains}
