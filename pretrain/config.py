"""Configuration of a pretraining run: one dataclass, read from YAML and dotted options."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pretrain.objectives import MASKED_EVERY, OBJECTIVES, draw_masks
from pretrain.schedules import check_schedule
from pretrain.stream.filter import Filter
from probemb.cli import ranges
from probemb.cli.configuration import chosen_options
from probemb.errors import UserError, count
from probemb.models.options import Augmentation, TrainedTowers

if TYPE_CHECKING:
    from probemb.models import DualEncoder


@dataclass(frozen=True)
class Model(TrainedTowers):
    """The towers (see probemb.models.create_model).

    Args:
        n_unc_layers: blocks of every tower that its uncertainty branch duplicates; [2, 1] for 2 of the image tower and
            1 of the text tower; empty for 2. Objectives that train points have no branch.
        unlocked_image_groups: last groups of a locked image tower that train; 1 for the last norm and the projection, 2
            for the last block too, and so on.
        unlocked_text_groups: the same of a locked text tower.
        patch_dropout: share of an image's patches that training leaves out.
    """

    n_unc_layers: NonNegativeInt | tuple[NonNegativeInt, NonNegativeInt] | None = None
    unlocked_image_groups: NonNegativeInt = 0
    unlocked_text_groups: NonNegativeInt = 0
    patch_dropout: ranges.BelowOne = 0.0


@dataclass(frozen=True)
class Data:
    """Training data and its order.

    Args:
        train: folders (or patterns) of webdataset shards with an index.json; several are mixed.
        weights: passes over each folder in an epoch; empty for once each.
        workers: processes that read and decode, for each rank.
        lanes: places of the corpus that a batch is drawn from; a divisor of the batch, at most 64 if empty.
        window: samples of a lane that are shuffled together.
        captions: which of an image's is used: random (drawn in every epoch), first, or a draw by shares of names
            (docs/data.md); {txt: 0.4, json.synthetic: 0.6}; an image without the drawn one has the first that it has.
        filter: rules that a sample must meet.
        failure_share: share of unreadable samples at which the run stops; of all ranks' samples.
        exif: apply EXIF orientation; also to images of `evaluate`; open_clip does not.
        resize: backend for resizing: tensor (torch, fast) or pil (as open_clip); in validation too.
        augmentation: random crops and colours, as open_clip's.
        verify_hash: check each shard's SHA-256 when it is opened; the run stops at a difference from the index.
        cache: local folder where remote shards stay; empty for a temporary one.
        cache_gib: its largest size; without `cache`, that of each rank's. One or two shards for each lane are here.
    """

    train: list[str] | str = field(default_factory=list)
    weights: list[ranges.Passes] | None = None
    workers: ranges.Workers = 2
    lanes: PositiveInt | None = None
    window: PositiveInt = 4096
    captions: Literal["random", "first"] | dict[str, NonNegativeFloat] = "random"
    filter: Filter = field(default_factory=Filter)
    failure_share: ClosedUnitInterval = 0.05
    exif: bool = False
    resize: ranges.Resize = "tensor"
    augmentation: Augmentation = field(default_factory=Augmentation)
    verify_hash: bool = False
    cache: str | None = None
    cache_gib: ranges.Gibibytes = 100.0


@dataclass(frozen=True)
class Optimizer:
    """AdamW, a linear warm-up and a schedule; all lengths in samples seen.

    Args:
        lr: peak learning rate.
        schedule: cosine, constant, constant-cooldown, inverse-sqrt, or wsd: constant, then falling as 1 - sqrt(x).
        betas: decay of AdamW's two moments.
        eps: AdamW's epsilon.
        weight_decay: on matrices only, not on norms, biases and scalars.
        warmup_samples: length of the linear warm-up.
        cooldown_samples: last samples, while the rate falls to end_lr; of constant-cooldown, wsd and inverse-sqrt.
        cooldown_power: shape of constant-cooldown's fall, (1 - x)^power; 1 is linear.
        end_lr: learning rate at the end of a schedule that falls.
        layer_decay: multiplier of lr, per block from the last one down; embeddings are one below the first block.
        clip_grad_norm: largest norm of the gradient; 0 switches clipping off.
    """

    lr: NonNegativeFloat = 5e-4
    betas: tuple[ranges.BelowOne, ranges.BelowOne] = (0.9, 0.98)
    eps: ClosedUnitInterval = 1e-6
    weight_decay: NonNegativeFloat = 0.2
    schedule: Literal["cosine", "constant", "constant-cooldown", "inverse-sqrt", "wsd"] = "cosine"
    warmup_samples: NonNegativeInt = 10_240_000
    cooldown_samples: NonNegativeInt = 0
    cooldown_power: PositiveFloat = 1.0
    end_lr: NonNegativeFloat = 0.0
    layer_decay: ranges.Share = 1.0
    clip_grad_norm: NonNegativeFloat = 1.0


@dataclass(frozen=True)
class Ema:
    """An exponential moving average of the weights: evaluated, and exported in place of the last weights.

    Args:
        half_life_samples: samples seen after which a step counts half; 0 keeps no average. timm's decay d of a step is
            batch_size * ln 2 / -ln d: 0.9999 at a batch of 1,024 is 7.1 million.
        rampup: largest half-life as a share of the samples seen; the first weights are forgotten. 0 has no such limit.
    """

    half_life_samples: NonNegativeInt = 0
    rampup: ClosedUnitInterval = 0.05


@dataclass(frozen=True)
class Engine:
    """Computation of a step; changes results by rounding only.

    Args:
        zero_stage: what the ranks share out: 0 nothing, 1 Adam's moments, 2 gradients, 3 weights; the lowest that fits
            (`pretrain.plan`) is the fastest. 1 to 3 are DeepSpeed's.
        precision: fp32, bf16 (autocast), or auto: bf16 if the GPU has it; weights, losses and moments stay float32.
        accumulation: parts of a rank's share of the batch; negatives are the whole batch.
        grad_checkpointing: recompute every block in the backward pass.
        compile: torch.compile the towers, or also the loss (step); texts are padded to four lengths.
        tf32: which float32 products of a bf16 model use TF32: heads, all (also the loss's), or null.
        gradient_dtype: of exchanged gradients: fp32, or bf16 for half of the traffic.
        deterministic: kernels that repeat the same bits on a GPU too; some are slower.
        threads: CPU threads of each rank; 0 shares the cores among the ranks of a machine.
        timeout: minutes that a phase of a step may take; such as the wait for data or for other ranks.
    """

    zero_stage: Literal[0, 1, 2, 3] = 0
    precision: ranges.Precision = "auto"
    accumulation: PositiveInt = 1
    grad_checkpointing: bool = False
    compile: Literal["towers", "step"] | None = None
    tf32: Literal["heads", "all"] | None = "heads"
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    deterministic: bool = False
    threads: ranges.Threads = 0
    timeout: ranges.Minutes = 30.0


@dataclass(frozen=True)
class Evaluate:
    """Evaluation while training: zero-shot classification, and loss and retrieval on held-out pairs.

    Args:
        pairs: images with captions; shards, json, a table or a folder; empty switches it off. One set, or several
            as PATH or NAME=PATH, whose values are logged as NAME/rsum, …; without a name, that of the folder or file.
        pairs_split: their split, or one for each set; null for all of the data.
        classes: labelled images, in a form of docs/data.md; empty switches it off. One set or several, as `pairs`;
            shards have KEY.cls and classes.txt.
        every_samples: samples between two evaluations; 0 evaluates at the end only.
        best: metric that selects model-best/, as it is logged (rsum, flickr/rsum, zeroshot_top1, validation_loss, …);
            the checkpoint with its best value is kept beside the newest.
        templates: single ("a photo of a {}.") or all (CLIP's 80).
        max_images: images of each set; spread evenly over its data, 0 for all.
        batch_size: images or texts encoded at a time.
        max_bad: largest share of images that may be unreadable.
    """

    pairs: list[str] | str | None = None
    pairs_split: list[str | None] | str | None = "val"
    classes: list[str] | str | None = None
    every_samples: NonNegativeInt = 0
    best: str | None = None
    templates: Literal["single", "all"] = "single"
    max_images: NonNegativeInt = 0
    batch_size: ranges.Count = 256
    max_bad: ClosedUnitInterval = 0.05


NEEDS = (  # an option, and those of which it needs one
    ("model.lock_image", "model.pretrained", "model.image_weights"),  # else it would freeze random weights
    ("model.lock_text", "model.pretrained", "model.word_vectors", "model.text_weights"),
    ("model.unlocked_image_groups", "model.lock_image"),
    ("model.unlocked_text_groups", "model.lock_text"),
    ("evaluate.best", "evaluate.pairs", "evaluate.classes"),
    ("evaluate.best", "evaluate.every_samples"),
)


@dataclass(frozen=True)
class Config:
    """A pretraining run.

    Args:
        out: the run folder.
        resume: continue from the newest checkpoint in `out`, if any.
        allow_changes: resume although the recipe or the data has changed.
        batch_size: global batch, over all ranks and accumulation parts.
        epochs: passes over the data; may be a fraction.
        samples: samples to see instead of `epochs`; 0 uses epochs.
        stop_at_step: stop early at this step, with a checkpoint; the schedule stays the whole run's. 0 never does.
        seed: of everything random: weights, order, captions, augmentation.
        log_every: steps between two log lines.
        save_every: steps between two checkpoints; 0 saves at the end only.
        keep_checkpoints: newest checkpoints to keep.
        keep_every: also keep the checkpoints at multiples of this step; 0 for none.
        on_nonfinite: at NaN or Inf in a loss or gradient: stop, or skip the step; on all ranks.
        log_samples: log the keys of every step's samples, to samples/rank-R.jsonl.
        profile: first and last step to trace with torch's profiler, in profile/; of rank 0, 20 steps at most.
        wandb: a Weights & Biases project; empty for none.
        remote_copy: folder or address, as s3://BUCKET/FOLDER, to copy checkpoints to; in the background, by fsspec;
            with `resume`, a run folder without a checkpoint continues from there.
        objective: pcmepp (the CLIP loss plus the PCME++ loss), clip, siglip or prolip; clip and siglip train points.
        loss: options of the objective.
    """

    COMMON: ClassVar = (
        *("out", "resume", "objective", "data.train", "batch_size", "epochs", "samples", "seed"),
        *("model.name", "model.pretrained", "optimizer.lr", "optimizer.warmup_samples"),
        *("engine.zero_stage", "engine.precision", "engine.accumulation", "engine.grad_checkpointing"),
        *("data.workers", "evaluate.pairs", "evaluate.classes", "evaluate.every_samples", "save_every", "wandb"),
    )
    PATHS: ClassVar = (
        *("out", "data.train", "data.cache", "data.filter.columns", "data.filter.drop", "data.filter.keep"),
        *("evaluate.classes", "evaluate.pairs", "model.name", "model.pretrained", "model.vocabulary", "remote_copy"),
    )
    NAMED_PATHS: ClassVar = ("evaluate.classes", "evaluate.pairs")  # those of PATHS that may be NAME=PATH

    out: ranges.Folder = "runs/pretrain"
    resume: bool = False
    allow_changes: bool = False
    seed: ranges.Seed = 0
    batch_size: PositiveInt = 1024
    epochs: ranges.Passes = 32.0
    samples: NonNegativeInt = 0
    stop_at_step: NonNegativeInt = 0
    log_every: PositiveInt = 20
    save_every: NonNegativeInt = 1000
    keep_checkpoints: PositiveInt = 3
    keep_every: NonNegativeInt = 0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    log_samples: bool = False
    profile: tuple[PositiveInt, PositiveInt] | None = None
    wandb: str | None = None
    remote_copy: str | None = None
    objective: str = "pcmepp"
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    loss: Any = field(**chosen_options("objective", OBJECTIVES, "pcmepp"))
    optimizer: Optimizer = field(default_factory=Optimizer)
    ema: Ema = field(default_factory=Ema)
    engine: Engine = field(default_factory=Engine)
    evaluate: Evaluate = field(default_factory=Evaluate)

    @property
    def train_paths(self) -> list[str]:
        """data.train as a list."""
        return [self.data.train] if isinstance(self.data.train, str) else list(self.data.train)

    def create_model(self, **more) -> DualEncoder:
        """The objective's kind of model, on the CPU, the same on every rank; `more`: options of `create_model`."""
        from probemb.models.architectures import read_architecture, reads_regions
        from probemb.models.dual_encoder import freeze_backbones  # after parsing: models take seconds to import

        m, loss = self.model, self.loss
        if reads_regions(read_architecture(m.name)):
            what = f"{m.name} reads precomputed regions, and pretraining gives a model the pixels of images."
            raise UserError(what, "Name an architecture such as ViT-B-16, or train this one with finetune.run.")
        if not loss.probabilistic:
            m = replace(m, n_unc_layers=None, uncertainty="branch")
        elif m.uncertainty == "branch" and m.n_unc_layers is None:
            m = replace(m, n_unc_layers=2)  # as the published weights
        about = {"objective": self.objective, "probabilistic": loss.probabilistic, **loss.model_options}
        model = m.create(self.train_paths, loss, **about, **more)
        freeze_backbones(model, m.lock_image, m.lock_text, m.unlocked_image_groups, m.unlocked_text_groups)
        pixels = torch.zeros(1, 3, model.image_size, model.image_size)
        draw_masks(self, model, pixels, torch.zeros(1, model.context_length, dtype=torch.int64), samples=0)
        if model.batch_statistics and (self.engine.accumulation > 1 or self.ema.half_life_samples):
            what = f"The batch norms of {m.name} need the whole batch, and statistics of the evaluated weights."
            remedy = "Set engine.accumulation to 1 and ema.half_life_samples to 0, or model.batch_norm to frozen."
            raise UserError(what, remedy)
        return model

    def check(self, world_size: int) -> None:
        """Refuse what cannot run on so many ranks, before anything is read or written."""
        if self.data.weights and len(self.data.weights) != len(self.train_paths):
            what = f"There are {len(self.train_paths)} training paths and {len(self.data.weights)} weights."
            raise UserError(what, "Give data.weights one number for each path.")
        if isinstance(self.data.captions, dict) and not sum(self.data.captions.values()):
            raise UserError("data.captions gives no name a share.", "Write it as {txt: 0.4, json.synthetic: 0.6}.")
        check_schedule(self.optimizer)
        self.data.augmentation.check()
        for key, *needed in NEEDS:
            value, *others = (reduce(getattr, name.split("."), self) for name in (key, *needed))
            if value and not any(others):
                raise UserError(f"{key} needs {' or '.join(needed)}.", f"Set it, or leave {key} out.")
        if self.engine.compile and self.engine.zero_stage == 3:
            what = "engine.compile does not go with ZeRO 3, which takes weights away between two blocks."
            raise UserError(what, "Lower engine.zero_stage, or set engine.compile to null.")
        first, last = self.profile or (0, 0)
        if not 0 <= last - first < 20:  # the profiler holds every operation in memory
            remedy = "Name a first and a last step, 20 steps at most: --profile 10 12."
            raise UserError(f"profile is {first} {last}.", remedy)
        every = MASKED_EVERY if getattr(self.loss, "masked_inclusion", 0) else 1
        multiple = world_size * self.engine.accumulation * every
        if self.batch_size % multiple:
            copies = f", of each of which every {every}th item is masked" if every > 1 else ""
            parts = f"{count(world_size, 'rank')} x {count(self.engine.accumulation, 'accumulation part')}{copies}"
            lower = self.batch_size // multiple * multiple
            fits = f"{lower} or {lower + multiple}" if lower else multiple
            what = f"batch_size {self.batch_size} cannot be shared evenly by {parts}."
            raise UserError(what, f"Set batch_size to {fits}, or change the ranks or parts.")


def whole_steps(config: Config, steps_per_epoch: int) -> int:
    """Steps of the whole run. Raises UserError if there are none."""
    steps = config.samples // config.batch_size if config.samples else int(config.epochs * steps_per_epoch)
    if steps < 1:
        what = f"The run has fewer samples than one batch: an epoch has {steps_per_epoch} steps of {config.batch_size}."
        raise UserError(what, "Lower batch_size, or raise epochs or samples.")
    return steps
