"""Configuration of a finetuning run: one dataclass, read from the method's YAML, `--config` files and options."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Literal

from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    restricted_number_type,
)

from finetune.methods import METHODS
from probemb.cli.configuration import chosen_options, given
from probemb.cli.ranges import BelowHalf, Count, Folder, Minutes, Precision, Resize, Seed, Threads, Workers
from probemb.data.captions.find import FormatName
from probemb.errors import UserError, raise_together
from probemb.models.options import Head, TrainedTowers

CONFIGS = Path(__file__).parent / "configs"
WORDS = "size_augment augment.word_dropping"  # options that change them
PIXELS = "mix.ratio augment.scale augment.hflip augment.cutout"
OF_PAIRS = "noise_ratio size_augment data.positives ranking"
Parts = restricted_number_type("Parts", int, [(">=", 2), ("<=", 10)])
Pairs = restricted_number_type("Pairs", int, [(">=", 2), ("<=", 1_000_000)])


@dataclass(frozen=True)
class Model(TrainedTowers):
    """The towers."""

    name: str = "ViT-B-32-quickgelu"
    pretrained: str | None = "openai"
    head: Head = "gpo"


@dataclass(frozen=True)
class Data:
    """Images and their captions, in any form that probemb.data.captions.find reads.

    Args:
        path: images with captions: a table, images with a .txt beside each, shards or a json (docs/data.md).
        images: folder of the images that a file names.
        format: of `path`; empty to detect it.
        train: split to train on; COCO's restval belongs to train. Empty for all of the data.
        validation: split that selects the model; empty for none. Of data without splits, a tenth of the images is drawn
            as val, and train is the others.
        positives: image (captions match their own image) or class (all images of it); in training and validation.
        workers: processes that read and decode, for each rank.
        failure_share: share of unreadable samples at which the run stops.
        exif: apply EXIF orientation; open_clip does not.
        resize: backend for resizing: tensor (torch, fast) or pil (as open_clip); in validation too.
        cache_features: folder for locked towers' features; each image, or text, is then read once. Empty for none.
        unpaired: images and texts to reconstruct, whose pairing is ignored; for the autoencoders, their split `train`.
        unpaired_images: folder of their images.
        unpaired_batch: their images, and their texts, in a batch, over all ranks.
    """

    path: str | None = None
    images: str | None = None
    format: FormatName | None = None
    train: str | None = "train"
    validation: str | None = "val"
    positives: Literal["image", "class"] = "image"
    workers: Workers = 2
    failure_share: ClosedUnitInterval = 0.05
    exif: bool = False
    resize: Resize = "tensor"
    cache_features: str | None = None
    unpaired: str | None = None
    unpaired_images: str | None = None
    unpaired_batch: Count = 128


@dataclass(frozen=True)
class Mix:
    """Mixed-sample augmentation of images; labels become soft.

    Args:
        mode: element (each image by itself) or batch (all of a batch, or none).
        ratio: share of the images that are mixed; in mode element. 0 for none, in both modes.
        prob: probability that an image is mixed, beside the ratio; in mode batch, that a batch is.
        mixup: parameter of Mixup's Beta distribution; 0 for CutMix alone.
        cutmix: parameter of CutMix's; 0 for Mixup alone.
        switch: probability of CutMix rather than Mixup.
        smoothing: label smoothing; a match of 1 becomes 1 - smoothing, of 0 smoothing.
    """

    mode: Literal["element", "batch"] = "element"
    ratio: ClosedUnitInterval = 0.0
    prob: ClosedUnitInterval = 1.0
    mixup: NonNegativeFloat = 2.0
    cutmix: NonNegativeFloat = 2.0
    switch: ClosedUnitInterval = 0.5
    smoothing: BelowHalf = 0.0


@dataclass(frozen=True)
class Augment:
    """Random crops and mirroring of images, and erased parts of images and texts.

    Args:
        scale: share of the image's area that a crop keeps, from and to.
        hflip: share of the images that are mirrored; captions that say left or right are wrong for them.
        cutout: share of an image that a grey square covers; at a random place, 0 for none.
        word_dropping: probability that a word becomes the unknown word; 0 for none.
    """

    scale: tuple[PositiveFloat, PositiveFloat] = (0.9, 1.0)
    hflip: ClosedUnitInterval = 0.0
    cutout: ClosedUnitInterval = 0.0
    word_dropping: ClosedUnitInterval = 0.0


@dataclass(frozen=True)
class Compose:
    """Queries of several parts, of mpc and its baselines; data.path is then of probemb.data.compositions.find.

    Args:
        parts: concepts in a query.
        setup: seen (validation has the combinations of training) or unseen (the test has others).
        lists: folder of MPC's published lists; empty to look beside the data, and to draw combinations otherwise.
        seed: of drawn splits and combinations.
        repeats: examples of each combination in an epoch; more where that is less than a batch.
        queries: validation queries.
        ranking: of the validation: cosine, or density; of the means, or a target's expected log-density under the
            composition. Empty for what the loss compares.
    """

    parts: Parts = 2
    setup: Literal["seen", "unseen"] = "seen"
    lists: str | None = None
    seed: Seed = 0
    repeats: PositiveInt = 1
    queries: PositiveInt = 2000
    ranking: Literal["cosine", "density"] | None = None


@dataclass(frozen=True)
class Optimizer:
    """AdamP with step decay (PCME++ §B.2), or a cosine.

    Args:
        name: adamp, adamw or adam.
        lr: of the heads; the towers' is a multiple of it.
        scalars: multiplier of lr for a, b and infonce's temperature.
        weight_decay: on all but scalars.
        image_backbone: multiplier of the image tower's lr.
        text_backbone: multiplier of the text tower's lr.
        layer_decay: further multiplier, per block from the last one down.
        decay_uncertainty: apply these multipliers to the uncertainty branch's blocks too.
        freeze_epochs: first epochs, in which the image tower is frozen.
        freeze_text: freeze the text tower's trunk, or word vectors, in these epochs too.
        warmup_epochs: epochs of linear warm-up after that.
        schedule: step (the last decay_epochs at a tenth) or cosine (down to 0 over the whole run).
        decay_epochs: last epochs, in which every lr is a tenth, of schedule step; [20, 10]: a tenth in the last 20, and
            a hundredth in the last 10.
        clip_grad_norm: largest norm of the gradient; 0 switches clipping off.
    """

    name: Literal["adamp", "adamw", "adam"] = "adamp"
    lr: PositiveFloat = 5e-4
    scalars: PositiveFloat = 1.0
    weight_decay: NonNegativeFloat = 1e-4
    image_backbone: PositiveFloat = 0.01
    text_backbone: PositiveFloat = 0.1
    layer_decay: PositiveFloat = 0.7
    decay_uncertainty: bool = True
    freeze_epochs: NonNegativeInt = 2
    freeze_text: bool = False
    warmup_epochs: NonNegativeFloat = 1.0
    schedule: Literal["step", "cosine"] = "step"
    decay_epochs: NonNegativeInt | tuple[NonNegativeInt, ...] = 10
    clip_grad_norm: NonNegativeFloat = 2.0

    @property
    def decays(self) -> tuple[int, ...]:
        """`decay_epochs`, each of them."""
        return self.decay_epochs if isinstance(self.decay_epochs, tuple) else (self.decay_epochs,)

    @property
    def decaying(self) -> int:
        """Epochs at the end with a lower rate than the peak's."""
        return 0 if self.schedule == "cosine" else max(self.decays, default=0)


