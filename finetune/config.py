"""What a finetuning run is: one frozen dataclass, read from the method's YAML, `--config` files and dotted options."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from probemb.errors import UserError, nearest

CONFIGS = Path(__file__).parent / "configs"
PRECISIONS = ("auto", "fp32", "bf16")
DISTANCES = (
    "csd", "kl", "min-kl", "symmetric-kl", "wasserstein2", "elk", "bhattacharyya", "match-probability",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """Which towers (see probemb.models.create_model).

    Args:
        name: an open_clip ViT configuration, or ViT-Micro-32, ViT-Tiny-64, ViT-Small-112 of our own.
        pretrained: an open_clip tag, a file of open_clip weights, or a run of `pretrain`; empty for random weights.
        head: gpo (pooling over all tokens, then a projection of its own) or clip (class and end-of-text token).
        embed_dim: D; empty for 1024 (head gpo) or the configuration's own (head clip).
        n_unc_layers: blocks of every tower's uncertainty branch; empty for 1, and 0 where a method has none.
    """

    name: str = "ViT-B-32-quickgelu"
    pretrained: str | None = "openai"
    head: str = "gpo"
    embed_dim: int | None = None
    n_unc_layers: int | None = None


@dataclass(frozen=True)
class Data:
    """Images and their captions, in any form that probemb.data.captions.find reads.

    Args:
        path: Karpathy's json, a folder of precomp caption files, or webdataset shards.
        images: folder of the images that the json or the caption files name.
        format: karpathy, precomp or webdataset; empty to look.
        train: split to train on; COCO's restval belongs to train.
        validation: split that selects the model; empty for none.
        workers: processes that read and decode, for each rank.
        failure_share: share of unreadable images at which the run stops.
    """

    path: str | None = None
    images: str | None = None
    format: str | None = None
    train: str = "train"
    validation: str | None = "val"
    workers: int = 2
    failure_share: float = 0.05


@dataclass(frozen=True)
class Loss:
    """Options of the losses; every method takes some of them, and refuses the others.

    Args:
        scale: initial a of the match probability sigmoid(-a d + b) (pcmepp, pcmepp-mu, pcme).
        shift: initial b of it.
        pseudo_positive: weight alpha of the pseudo-positives (pcmepp, pcmepp-mu).
        vib: weight beta of the information bottleneck (pcmepp, pcme).
        clip: weight of the CLIP loss beside the match loss, as in pretraining (pcmepp, pcmepp-mu).
        samples: drawn of each item (pcme).
        temperature: initial multiplier of the cosines (infonce).
        margin: of the hinges, in units of the cosine (vse, daa, p2rm, ncr, decl).
        warmup_epochs: epochs with all negatives (vse, daa, p2rm), or with all pairs held for clean (ncr, decl).
        weight: of the regulariser (daa, p2rm).
        soft_margin: linear, exponential or sin (ncr).
        tau: temperature of the evidence (decl).
    """

    scale: float | None = None
    shift: float | None = None
    pseudo_positive: float | None = None
    vib: float | None = None
    clip: float | None = None
    samples: int | None = None
    temperature: float | None = None
    margin: float | None = None
    warmup_epochs: int | None = None
    weight: float | None = None
    soft_margin: str | None = None
    tau: float | None = None


@dataclass(frozen=True)
class Mix:
    """Mixed-sample augmentation of images; labels become soft.

    Args:
        ratio: share of the images of a batch that are mixed with another one; 0 for none.
        mixup: parameter of Mixup's Beta distribution; 0 for CutMix alone.
        cutmix: parameter of CutMix's; 0 for Mixup alone.
        switch: probability of CutMix rather than Mixup.
        smoothing: label smoothing; a match of 1 becomes 1 - smoothing, of 0 smoothing.
    """

    ratio: float = 0.0
    mixup: float = 2.0
    cutmix: float = 2.0
    switch: float = 0.5
    smoothing: float = 0.0


@dataclass(frozen=True)
class Optimizer:
    """AdamP with step decay (PCME++ §B.2).

    Args:
        lr: of the heads; the towers' is a multiple of it.
        weight_decay: on all but scalars.
        image_backbone: multiplier of the image tower's lr.
        text_backbone: multiplier of the text tower's lr.
        layer_decay: further multiplier, per block from the last one down.
        freeze_epochs: epochs in which the image tower stands still.
        warmup_epochs: epochs of linear warm-up after that.
        decay_epochs: last epochs, in which every lr is a tenth.
        clip_grad_norm: largest norm of the gradient; 0 switches clipping off.
    """

    lr: float = 5e-4
    weight_decay: float = 1e-4
    image_backbone: float = 0.01
    text_backbone: float = 0.1
    layer_decay: float = 0.7
    freeze_epochs: int = 2
    warmup_epochs: float = 1.0
    decay_epochs: int = 10
    clip_grad_norm: float = 2.0


@dataclass(frozen=True)
class Engine:
    """How the step is computed.

    Args:
        precision: fp32, bf16, or auto: bf16 on a GPU.
        grad_checkpointing: trade time for memory in all blocks.
        threads: CPU threads of each process; 0 shares the machine's cores.
        eval_batch_size: images in a batch while validating.
        timeout: minutes that a process waits for the others, which the first one keeps waiting while it validates.
    """

    precision: str = "auto"
    grad_checkpointing: bool = False
    threads: int = 0
    eval_batch_size: int = 64
    timeout: float = 120.0


@dataclass(frozen=True)
class Config:
    """A finetuning run.

    Args:
        method: pcmepp, pcmepp-mu, infonce, vse, pcme, daa, p2rm, ncr, decl, or clip-zs, which trains nothing.
        out: the run folder.
        resume: go on from the newest checkpoint in out.
        seed: decides everything that is random.
        batch_size: pairs in a batch, over all ranks.
        epochs: passes over all pairs.
        distance: pcmepp's: csd, kl, min-kl, symmetric-kl, wasserstein2, elk, bhattacharyya, match-probability.
        noise_ratio: share of the training captions that are moved to wrong images.
        size_augment: share of tokens that SizeAugment drops; 0 for none.
        swa_epochs: last epochs whose weights are averaged into model-swa/; 0 for none.
        stop_after_epochs: end after so many epochs, to go on later with resume; empty to the end.
        save_every: steps between two checkpoints within an epoch; 0 for those at the ends of epochs alone.
        log_every: steps between two log lines.
        wandb: a Weights & Biases project.
    """

    method: str = "pcmepp"
    out: str = "runs/finetune"
    resume: bool = False
    seed: int = 0
    batch_size: int = 128
    epochs: int = 25
    distance: str | None = None
    noise_ratio: float = 0.0
    size_augment: float = 0.2
    swa_epochs: int = 10
    stop_after_epochs: int | None = None
    save_every: int = 1000
    log_every: int = 50
    wandb: str | None = None
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    loss: Loss = field(default_factory=Loss)
    mix: Mix = field(default_factory=Mix)
    optimizer: Optimizer = field(default_factory=Optimizer)
    engine: Engine = field(default_factory=Engine)


def with_method_file(argv: list[str]) -> list[str]:
    """The command line in the order in which later words win: the method's own YAML, `--config` files, options.

    `--method` decides, else the `method` of the last `--config` that has one, else pcmepp.

    Raises:
        UserError: there is no such method.
    """
    files, options, words = [], [], list(argv)
    while words:
        word = words.pop(0)
        if word == "--config" and words:
            word = f"--config={words.pop(0)}"
        (files if word.startswith("--config=") else options).append(word)
    method = None
    for i, word in enumerate(options):
        if word == "--method" or word.startswith("--method="):
            method = word.partition("=")[2] or (options[i + 1] if word == "--method" and i + 1 < len(options) else "")
    if method is None:
        in_files = [found for word in files if (found := _method_in(Path(word.partition("=")[2])))]
        method = in_files[-1] if in_files else "pcmepp"
    known = method_names()
    if method not in known:
        raise UserError(f"There is no method '{method}'.{nearest(method, known)}", f"Choose from {', '.join(known)}.")
    return [f"--config={CONFIGS / f'{method}.yaml'}", *files, *options]


def _method_in(path: Path) -> str | None:
    """What a YAML sets as the method; None also for a file that is refused when it is parsed."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return str(content["method"]) if isinstance(content, dict) and content.get("method") is not None else None


