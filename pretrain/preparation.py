"""The start of a pretraining run: faults are found before the ranks meet and before anything is written."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pretrain.config import Config, Data
from pretrain.schedules import check_schedule
from probemb.errors import UserError

if TYPE_CHECKING:
    import torch

    from pretrain.stream.stream import Stream
    from probemb.models import DualEncoder
    from probemb.runs.copy import Copy


class Prepared(NamedTuple):
    """A run that can start.

    Attributes:
        step, samples, skipped: those done before; steps: of the whole run.
        identity: of the data and of how it is read, for the checkpoints.
        earlier: the checkpoint to resume from; copy: the remote copy.
        evaluators: called with the engine.
    """

    device: torch.device
    precision: str
    model: DualEncoder
    stream: Stream
    evaluators: list[Callable]
    identity: dict
    step: int
    samples: int
    skipped: int
    steps: int
    earlier: Path | None
    copy: Copy | None


def prepare(config: Config, rank: int, world_size: int, say: Callable[[str], object]) -> Prepared | None:
    """Make the model and open the data, of a new run or from its newest checkpoint; None if it is finished, with its
    evaluations.

    Raises:
        UserError: what was asked for cannot run.
    """
    from pretrain.engine.randomness import make_deterministic
    from pretrain.evaluation_sets import left_out, logged_evaluations, make_evaluators
    from pretrain.folder import complete_finished
    from probemb.cli.device import gpu_capability, training_precision
    from probemb.models import Augmentation, create_tokenizer, create_transforms, fill_word_vectors
    from probemb.runs.checkpoints import read_state
    from probemb.runs.copy import Copy, check_copy, fetch_newest
    from probemb.runs.folder import newest_checkpoint, refuse_full_disk, refuse_something_else

    def tell(line: str) -> None:
        say(f"resume  {line}")

    copy = Copy(config.remote_copy) if config.remote_copy else None
    if copy and config.resume:
        refuse_something_else(config.out, Config, tell, config.engine.timeout)
        # Any rank may be the one that fetches, and says so.
        fetch_newest(copy, Path(config.out), lambda line: print(f"resume  {line}", flush=True))
    earlier = newest_checkpoint(config.out, config.resume, Config, tell, config.engine.timeout)
    if config.engine.deterministic:
        make_deterministic()
    device, precision = pick_device(config), training_precision(config.engine.precision, gpu_capability())
    seed_everything(config.seed)
    model = config.create_model(grad_checkpointing=config.engine.grad_checkpointing)
    if not model.probabilistic and (config.model.n_unc_layers or config.model.uncertainty != "branch"):
        say(f"model   {config.objective} trains points: model.n_unc_layers and model.uncertainty are not used")
    if config.model.word_vectors and not earlier:
        say(f"words   {fill_word_vectors(model, config.model.word_vectors)}")
    augmentation = Augmentation(**vars(config.data.augmentation))
    transforms, tokenizer = create_transforms(model, augmentation, config.data.resize), create_tokenizer(model)
    state = read_state(earlier) if earlier else {"step": 0, "samples": 0}
    if copy and rank == 0:
        check_copy(copy, config.out, state["step"] if earlier else None, tell)
    # Samples seen are the position; if the batch size has changed, a batch seen in part is repeated.
    step, samples = state["step"], state["samples"] // config.batch_size * config.batch_size
    stream = make_stream(config, transforms.train, tokenizer, rank, world_size, samples, device.type == "cuda")
    steps = step + max(0, whole_steps(config, stream) - samples // config.batch_size)
    check_schedule(config.optimizer, samples + (steps - step) * config.batch_size)
    identity = {**stream.identity, **words_identity(model), **pixels_identity(config.data)}
    if earlier and (changed := changes_since(config, state, identity, earlier)):
        then = f"the data resumes after {samples:,} samples seen, in its present order"
        say(f"resume  changed {'; '.join(changed)}; {then}")
    if step >= steps and not left_out(config.evaluate, logged_evaluations(Path(config.out), step)):
        say(f"{config.out} is finished: {step} of {steps} steps are done.")
        if rank == 0:
            complete_finished(config, step)
        return None
    refuse_full_disk(config.out, model, 1 + bool(config.evaluate.best), bool(config.ema.half_life_samples))
    evaluators = make_evaluators(config, transforms.evaluate, tokenizer, device, rank, world_size)
    skipped = state.get("skipped", 0)
    return Prepared(
        device, precision, model, stream, evaluators, identity, step, samples, skipped, steps, earlier, copy
    )


def changes_since(config: Config, state: dict, identity: dict, earlier: Path) -> list[str]:
    """Allowed changes since the checkpoint `earlier`. Raises UserError: another run, see `refuse_another_run`."""
    from pretrain.folder import DIGEST, FREE_TO_CHANGE
    from probemb.cli.configuration import to_dict
    from probemb.runs.folder import refuse_another_run

    state["config"].setdefault("objective", "pcmepp")  # the only one of runs that do not name it
    before = pixels_identity(Data(resize="pil"))  # as it was before there was a choice
    state["data"] = before | state["data"]
    state["data"]["augmentation"] = before["augmentation"] | state["data"]["augmentation"]
    for group in ("model", "optimizer", "ema"):  # options that the run's version did not have
        state["config"][group] = to_dict(Config())[group] | state["config"].get(group, {})
    return refuse_another_run(config, state, identity, earlier, FREE_TO_CHANGE, DIGEST)


def whole_steps(config: Config, stream) -> int:
    """Steps of the whole run. Raises UserError if there are none."""
    whole = config.samples // config.batch_size if config.samples else int(config.epochs * stream.order.steps)
    if whole < 1:
        raise UserError(
            f"The run would have no step: an epoch has {stream.order.steps}, each of {config.batch_size} samples.",
            "Lower batch_size, or raise epochs or samples.",
        )
    return whole


def words_identity(model) -> dict[str, str]:
    """A digest of the model's vocabulary, if it reads words: embeddings belong to a vocabulary."""
    words = model.config["architecture"]["text_cfg"].get("vocabulary")
    return {"vocabulary": hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]} if words else {}