@dataclass(frozen=True)
class Evaluate:
    """Zero-shot classification after every epoch, beside the validation, which selects the model.

    Args:
        classes: labelled images, in a form of docs/data.md; empty switches it off. One set, or several as PATH or
            NAME=PATH, logged as NAME/zeroshot_top1, …
        templates: single ("a photo of a {}.") or all (CLIP's 80).
    """

    classes: list[str] | str | None = None
    templates: Literal["single", "all"] = "single"


@dataclass(frozen=True)
class Engine:
    """Computation of a step.

    Args:
        precision: fp32, bf16 (autocast), or auto: bf16 if the GPU has it.
        grad_checkpointing: recompute every block in the backward pass.
        threads: CPU threads of each rank; 0 shares the machine's cores.
        eval_batch_size: images in a batch while validating.
        timeout: minutes that a process waits for the others; also while the first one validates.
    """

    precision: Precision = "auto"
    grad_checkpointing: bool = False
    threads: Threads = 0
    eval_batch_size: Count = 64
    timeout: Minutes = 120.0


@dataclass(frozen=True)
class Config:
    """A finetuning run.

    Args:
        method: its name in docs/papers.md.
        out: the run folder.
        resume: continue from the newest checkpoint in `out`, if any.
        seed: of everything random: weights, order, captions, augmentation.
        batch_size: pairs in a batch, over all ranks.
        epochs: passes over the data.
        ranking: of the validation: csd, mean or tolerance; it selects the epoch (docs/concepts.md). Empty for the
            method's own.
        noise_ratio: share of training captions moved to wrong images.
        size_augment: share of tokens that SizeAugment drops; 0 for none.
        swa_epochs: last epochs to average into model-swa/; 0 for none.
        stop_after_epochs: stop after so many epochs, to resume later; empty for none.
        save_every: steps between two checkpoints within an epoch; 0 saves at the ends of epochs only.
        keep_checkpoints: newest checkpoints to keep.
        log_every: steps between two log lines.
        wandb: a Weights & Biases project.
        loss: options of the method, see finetune/methods.
    """

    COMMON: ClassVar = (
        *("method", "loss", "out", "resume", "data.path", "data.images", "batch_size", "epochs", "seed"),
        *("model.name", "model.pretrained", "model.head", "model.lock_image"),
        *("optimizer.lr", "engine.precision", "data.workers", "evaluate.classes", "wandb"),
    )
    PATHS: ClassVar = (
        *("out", "data.path", "data.images", "data.cache_features", "data.unpaired", "data.unpaired_images"),
        *("model.name", "model.pretrained", "model.vocabulary", "model.word_vectors", "evaluate.classes"),
    )
    NAMED_PATHS: ClassVar = ("evaluate.classes",)  # those of PATHS that may be NAME=PATH

    method: str = "pcmepp"
    out: Folder = "runs/finetune"
    resume: bool = False
    seed: Seed = 0
    batch_size: Pairs = 128
    epochs: PositiveInt = 25
    ranking: Literal["csd", "mean", "tolerance"] | None = None
    noise_ratio: ClosedUnitInterval = 0.0
    size_augment: ClosedUnitInterval = 0.2
    swa_epochs: NonNegativeInt = 10
    stop_after_epochs: PositiveInt | None = None
    save_every: NonNegativeInt = 1000
    keep_checkpoints: PositiveInt = 2
    log_every: PositiveInt = 50
    wandb: str | None = None
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    loss: Any = field(**chosen_options("method", {name: cls.Options for name, cls in METHODS.items()}, "pcmepp"))
    mix: Mix = field(default_factory=Mix)
    augment: Augment = field(default_factory=Augment)
    compose: Compose = field(default_factory=Compose)
    optimizer: Optimizer = field(default_factory=Optimizer)
    evaluate: Evaluate = field(default_factory=Evaluate)
    engine: Engine = field(default_factory=Engine)