def method_names() -> list[str]:
    """All methods, those that have a YAML."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def check(config: Config, world_size: int = 1) -> None:
    """Refuse settings that cannot work, before anything is loaded or written.

    Raises:
        UserError: says which and what instead.
    """
    if config.data.path is None:
        raise UserError(
            "--data.path is missing.",
            "Name Karpathy's json, a folder of precomp captions, or webdataset shards; the embedded data are made by "
            "`python -m tools.make_scenes data/scenes`.",
        )
    if not config.out.strip() or "\0" in config.out:
        raise UserError("--out is empty.", "Name the folder that the run is to be written to.")
    limits = [
        ("seed", config.seed, 0, 2**63 - 1),
        ("batch_size", config.batch_size, 2, 2**31),
        ("epochs", config.epochs, 0, 2**31),
        ("swa_epochs", config.swa_epochs, 0, float("inf")),
        ("stop_after_epochs", config.stop_after_epochs, 1, float("inf")),
        ("save_every", config.save_every, 0, float("inf")),
        ("log_every", config.log_every, 1, float("inf")),
        ("model.embed_dim", config.model.embed_dim, 1, 2**20),
        ("data.workers", config.data.workers, 0, 1000),
        ("engine.threads", config.engine.threads, 0, 10_000),
        ("engine.eval_batch_size", config.engine.eval_batch_size, 1, 2**31),
        ("mix.mixup", config.mix.mixup, 0, 1e6),
        ("mix.cutmix", config.mix.cutmix, 0, 1e6),
    ]
    for key, value, low, high in limits:
        if value is not None and not low <= value <= high:
            what = f"from {low} to {high:,}" if high < 2**31 else f"from {low} on"
            raise UserError(f"{key} is {value}.", f"Set it to a number {what}.")
    if not 0 < config.engine.timeout <= 60 * 24 * 365:
        raise UserError(f"engine.timeout is {config.engine.timeout}.", "Set it to a number of minutes above 0.")
    if config.mix.ratio and not config.mix.mixup and not config.mix.cutmix:
        raise UserError(
            "mix.mixup and mix.cutmix are both 0, and mix.ratio is not.", "Set one of them above 0, or mix.ratio to 0."
        )
    if config.batch_size % world_size:
        raise UserError(
            f"batch_size is {config.batch_size}, which {world_size} processes cannot share evenly.",
            f"Set it to a multiple of {world_size}, such as {-(-config.batch_size // world_size) * world_size}.",
        )
    shares = {
        "noise_ratio": config.noise_ratio,
        "size_augment": config.size_augment,
        "mix.ratio": config.mix.ratio,
        "mix.switch": config.mix.switch,
        "data.failure_share": config.data.failure_share,
    }
    for key, value in shares.items():
        if not 0 <= value <= 1:
            raise UserError(f"{key} is {value}.", "Set it to a share from 0 to 1.")
    if not 0 <= config.mix.smoothing < 0.5:
        raise UserError(f"mix.smoothing is {config.mix.smoothing}.", "Set it to a number from 0 to below 0.5.")
    optimizer = config.optimizer
    for name in ("lr", "image_backbone", "text_backbone", "layer_decay"):
        if not 0 < getattr(optimizer, name) < float("inf"):
            raise UserError(f"optimizer.{name} is {getattr(optimizer, name)}.", "Set it to a number above 0.")
    for name in ("weight_decay", "freeze_epochs", "warmup_epochs", "decay_epochs", "clip_grad_norm"):
        if not 0 <= getattr(optimizer, name) < float("inf"):
            raise UserError(f"optimizer.{name} is {getattr(optimizer, name)}.", "Set it to 0 or more.")
    for name, what in (
        ("freeze_epochs", "the image tower would never be trained"),
        ("decay_epochs", "every lr would be a tenth from the start"),
    ):
        if config.epochs and getattr(optimizer, name) >= config.epochs:
            raise UserError(
                f"optimizer.{name} is {getattr(optimizer, name)} of {config.epochs} epochs: {what}.",
                f"Set --optimizer.{name.replace('_', '-')} to less than {config.epochs}.",
            )
    if config.wandb and not _is_installed("wandb"):
        raise UserError("wandb was asked for and is not installed.", "Run `pip install wandb`, or leave --wandb out.")
    if config.engine.precision not in PRECISIONS:
        raise UserError(
            f"engine.precision is '{config.engine.precision}'.{nearest(config.engine.precision, PRECISIONS)}",
            f"Choose from {', '.join(PRECISIONS)}.",
        )
    if config.distance is not None and config.distance not in DISTANCES:
        raise UserError(
            f"There is no distance '{config.distance}'.{nearest(config.distance, DISTANCES)}",
            f"Choose from {', '.join(DISTANCES)}.",
        )


def given(loss: Loss) -> list[str]:
    """Names of the loss options that have a value."""
    return [one.name for one in fields(loss) if getattr(loss, one.name) is not None]


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(package) is not None
    except ValueError:  # it is, or is kept from being imported
        return False
