"""One training of the study of the variance, with finetune's own PCME++, trainer and recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from finetune.config import Config, Optimizer
from finetune.methods.base import Batch
from finetune.methods.pcmepp import PCMEPlusPlus
from probemb.data.scenes import match_matrix
from probemb.models import DualEncoder, create_model
from tools.claims.ambiguity.world import OneCaption, Part, Sizes, World
from tools.claims.fitting import fit_best

NOTHING, RANDOM, START = "nothing", "random weights", "the start"  # what a training begins with


@dataclass(frozen=True)
class Settings:
    """Settings that all trainings share.

    Attributes:
        sizes: of the world.
        name: the architecture (probemb/models/configs).
        batch_size: scenes in a batch, each with one caption.
        start_epochs, start_lr: of a seed's start, from random weights with the CLIP and the match loss.
        start_scale: a = b of the start at first.
        random_epochs: of the other trainings from random weights, at start_lr.
        epochs, lr: of the finetunings; learning rates fall along a cosine.
        scale: a = b that finetune sets at first.
    """

    sizes: Sizes = field(default_factory=Sizes)
    name: str = "scenes-cnn-gru"
    batch_size: int = 128
    start_epochs: int = 4
    start_lr: float = 2e-3
    start_scale: float = 1.0
    random_epochs: int = 2
    epochs: int = 5
    lr: float = 5e-4
    scale: float = 5.0


@dataclass(frozen=True)
class Training:
    """One training: a variant with a name, and a seed, which decides scenes, order and random weights.

    Attributes:
        begin: RANDOM, START, or NOTHING for the start itself, untrained.
        clip, pseudo_positive: weights of the CLIP loss and of the pseudo-positives beside the match loss.
        all_true: whether every true match in a batch is labelled, instead of a scene's own caption alone.
        frozen: whether the heads of the log-variances stay as they are.
        kept: whether a and b continue from the start's values instead of the settings' scale.
        lr: None for the settings'.
    """

    name: str
    seed: int
    begin: str = START
    clip: float = 0.0
    pseudo_positive: float = 0.0
    all_true: bool = False
    frozen: bool = False
    lr: float | None = None
    kept: bool = False

    def epochs(self, settings: Settings) -> int:
        """Passes over the scenes."""
        return {NOTHING: 0, RANDOM: settings.random_epochs, START: settings.epochs}[self.begin]

    def config(self, settings: Settings) -> Config:
        """The run as finetune describes it."""
        rate = settings.start_lr if self.begin == RANDOM else settings.lr
        return make_config(
            settings, self.seed, self.epochs(settings), self.lr or rate,
            PCMEPlusPlus.Options(settings.scale, settings.scale, self.pseudo_positive, self.clip),
        )  # fmt: skip


def make_config(settings: Settings, seed: int, epochs: int, lr: float, loss: PCMEPlusPlus.Options) -> Config:
    """PCME++ with all of a small model trained at one rate, without mixed images."""
    rates = {"image_backbone": 1.0, "text_backbone": 1.0, "layer_decay": 1.0, "freeze_epochs": 0}
    return Config(
        seed=seed,
        batch_size=settings.batch_size,
        epochs=epochs,
        size_augment=0.0,
        swa_epochs=0,
        loss=loss,
        optimizer=Optimizer(lr=lr, **rates, warmup_epochs=0.5, schedule="cosine"),
    )


class AllTrue(PCMEPlusPlus):
    """PCME++ whose labels are every true match of a batch, as scenes know it."""

    def __init__(self, config, model, pairs):
        super().__init__(config, model, pairs)
        self._scenes = [scene for scene, _ in pairs.scenes]
        self._captions = [caption for _, told in pairs.scenes for caption in told]

    def loss(self, batch: Batch, model: DualEncoder):
        scenes = [self._scenes[i] for i in batch.image_index.tolist()]
        captions = [self._captions[i] for i in batch.pair_index.tolist()]
        batch.match = torch.from_numpy(match_matrix(scenes, captions)).to(batch.match)
        return super().loss(batch, model)


def create(world: World, settings: Settings, seed: int, scale: float) -> DualEncoder:
    """The model with random weights and a = b = scale."""
    torch.manual_seed(seed)
    return create_model(
        settings.name, n_unc_layers=0, vocabulary=world.vocabulary, image_size=settings.sizes.pixels,
        init_scale=scale, init_shift=scale,
    )  # fmt: skip


def fit(
    model: DualEncoder, config: Config, part: Part, step_done: Callable[[], object], all_true: bool = False,
    frozen: bool = False,
) -> DualEncoder:  # fmt: skip
    """Train in place; `all_true` and `frozen` as in `Training`."""
    method = (AllTrue if all_true else PCMEPlusPlus)(config, model, part.dataset)
    for name, parameter in model.named_parameters():
        if frozen and ".log_var_head." in name:
            parameter.requires_grad_(False)
    fit_best([model], method, config, OneCaption(part, config.batch_size, config.seed, step_done))
    return model.eval()


def pretrain(world: World, settings: Settings, seed: int, step_done: Callable[[], object]) -> dict[str, Tensor]:
    """The weights that the finetunings of a seed start from: the CLIP and the match loss from random weights."""
    scale = settings.start_scale
    loss = PCMEPlusPlus.Options(scale, scale, 0.0, 1.0)
    config = make_config(settings, seed, settings.start_epochs, settings.start_lr, loss)
    return fit(create(world, settings, seed, scale), config, world.start, step_done).state_dict()


def train(
    world: World, settings: Settings, training: Training, start: dict[str, Tensor], step_done: Callable[[], object]
) -> DualEncoder:
    """The model after a training."""
    model = create(world, settings, training.seed, settings.scale)
    if training.begin != RANDOM:
        model.load_state_dict(start)
    if training.begin == NOTHING:
        return model.eval()
    if not training.kept:
        with torch.no_grad():
            model.scale.fill_(settings.scale)
            model.shift.fill_(settings.scale)
    part = world.start if training.begin == RANDOM else world.training[training.seed]
    return fit(model, training.config(settings), part, step_done, training.all_true, training.frozen)
