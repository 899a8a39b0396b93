"""One training on photographs, with finetune's own methods, trainer and recipe; only heads and text tower learn.

Nothing here looks at test images before a training is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from finetune.config import Config, Mix, Model, Optimizer
from finetune.methods import METHODS
from probemb.evaluation.embedding import encode_images, encode_texts
from probemb.gaussian import Gaussian
from probemb.models import DualEncoder, as_one, create_model
from probemb.models.ensemble import Ensemble
from tools.claims.fitting import fit_best
from tools.claims.flickr8k.measuring import rsum_of
from tools.claims.flickr8k.world import KeptFeatures, Loader, Part, World

EVALUATED = 250  # images embedded at a time
PROBABILISTIC_RANKING, POINT_RANKING = "csd", "mean"  # by which the epoch is chosen


@dataclass(frozen=True)
class Settings:
    """Settings that all trainings share.

    Attributes:
        name, head: architecture (probemb/models/configs) and heads.
        min_count: a word of the vocabulary occurs so often in the training captions.
        batch_size: pairs in a batch.
        epochs: of every training; learning rates fall along a cosine, after `warmup_epochs`.
    """

    name: str = "effnet-lite0-gru"
    head: str = "clip"
    min_count: int = 4
    batch_size: int = 128
    epochs: int = 4
    warmup_epochs: float = 0.5


# Chosen on the validation images, see `study.py`. scale, shift: a and b of the match probability at first; scalars:
# multiplier of their learning rate.
CHOSEN: dict[str, dict[str, float]] = {
    "infonce": {"lr": 1e-3, "temperature": 14.0, "scalars": 30.0},
    "vse": {"lr": 1e-3, "margin": 0.2},
    "pcme": {"lr": 1e-3, "scale": 13.0, "shift": 13.0, "scalars": 30.0},
    "pcmepp": {"lr": 1e-3, "scale": 13.0, "shift": 13.0, "scalars": 30.0},
    "pcmepp with CLIP": {"lr": 1e-3, "scale": 13.0, "shift": 13.0, "scalars": 30.0},
    "decl": {"lr": 1e-3, "margin": 0.2},
    "ncr": {"lr": 1e-3, "margin": 0.2},
}
GRID = {"lr": (5e-4, 1e-3, 2e-3)}
# The match loss from random heads (`--choose`): weight of the CLIP loss, and what differs from CHOSEN or the settings.
NEEDS: dict[str, tuple[float, dict[str, float]]] = {
    "match": (0.0, {}),
    "match, a and b at lr": (0.0, {"scalars": 1.0}),
    "match, a = b = 5": (0.0, {"scale": 5.0, "shift": 5.0}),
    "match, a = b = 5 at lr": (0.0, {"scale": 5.0, "shift": 5.0, "scalars": 1.0}),
    "match, 8 epochs": (0.0, {"epochs": 8}),
    "match, batch 64": (0.0, {"batch_size": 64}),
    "match + 0.1 CLIP": (0.1, {}),
    "match + 0.3 CLIP": (0.3, {}),
    "match + 1 CLIP": (1.0, {}),
    "match + 0.3 CLIP, a = b = 5 at lr": (0.3, {"scale": 5.0, "shift": 5.0, "scalars": 1.0}),
}


@dataclass(frozen=True)
class Training:
    """One training: a variant with a name, and a seed, which decides order, noise and random weights.

    pseudo_positive, vib, mix and clip are PCME++'s; `chosen` replaces values of CHOSEN.
    """

    name: str
    seed: int
    method: str
    noise: float = 0.0
    pseudo_positive: float = 0.0
    vib: float = 1e-4
    mix: float = 0.0
    clip: float = 0.0
    chosen: tuple[tuple[str, float], ...] = ()

    @property
    def values(self) -> dict[str, float]:
        """Learning rate and loss scalars; batch_size and epochs, if they are not the settings'."""
        return {**CHOSEN[f"{self.method} with CLIP" if self.clip else self.method], **dict(self.chosen)}

    def epochs(self, settings: Settings) -> int:
        """Passes over the pairs."""
        return int(self.values.get("epochs", settings.epochs))

    @property
    def probabilistic(self) -> bool:
        """True if log-variances are trained."""
        return METHODS[self.method].probabilistic

    def config(self, settings: Settings) -> Config:
        """The run as finetune describes it."""
        values = self.values
        loss = {name: values[name] for name in ("temperature", "margin", "scale", "shift") if name in values}
        if self.method == "pcmepp":
            loss |= {"pseudo_positive": self.pseudo_positive, "vib": self.vib, "clip": self.clip}
        config = Config(
            method=self.method,
            seed=self.seed,
            batch_size=int(values.get("batch_size", settings.batch_size)),
            epochs=self.epochs(settings),
            noise_ratio=self.noise,
            size_augment=0.0,
            swa_epochs=0,
            model=Model(settings.name, pretrained=None, head=settings.head, n_unc_layers=0, lock_image=True),
            loss=METHODS[self.method].Options(**loss),
            mix=Mix(ratio=self.mix, smoothing=1e-4 if self.mix else 0.0),
            optimizer=Optimizer(
                lr=values["lr"],
                image_backbone=1.0,
                text_backbone=1.0,
                layer_decay=1.0,
                freeze_epochs=0,
                warmup_epochs=settings.warmup_epochs,
                scalars=values.get("scalars", 1.0),
                schedule="cosine",
            ),
        )
        METHODS[self.method].check(config)
        return config