def with_method_file(argv: Sequence[str]) -> list[str]:
    """The command line with the method's own YAML before all other `--config` files, which win over it."""
    method = given("method", argv) or "pcmepp"
    return [f"--config={CONFIGS / f'{method}.yaml'}", *argv] if method in METHODS else list(argv)


def shortened(config: Config, argv: Sequence[str]) -> tuple[Config, str]:
    """Shorten a recipe's phases in proportion to fewer epochs, if they do not all fit, except for those set by options.
    Returns the configuration and a line that says so, or ""."""
    recipe, epochs, o = given("epochs", argv, options=False) or Config.epochs, config.epochs, config.optimizer
    if epochs >= recipe or max(o.freeze_epochs + 1, o.decaying + 1, o.freeze_epochs + o.warmup_epochs) <= epochs:
        return config, ""
    fewer = [min(epochs - 1, round(phase * epochs / recipe)) for phase in (o.freeze_epochs, *o.decays)]
    now = {"freeze_epochs": fewer[0], "warmup_epochs": round(o.warmup_epochs * epochs / recipe, 3)}
    if o.schedule == "step":
        now["decay_epochs"] = tuple(fewer[1:]) if isinstance(o.decay_epochs, tuple) else fewer[1]
    now = {name: value for name, value in now.items() if given(f"optimizer.{name}", argv, files=False) is None}
    told = ", ".join(f"{name} {getattr(o, name)} -> {now[name]}" for name in now if now[name] != getattr(o, name))
    config = replace(config, optimizer=replace(o, **now))
    return config, f"recipe  of {recipe} epochs, shortened to {epochs}: {told}" if told else ""


def check(config: Config, world_size: int = 1) -> None:
    """Refuse settings that cannot work, or have no effect, all at once, before anything is loaded or written."""
    raise_together([*_problems(config, world_size)])


