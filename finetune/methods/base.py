"""The interface of methods. N pairs of the whole batch of all ranks, D dimensions.

A family's file imports torch and the losses inside functions: `--help` reads the options of a method and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

from probemb.errors import UserError, raise_together

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from finetune.config import Config
    from probemb.data.captions.find import CaptionDataset
    from probemb.gaussian import Gaussian
    from probemb.losses.output import LossOutput
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


class Method:
    """A finetuning method: its options, what it asks of the encoders, and its loss.

    Attributes:
        Options: frozen dataclass of what `loss` in the configuration takes; its values are the published ones.
        probabilistic: whether log-variances are trained; otherwise the model is a point model.
        wants_tokens: whether the loss reads every token in the embedding space (`Encoded.tokens`), or with "residuals"
            what a PIE head's attention adds to each embedding, with "trunk" the trunks' tokens.
        wants_features: whether it reads the trunks' features and the codes (`Encoded.features`, `.codes`).
        wants_words: whether it reads the captions' tokens (`Batch.words`).
        over_regions: whether it reasons over an image's regions, and needs a model that reads them.
        takes_unpaired: whether it learns from unpaired images and texts too (`Batch.everything`).
        composes: whether it learns from composed queries and their targets (`Batch.parts`) instead of pairs.
        ranking: by which its models are validated, and ranked wherever nothing else is asked for.
        soft_labels: whether mixed images and label smoothing make sense.
        trained: False only evaluates the pretrained model.
        distances: whether the configuration's `distance` is the loss' distance.
        trains: the model's own scalars that the loss uses; the others stay constant.
        match: by which scalars its models give a match probability, see `create_model`.
        note: text after the method's name in a run's first lines, "" for none.
        networks: number of models trained, 1 or 2; with 2, a whole epoch of the first, then one of the second.
        options: this run's Options.
        module: parameters and buffers of the method itself, saved in checkpoints; its parameters are trained.
        aside: what `after_step` trains with `aside_optimizer`, such as a discriminator; saved in checkpoints too.
        aside_optimizer: Adam, AdamW or AdamP over the parameters of `aside`, at the same schedule; None without any.
    """

    @dataclass(frozen=True)
    class Options:
        """No options."""

    probabilistic: ClassVar[bool] = False
    wants_tokens: ClassVar[bool | str] = False
    wants_features: ClassVar[bool] = False
    wants_words: ClassVar[bool] = False
    over_regions: ClassVar[bool] = False
    takes_unpaired: ClassVar[bool] = False
    composes: ClassVar[bool] = False
    ranking: ClassVar[str] = "csd"
    soft_labels: ClassVar[bool] = False
    distances: ClassVar[bool] = False
    trained: ClassVar[bool] = True
    note: ClassVar[str] = ""
    networks: ClassVar[int] = 1
    trains: tuple[str, ...] = ()
    match: ClassVar[Literal["distance", "samples", "cosine", "none"]] = "none"

    def __init__(self, config: Config, model: DualEncoder, pairs: CaptionDataset):
        from torch import nn

        self.config, self.options, self.module = config, config.loss, nn.Module()
        self.aside: nn.Module = nn.Module()
        self.aside_optimizer: torch.optim.Optimizer | None = None

    @classmethod
    def model_options(cls, config: Config) -> dict:
        """Further options of `create_model`, such as the number of embeddings of an item."""
        return {
            "probabilistic": cls.probabilistic, "ranking": cls.ranking, "match": cls.match,
            "temperature_trained": "logit_scale" in cls.trains or not cls.trained,
        }  # fmt: skip

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        """The loss of the whole batch; its gradient on every rank is that of the whole batch too."""
        raise NotImplementedError

    def after_step(self, batch: Batch, model: DualEncoder) -> dict[str, Tensor]:
        """Train `aside` after the model's own step, with gradients that start from zero.

        The batch is that of all ranks and the generator is seeded alike, so every rank computes the same gradient from
        the detached embeddings, and nothing is reduced.

        Returns:
            terms for the log.
        """
        return {}

    def begin_epoch(self, epoch: int) -> None:
        """Called on all ranks before an epoch."""

    def freeze(self, model: DualEncoder, epoch: int, first_phase: bool) -> bool:
        """Freeze or thaw parts of a network before its turn in an epoch, also when a run resumes.

        Args:
            epoch: from 0.
            first_phase: whether the recipe has the image trunk frozen in this epoch.

        Returns:
            whether anything has changed.
        """
        from probemb.models.layers import freeze_backbones

        o = self.config.optimizer
        return freeze_backbones(model, first_phase, o.freeze_text and epoch < o.freeze_epochs)

    def optimizer(self, groups: list[dict]) -> torch.optim.Optimizer:
        """The optimizer of the recipe's parameter groups (`recipe.parameter_groups`): Adam, AdamW or AdamP."""
        from finetune.recipe import create_optimizer

        return create_optimizer(groups, self.config.optimizer.name)

    def scalars(self, model: DualEncoder) -> dict[str, Tensor]:
        """Trained scalars that are logged, by name."""
        return {name: getattr(model, name) for name in self.trains}

    @classmethod
    def unused(cls, config: Config, names: Iterable[str], because: str, remedy: str) -> Iterator[UserError]:
        """Errors for options of the method that have no effect in this configuration and are not at their defaults.

        Args:
            names: of these options.
            because: the setting that leaves them without effect, a clause.
            remedy: what to do instead of leaving the option out, a clause.
        """
        defaults = {field.name: field.default for field in fields(cls.Options)}
        for name in names:
            value = getattr(config.loss, name)
            if value != defaults[name]:
                yield UserError(
                    f"The method {config.method} does not use loss.{name}, which is {value}: {because}.",
                    f"Leave loss.{name} out, or {remedy}.",
                )

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse settings that the method cannot train with, all at once. Raises UserError."""
        raise_together(cls.problems(config))

    @classmethod
    def problems(cls, config: Config) -> Iterator[UserError]:
        """Errors for settings that the method cannot train with."""
        from finetune.methods.registry import METHODS

        def others(attribute: str) -> str:
            return ", ".join(name for name, method in METHODS.items() if getattr(method, attribute))

        name = config.method
        if config.distance is not None and not cls.distances:
            yield UserError(
                f"The method {name} has no choice of distance.",
                f"Leave --distance out, or choose one of {others('distances')}.",
            )
        yield from composing_problems(config, cls.composes, others("composes"))
        if config.data.unpaired is not None and not cls.takes_unpaired:
            yield UserError(
                f"The method {name} learns from pairs alone, and data.unpaired is {config.data.unpaired}.",
                f"Leave it out, or choose one of {others('takes_unpaired')}.",
            )
        if config.ranking is not None and not cls.probabilistic:
            yield UserError(
                f"The method {name} has no variances to rank by, and ranking is {config.ranking}.",
                "Leave --ranking out: the method validates by its own.",
            )
        if not cls.soft_labels and (config.mix.ratio or config.mix.smoothing):
            what = "mixed images (mix.ratio)" if config.mix.ratio else "label smoothing (mix.smoothing)"
            yield UserError(
                f"The method {name} cannot learn from {what}: its loss needs pairs that match or do not.",
                f"Set it to 0, or choose one of {others('soft_labels')}.",
            )
        if not cls.probabilistic and config.model.n_unc_layers:
            yield UserError(
                f"The method {name} predicts no uncertainty, and model.n_unc_layers is {config.model.n_unc_layers}.",
                "Leave model.n_unc_layers out.",
            )
        if config.size_augment and config.model.head in ("clip", "mlp"):
            yield UserError(
                f"SizeAugment drops tokens, and head {config.model.head} pools a single one.",
                "Set size_augment to 0, or model.head to gpo.",
            )
        if cls.trained and config.epochs < 1:
            yield UserError(
                "epochs is 0: nothing would be trained.", "Set it to 1 or more, or choose --method clip-zs."
            )


def composing_problems(config: Config, composes: bool, those: str) -> Iterator[UserError]:
    """Errors for what has no use for composed queries, or for pairs."""
    from finetune.config import Compose
    from finetune.methods.registry import METHODS

    if not composes:
        if config.compose != Compose():
            yield UserError(
                f"The method {config.method} trains on pairs, and has no queries of several parts (compose).",
                f"Leave compose out, or choose one of {those}.",
            )
        return
    for name, used in (
        ("noise_ratio", config.noise_ratio),
        ("size_augment", config.size_augment),
        ("data.positives", config.data.positives != "image"),
        ("ranking", config.ranking is not None),
    ):
        if used:
            yield UserError(
                f"The method {config.method} trains on composed queries, which {name} is not for.",
                f"Leave {name} out, or set it to its default.",
            )
    if config.compose.ranking == "density" and not METHODS[config.method].probabilistic:
        yield UserError(
            f"The method {config.method} predicts no uncertainty, so compose.ranking cannot be density.",
            "Leave compose.ranking out.",
        )
