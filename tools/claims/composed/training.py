"""One training on composed queries, with finetune's own methods, trainer and recipe; the image trunk is frozen.

Nothing here looks at test images before a training is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from finetune.config import Config, Model, Optimizer
from finetune.methods import METHODS
from finetune.tuple_feed import TupleFeed
from probemb.models import DualEncoder, create_tokenizer
from tools.claims.composed.measuring import retrieval
from tools.claims.composed.variants import SEEN, Training
from tools.claims.composed.world import KeptRows, Loader, World, make_model
from tools.claims.fitting import fit_best

PHOTOGRAPHS_EPOCHS = 4  # they have fewer combinations than drawn scenes


@dataclass(frozen=True)
class Settings:
    """Settings that all trainings share.

    Attributes:
        world: scenes or coco_small.
        name, head, embed_dim: architecture (probemb/models/configs), heads and D.
        batch_size: queries in a batch; repeats: examples of a combination in an epoch; epochs: of every training.
        images, pixels: drawn pictures of composed queries, 4:1:1 in train, val and test, and their side; 0 images for
            photographs.
        pictures, trunk_batch, trunk_lr: training pictures that the trunk of drawn scenes learns from, and as many
            crops; of both in a batch; the largest learning rate.
        trained_parts: concepts in the queries that are trained on.
        validation_queries, test_queries: so many of each length, where none are published.
    """

    world: str = "scenes"
    name: str = "scenes-cnn-gru"
    head: str = "pie"
    embed_dim: int = 128
    batch_size: int = 128
    repeats: int = 16
    epochs: int = 2
    images: int = 12_000
    pixels: int = 64
    pictures: int = 80_000
    trunk_batch: int = 32
    trunk_lr: float = 2e-3
    trained_parts: tuple[int, ...] = (2, 3)
    validation_queries: int = 1000
    test_queries: int = 4000


def settings_of(world: str, epochs: int = 0) -> Settings:
    """Those of a world; 0 epochs for its own."""
    if world == "scenes":
        return Settings(epochs=epochs or Settings.epochs)
    return Settings(world, "effnet-lite0-gru", "clip", epochs=epochs or PHOTOGRAPHS_EPOCHS, images=0, pictures=0)


def config_of(training: Training, settings: Settings) -> Config:
    """The run as finetune describes it: Adam as in the paper, a cosine in place of its steps."""
    values, method = training.values, METHODS[training.method]
    loss = {**dict(training.options), **{name: values[name] for name in ("temperature", "scale") if name in values}}
    config = Config(
        method=training.method,
        seed=training.seed,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        size_augment=0.0,
        swa_epochs=0,
        model=Model(settings.name, pretrained=None, head=settings.head, n_unc_layers=0, lock_image=True),
        loss=method.Options(**loss),
        optimizer=Optimizer(
            name="adam",
            lr=values["lr"],
            weight_decay=0.0,
            image_backbone=1.0,
            text_backbone=1.0,
            layer_decay=1.0,
            freeze_epochs=0,
            warmup_epochs=0.25,
            schedule="cosine",
        ),
    )
    method.check(config)
    return config


def create(world: World, settings: Settings, config: Config) -> DualEncoder:
    """A model that reads kept features; heads, GRU and composer are random, words start from their vectors."""
    torch.manual_seed(config.seed)
    method = METHODS[config.method]
    model = make_model(settings, world.vocabulary, **method.model_options(config))
    if world.vectors:
        model.text.fill_embedding(world.vectors)
    for name in [name for name, _ in model.image_tower.named_children()]:
        if name in ("trunk", "stem", "stages", "branch"):  # their features are kept
            setattr(model.image_tower, name, torch.nn.Identity())
    model.image_tower.feature_layout = replace(world.layout, probabilistic=method.probabilistic)
    return model


def repeats_of(world: World, settings: Settings, training: Training) -> int:
    """Examples of a combination in an epoch: where there are fewer combinations, more of each."""
    return settings.repeats * len(world.train[training.parts].tuples) // len(world.trained(training).tuples)


def fit(
    world: World, settings: Settings, training: Training, step_done: Callable[[], object]
) -> tuple[DualEncoder, list[float]]:
    """Train; returns the model of the epoch with the best validation, and R-Precision after every epoch, in percent."""
    config, data, asked = config_of(training, settings), world.trained(training), world.validated(training)
    model = create(world, settings, config)
    method = METHODS[config.method](config, model, data)
    tokenizer = create_tokenizer(model)

    def validate() -> float:
        return 100 * retrieval(model, tokenizer, world.validation_kept, asked, SEEN)["all"]["r_precision"]

    rows = KeptRows(data, world.kept, tokenizer, config.batch_size, config.seed, repeats_of(world, settings, training))
    feed = TupleFeed(config, data, torch.device("cpu"))
    values = fit_best([model], method, config, Loader(rows, step_done), validate, feed)
    return model.eval(), values