def _problems(config: Config, world_size: int) -> Iterator[UserError]:
    name, method, model, optimizer = config.method, METHODS[config.method], config.model, config.optimizer
    cached, head, mix = config.data.cache_features is not None, config.model.head, config.mix
    texts_stay = model.lock_text and not method.composes  # so that their features can be kept
    if config.data.path is None:
        yield UserError(
            "--data.path is missing.",
            "Name images with captions: a CSV, a folder, Karpathy's json, shards, …; the synthetic data are made by "
            "`python -m tools.make_scenes data/scenes`.",
        )
    if method.heads and head not in method.heads:
        heads = " or ".join(method.heads)
        yield UserError(f"The method {name} works with head {heads} alone.", f"Set model.head to {heads}.")
    if mix.ratio and not mix.mixup and not mix.cutmix:
        yield UserError("mix.mixup and mix.cutmix are both 0, and mix.ratio is not.", "Set mix.ratio to 0.")
    unpaired = config.data.unpaired_batch if config.data.unpaired else 0
    for option, size in (("batch_size", config.batch_size), ("data.unpaired_batch", unpaired)):
        if size % world_size:
            yield UserError(
                f"{option} is {size}, which {world_size} processes cannot share evenly.",
                f"Set it to a multiple of {world_size}, such as {-(-size // world_size) * world_size}.",
            )
    locked = model.lock_image and optimizer.freeze_epochs == config.epochs  # of texts alone, for the whole run
    for option, epochs, what in (
        ("freeze_epochs", 0 if locked else optimizer.freeze_epochs, "the image tower would never be trained"),
        ("decay_epochs", optimizer.decaying, "every lr would be a tenth from the start"),
    ):
        if epochs >= config.epochs:
            yield UserError(
                f"optimizer.{option} is {epochs} of {config.epochs} epochs: {what}.",
                f"Set --optimizer.{option.replace('_', '-')} to less than {config.epochs}.",
            )
    if optimizer.warmup_epochs and config.epochs < optimizer.freeze_epochs + optimizer.warmup_epochs:
        yield UserError(
            f"The warm-up ends after {optimizer.freeze_epochs + optimizer.warmup_epochs:g} of {config.epochs} epochs.",
            "Lower --optimizer.warmup-epochs, or raise --epochs.",
        )
    if model.lock_text and not (model.pretrained or model.text_weights or model.word_vectors):
        yield UserError(
            "model.lock_text would freeze random weights.", "Add --model.text-weights or --model.pretrained."
        )
    if cached and not (model.lock_image or texts_stay):
        yield UserError(
            "data.cache_features keeps what a frozen tower computes, of composed queries the image tower.",
            "Add --model.lock-image true, or, for pairs, --model.lock-text true, or leave data.cache_features out.",
        )
    if cached and model.lock_text and method.wants_words:
        yield UserError(
            f"{name} reads the captions' words, of which the cache of a locked text tower keeps features.",
            "Leave model.lock_text or data.cache_features out.",
        )
    queries = " ".join(f"compose.{field.name}" for field in fields(Compose))
    for condition, because, names in (
        (method.composes, f"{name} trains on composed queries", OF_PAIRS),
        (not method.composes, f"{name} trains on pairs", queries),
        (not method.soft_labels, f"{name} needs pairs that match or do not", "mix.ratio mix.smoothing"),
        (not method.probabilistic, f"{name} predicts no variances", "ranking model.n_unc_layers compose.ranking"),
        (not method.takes_unpaired, f"{name} learns from pairs alone", "data.unpaired"),
        (method.whole_items, f"{name} is of whole images and captions", "size_augment"),
        (head in ("clip", "mlp", "max-mean"), f"head {head} reads pooled features", "size_augment"),
        (head != "max-mean", f"head {head} has none", "model.dropout"),
        (cached and model.lock_image, "data.cache_features has no pixels to change", PIXELS),
        (cached and texts_stay, "data.cache_features has no words to change", WORDS),
    ):
        if condition:
            yield from unused(config, because, names)


def unused(config: Config, because: str, names: str) -> Iterator[UserError]:
    """Errors for these options, dotted names between spaces, that are set although nothing reads them."""
    for name in names.split():
        value, off = (reduce(getattr, name.split("."), of) for of in (config, Config(size_augment=0.0)))
        if value and value not in (off, (1, 1)):  # the whole image, where a method's file has a scale
            value, off = (list(x) if isinstance(x, tuple) else x for x in (value, off))
            remedy = f"Set {name} to {off}." if off in (0, [0.9, 1.0]) else f"Leave {name} out."
            yield UserError(f"{name} is {value} and would have no effect: {because}.", remedy)