def create(world: World, settings: Settings, config: Config) -> list[DualEncoder]:
    """The method's networks, which read kept features; heads and GRUs are random, words start from their vectors."""
    torch.manual_seed(config.seed)
    method, networks = METHODS[config.method], []
    for _ in range(method.networks):
        model = create_model(
            settings.name, n_unc_layers=0, head=settings.head, probabilistic=method.probabilistic,
            vocabulary=world.vocabulary, init_scale=getattr(config.loss, "scale", 1.0),
            init_shift=getattr(config.loss, "shift", 1.0),
        )  # fmt: skip
        model.text.fill_embedding(world.vectors)
        model.image_tower.trunk = torch.nn.Identity()  # its features are kept
        model.image_tower.feature_layout = KeptFeatures(world.channels, method.probabilistic)
        networks.append(model)
    return networks


def embed(model: DualEncoder | Ensemble, part: Part, whole_maps: bool) -> tuple[Gaussian, Gaussian]:
    """Gaussians (N, D) of the images and (M, D) of the captions."""
    training = model.training
    model.eval()
    rows = torch.arange(len(part.dataset)).split(EVALUATED)
    images = encode_images(model.encode_image, (part.maps(r) if whole_maps else part.pooled[r] for r in rows))
    texts = encode_texts(model.encode_text, part.tokens, cut=model.cut_padding)
    model.train(training)
    return images, texts


def reads_maps(model: DualEncoder) -> bool:
    """True if the heads look at every cell of the feature map."""
    return getattr(model.image_tower.mean_head, "reads_tokens", False)


def fit(
    world: World, settings: Settings, training: Training, step_done: Callable[[], object]
) -> tuple[DualEncoder | Ensemble, dict]:
    """Train; returns the model of the epoch with the best validation RSUM, and the numbers of the training.

    Numbers: "validation" (RSUM after every epoch), "epoch" (the best, from 1), "scale", "shift", "temperature".
    """
    config = training.config(settings)
    part = world.train.noisy(training.noise, training.seed) if training.noise else world.train
    networks = create(world, settings, config)
    method = METHODS[config.method](config, networks[0], part.dataset)
    model, maps = as_one(networks), reads_maps(networks[0])
    ranking = PROBABILISTIC_RANKING if training.probabilistic else POINT_RANKING

    def validate() -> float:
        return rsum_of(*embed(model, world.validation, maps), world.validation.dataset, ranking)

    loader = Loader(part, config.batch_size, config.seed, maps or training.mix > 0, step_done)
    values = fit_best(networks, method, config, loader, validate)
    numbers = {"validation": values, "epoch": values.index(max(values)) + 1, **_scalars(networks[0], method)}
    return model.eval(), numbers


def _scalars(model: DualEncoder, method) -> dict[str, float]:
    held: dict[str, Tensor] = {"logit_scale": model.logit_scale.exp(), **method.scalars(model)}
    return {name: float(x.detach()) for name, x in held.items()}