def pixels_identity(data: Data) -> dict:
    """The resize backend and the augmentation."""
    from probemb.models.dual_encoder import plain

    return {"resize": data.resize, "augmentation": plain(vars(data.augmentation))}


def make_stream(config: Config, transform, tokenizer, rank: int, world_size: int, samples: int, pin_memory: bool):
    """This rank's batches from position `samples` on."""
    from pretrain.stream.corpora import Corpus
    from pretrain.stream.settings import Settings
    from pretrain.stream.stream import Stream
    from probemb.data.shards.index import read_index

    data = config.data
    weights = data.weights or [1.0] * len(config.train_paths)
    corpora = [Corpus(read_index(path), weight) for path, weight in zip(config.train_paths, weights)]
    settings = Settings(
        batch_size=config.batch_size,
        seed=config.seed,
        lanes=data.lanes,
        window=data.window,
        caption=data.captions,
        workers=data.workers,
        pin_memory=pin_memory,
        draft=True,
        failure_share=data.failure_share,
        exif=data.exif,
        verify_hash=data.verify_hash,
        cache=data.cache,
        cache_gib=data.cache_gib,
        filter=data.filter,
    )
    place = {"rank": rank, "world_size": world_size, "start_samples": samples}
    return Stream(corpora, settings, transform, tokenizer, **place)


def pick_device(config: Config):
    """This rank's device; also shares the machine's cores among its ranks."""
    import torch

    from probemb.cli.device import share_cores

    here = share_cores(config.engine.threads, config.data.workers)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if here > torch.cuda.device_count():
        raise UserError(
            f"The launcher starts {here} processes on a machine with {torch.cuda.device_count()} GPUs.",
            "Start at most one process per GPU (--nproc-per-node), or hide the GPUs with CUDA_VISIBLE_DEVICES= .",
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def seed_everything(seed: int) -> None:
    """The same weights on every rank; ranks differ in their data."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
