"""Validation and model selection at the end of every epoch."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from finetune.config import Config
from finetune.folder import RunFolder
from finetune.trainer import State
from probemb.cli.device import Device
from probemb.data.captions.find import CaptionDataset
from probemb.data.compositions.dataset import Compositions
from probemb.distributed import on_main
from probemb.evaluation.composed import KS as COMPOSED_KS
from probemb.evaluation.composed import embed_queries, measure_composed
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.rankings import KS, evaluate_retrieval
from probemb.models import DualEncoder, as_one
from probemb.runs.log import METRICS, count
from probemb.runs.preemption import SIGNALS


class Validator:
    """Retrieval on the validation split, ranked by `config.ranking`, or by default as the method compares.

    With `data.positives` class, the captions of an image's class are its matches.
    """

    metric = "rsum"

    def __init__(self, captions: CaptionDataset, tokenizer, transforms, config: Config, accelerator):
        self.captions, self.tokenizer, self.transform, self.config = captions, tokenizer, transforms.evaluate, config
        self.device = Device(str(accelerator.device), "bf16" if accelerator.mixed_precision == "bf16" else "fp32")

    def measure(self, model: DualEncoder) -> dict[str, float]:
        """RSUM and recalls, in percent, and the weights of the ranking "tolerance", which are chosen on the split."""
        with embedding(model, self.tokenizer, self.transform, self.device, self.config) as embedder:
            by_class = self.config.data.positives == "class"
            found = evaluate_retrieval(embedder, self.captions, self.config.ranking, by_class)
        ways = {f"{way}_r{k}": 100 * found[way][f"r@{k}"] for way in ("i2t", "t2i") for k in KS}
        chosen = {f"tolerance_{way}": weight for way, weight in found.get("tolerance", {}).items()}
        return {"rsum": found["rsum"]} | ways | chosen


class ComposedValidator:
    """Composed retrieval on the validation split: `compose.queries` queries of all mixtures.

    They are ranked by `compose.ranking`, or by default as the method's loss compares.
    """

    metric = "r_precision"

    def __init__(self, data: Compositions, tokenizer, transforms, config: Config, accelerator):
        self.data, self.tokenizer, self.transform, self.config = data, tokenizer, transforms.evaluate, config
        self.device = Device(str(accelerator.device), "bf16" if accelerator.mixed_precision == "bf16" else "fp32")
        self.queries = data.queries or data.sampled_queries(config.compose.queries, config.compose.seed)

    def measure(self, model: DualEncoder) -> dict[str, float]:
        """R-Precision and recalls in percent, of all queries."""
        with embedding(model, self.tokenizer, self.transform, self.device, self.config) as embedder:
            gallery = embedder.images(self.data.images)
            queries = embed_queries(embedder, self.data, self.queries)
            by = self.config.compose.ranking or model.composed_ranking
            found = measure_composed(gallery, self.data, queries, by)["all"]
        return {"r_precision": 100 * found["r_precision"], **{f"r{k}": 100 * found[f"r@{k}"] for k in COMPOSED_KS}}


@contextmanager
def embedding(model: DualEncoder, tokenizer, transform, device: Device, config: Config) -> Iterator[Embedder]:
    """An embedder of the model, which is in evaluation mode meanwhile."""
    embedder = Embedder(
        model, tokenizer, transform, device, config.engine.eval_batch_size, workers=config.data.workers,
        max_bad=config.data.failure_share,
    )  # fmt: skip
    training = model.training
    model.eval()
    # The scheduler's warning signal would kill the forked workers; they inherit this mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield embedder
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        model.train(training)


class Selection:
    """Saves the model of the best epoch and, at the end, the averaged one; without a validator, the newest model."""

    def __init__(
        self, config: Config, state: State, folder: RunFolder, validator: Validator | ComposedValidator | None
    ):
        self.config, self.state, self.folder, self.validator = config, state, folder, validator

    def end_epoch(self, epoch: int) -> None:
        """Validate and save on the first process while the others wait; collective."""
        self.folder.finish()  # validation forks workers: no thread may be writing
        remedy = "Make room, or make the folder writable, and continue with --resume."
        on_main(lambda: self._select(epoch), self.folder.path, remedy)

    def _select(self, epoch: int) -> None:
        position, networks, average = self.state.position, self.state.joint.networks, self.state.average
        best, step = True, position.samples // self.config.batch_size
        if self.validator:
            values = self.validator.measure(as_one(networks))
            value = values[self.validator.metric]
            best = position.best is None or value > position.best
            self.folder.report(step, {"samples": position.samples, **values, "is_best": best})
            if best:
                position.best, position.best_epoch = value, epoch
        if best:
            self.folder.save_models(networks, step)
        if average and epoch == self.config.epochs:
            self._finish_average(step)

    def _finish_average(self, step: int) -> None:
        """Validate and save the mean of the last epochs' weights."""
        average, folder = self.state.average, self.folder
        if self.validator:
            values = self.validator.measure(as_one(average.networks))
            mean = f"mean of {count(average.n_averaged, 'epoch')}"
            metric = self.validator.metric
            print(f"model-swa: {mean}, validation {METRICS[metric]} {values[metric]:.1f}", flush=True)
            folder.log.write(folder.steps, {f"swa_{name}": value for name, value in values.items()})
        folder.save_models(average.networks, step, "model-swa")

    def summary(self) -> str:
        """The line on the saved model that ends a run."""
        position, second = self.state.position, self.state.joint.second
        of = f"epoch {position.epoch}"
        if position.best is not None:
            of = f"epoch {position.best_epoch}, validation {METRICS[self.validator.metric]} {position.best:.1f}"
        return f"model   {self.folder.path / 'model'} is of {of}" + (", and so is model-second" if second else "")
