"""One training of `tools.claims`, with finetune's own methods, trainer, recipe and augmentation.

Nothing here looks at the test scenes before a training is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from open_clip.transform import PreprocessCfg
from torch import Tensor

from finetune.config import Config, Mix, Optimizer
from finetune.methods import METHODS
from probemb.models.dual_encoder import POOLING, DualEncoder, plain
from probemb.models.pretrained import fill_from_model
from tools.claims.fitting import fit_best
from tools.claims.scenes.measuring import both_ways, measure
from tools.claims.scenes.world import MemoryLoader, Part, Sizes, World


@dataclass(frozen=True)
class Settings:
    """Settings that all trainings share.

    Attributes:
        sizes: of the world.
        width, image_blocks, text_blocks, patch, embed_dim: of the towers.
        batch_size: pairs in a batch.
        pretraining_epochs, pretraining_lr: of the common start of a seed.
        epochs: of every training; in the last one the learning rate is a tenth.
    """

    sizes: Sizes = field(default_factory=Sizes)
    width: int = 64
    image_blocks: int = 3
    text_blocks: int = 2
    patch: int = 8
    embed_dim: int = 64
    batch_size: int = 128
    pretraining_epochs: int = 5
    pretraining_lr: float = 2e-3
    epochs: int = 4


# Chosen once on the validation scenes, see `tools.claims`. scale: a = b of the match probability.
CHOSEN: dict[str, dict[str, float]] = {
    "infonce": {"lr": 2e-3, "temperature": 45.0},
    "vse": {"lr": 1e-3, "margin": 0.2},
    "pcme": {"lr": 2e-3, "scale": 10.0},
    "pcmepp": {"lr": 2e-3, "scale": 2.5},
}
GRID: dict[str, tuple[str, tuple[float, ...]]] = {
    "infonce": ("temperature", (1.0, 5.0, 15.0)),
    "vse": ("margin", (0.1, 0.2, 0.4)),
    "pcme": ("scale", (5.0, 10.0, 20.0)),
    "pcmepp": ("scale", (5.0, 10.0, 20.0)),
}
LEARNING_RATES = (1e-3, 2e-3)


@dataclass(frozen=True)
class Training:
    """One training: a variant with a name, and a seed, which decides scenes, order, noise and random weights.

    pseudo_positive, vib, mix and clip are PCME++'s; `chosen` replaces values of CHOSEN.
    """

    name: str
    seed: int
    method: str
    noise: float = 0.0
    distance: str | None = None
    pseudo_positive: float = 0.1
    vib: float = 1e-4
    mix: float = 0.25
    clip: float = 0.0
    chosen: tuple[tuple[str, float], ...] = ()

    def config(self, settings: Settings) -> Config:
        """The run as finetune describes it: losses, batch and step decay; the miniature's towers learn at one rate."""
        value = {**CHOSEN[self.method], **dict(self.chosen)}
        loss = {name: value[name] for name in ("temperature", "margin") if name in value}
        if "scale" in value:
            loss |= {"scale": value["scale"], "shift": value["scale"]}
        if self.method == "pcmepp":
            loss |= {"pseudo_positive": self.pseudo_positive, "vib": self.vib, "clip": self.clip}
        mix = Mix(ratio=self.mix, smoothing=1e-4) if self.method == "pcmepp" else Mix()
        config = Config(
            method=self.method,
            seed=self.seed,
            batch_size=settings.batch_size,
            epochs=settings.epochs,
            distance=(self.distance or "csd") if self.method == "pcmepp" else None,
            noise_ratio=self.noise,
            size_augment=0.0,
            swa_epochs=0,
            loss=METHODS[self.method].Options(**loss),
            mix=mix,
            optimizer=_optimizer(value["lr"], decay_epochs=1 if settings.epochs > 1 else 0),
        )
        METHODS[self.method].check(config)
        return config


def pretraining_config(settings: Settings, seed: int) -> Config:
    """InfoNCE from random weights."""
    epochs = settings.pretraining_epochs
    return Config(
        method="infonce",
        seed=seed,
        batch_size=settings.batch_size,
        epochs=epochs,
        size_augment=0.0,
        swa_epochs=0,
        loss=METHODS["infonce"].Options(temperature=10.0),
        optimizer=_optimizer(settings.pretraining_lr, decay_epochs=epochs // 4),
    )


def _optimizer(lr: float, decay_epochs: int) -> Optimizer:
    return Optimizer(
        lr=lr,
        image_backbone=1.0,
        text_backbone=1.0,
        layer_decay=1.0,
        freeze_epochs=0,
        warmup_epochs=0.25,
        decay_epochs=decay_epochs,
    )


def create(world: World, settings: Settings, config: Config, start: dict[str, Tensor] | None) -> DualEncoder:
    """A model of the miniature's size; its mean branch begins as the pretraining ended, its uncertainty at random."""
    torch.manual_seed(config.seed)
    model = _model(world, settings, METHODS[config.method].probabilistic)
    if start is not None:
        source = _model(world, settings, False)
        source.load_state_dict(start)
        fill_from_model(model, source, "the pretraining")
    with torch.no_grad():
        model.scale.fill_(getattr(config.loss, "scale", 1.0))
        model.shift.fill_(getattr(config.loss, "shift", 1.0))
    return model


def _model(world: World, settings: Settings, probabilistic: bool) -> DualEncoder:
    pixels, width = settings.sizes.pixels, settings.width
    vision = {"image_size": pixels, "patch_size": settings.patch, "width": width, "layers": settings.image_blocks}
    text = {"context_length": world.context, "vocab_size": world.vocabulary, "width": width}
    architecture = {
        "embed_dim": settings.embed_dim,
        "vision_cfg": {**vision, "head_width": width // 2},
        "text_cfg": {**text, "heads": 2, "layers": settings.text_blocks},
    }
    return DualEncoder(
        {
            "name": "miniature",
            "architecture": architecture,
            "preprocess": plain(vars(PreprocessCfg(size=pixels))),
            "head": "clip",
            "embed_dim": settings.embed_dim,
            "n_unc_layers": 1 if probabilistic else 0,
            "probabilistic": probabilistic,
            "uncertainty_bias": True,
            "pooling": dict(POOLING),
        }
    )


def fit(
    world: World,
    settings: Settings,
    config: Config,
    part: Part,
    start: dict[str, Tensor] | None = None,
    step_done: Callable[[], object] = lambda: None,
    select: bool = True,
) -> tuple[DualEncoder, list[float]]:
    """Train; returns the model of the epoch with the best validation, and the validation after every epoch.

    `select` False takes the last epoch and validates nothing.
    """
    model = create(world, settings, config, start)
    method = METHODS[config.method](config, model, part.dataset)

    def validate() -> float:
        return both_ways(model, config, world.validation)["map_at_r"]

    loader = MemoryLoader(part, config.batch_size, config.seed, step_done)
    values = fit_best([model], method, config, loader, validate if select else None)
    return model.eval(), values


def pretrain(world: World, settings: Settings, seed: int, step_done: Callable[[], object]) -> dict[str, Tensor]:
    """The weights that all trainings of a seed start from."""
    part = world.pretraining[seed]
    return fit(world, settings, pretraining_config(settings, seed), part, None, step_done, select=False)[0].state_dict()


def train(
    world: World, settings: Settings, training: Training, start: dict[str, Tensor], step_done: Callable[[], object],
    test: bool = True,
) -> dict:  # fmt: skip
    """Train and measure; `test` False looks at the validation scenes alone."""
    config = training.config(settings)
    part = world.training[training.seed]
    if training.noise:
        part = part.noisy(training.noise, training.seed)
    model, values = fit(world, settings, config, part, start, step_done)
    found = {"validation": values, "scale": float(model.scale.detach()), "shift": float(model.shift.detach())}
    return {**found, **measure(model, config, world)} if test else found
