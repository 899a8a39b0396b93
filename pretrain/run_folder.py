"""Everything that a pretraining run writes, all of it into its folder:

config.yaml, metrics.jsonl, tensorboard/, checkpoints/step-N/    see `probemb.runs.folder`
model/                      the newest checkpoint's weights alone, for `load_model`
model-best/, best.json      those of the best evaluation, with evaluate.best
samples/rank-R.jsonl        keys of the samples of every step, with log_samples
nonfinite.jsonl             every rank's report of a step with NaN or Inf
profile/                    a trace of some steps, with profile
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import profile, record_function

from pretrain.config import Config
from pretrain.engine.checkpoint import Average, read_exported, take_snapshot
from probemb import distributed
from probemb.files import replace_file
from probemb.models.dual_encoder import DualEncoder
from probemb.models.hub import save_model
from probemb.options import resolved
from probemb.runs.checkpoints import Best, Snapshot, best_until, prune
from probemb.runs.copy import Copier, Copy
from probemb.runs.folder import RunOutput
from probemb.runs.lock import RunLock
from probemb.runs.log import append_line, drop_lines_after, logged_lines, or_tell

if TYPE_CHECKING:
    from pretrain.trainer import Position

MODEL, BEST_MODEL = "model", "model-best"


class RunFolder(RunOutput):
    """Files of a pretraining run that resumes from `step`, whose values in the log are `logged`; `identity` is all that
    the order of the samples depends on, to compare when resuming."""

    def __init__(
        self, config: Config, model_config: dict, identity: dict, step: int, steps: int, lock: RunLock | None = None
    ):
        self.model_config, self.identity, self.saved = model_config, identity, step or None
        self.copier, self.profiler, metric = None, None, config.evaluate.best
        super().__init__(config, step, steps, lock)
        rows = [values for _, values in logged_lines(self.path / "metrics.jsonl") if values["step"] == step]
        logged = {name: value for values in rows for name, value in values.items()}
        best, self.logged = distributed.all_of((best_until(self.path, step), logged))[0]
        self.protected = frozenset([best.step] if best else [])
        self.best = best if best and best.metric == metric else Best(metric) if metric else None
        distributed.on_main(lambda: self._restore(step, best), self.path / MODEL, "Make room for it, and start again.")
        if self.best and metric in self.logged:
            self.best.add(step, self.logged[metric])

    def _restore(self, step: int, best: Best | None) -> None:
        """On rank 0: make what a kill or a fetched copy has left out of model/ and model-best/, and copy again."""
        # Not built in the thread, as building draws random numbers.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            self.model = DualEncoder(self.model_config)
        for name, of in ((MODEL, step), (BEST_MODEL, best and best.step)):
            if of:
                export(self.model, read_exported(self.path / "checkpoints" / f"step-{of}"), self.path / name)
        samples = self.path / "samples"
        if self.config.log_samples:
            samples.mkdir(exist_ok=True)
        for path in samples.glob("*"):
            path.unlink() if path.name.startswith(".") else drop_lines_after(path, step)  # hidden: of a killed attempt
        if self.config.remote_copy:
            kept = self.config.keep_checkpoints, self.config.keep_every
            self.copier = Copier(self.path, Copy(self.config.remote_copy), *kept, lambda: self.protected)
            if step:
                self.copier.wake()

    def prune(self) -> None:
        """Also leaves what is being copied elsewhere."""
        in_use = self.copier.in_use if self.copier else frozenset()
        prune(self.path, self.config.keep_checkpoints, self.config.keep_every, self.protected | in_use)

    def report(self, step: int, values: dict[str, float]) -> None:
        """Log a step and print its progress line; notes whether it is the best."""
        if self.best and self.best.metric in values and self.best.add(step, values[self.best.metric]):
            values = {**values, "is_best": True}
        super().report(step, values)

    def seen(self, step: int, keys: list[str]) -> None:
        """Log the samples that this rank has trained on in a step, if asked for."""
        if self.config.log_samples:
            append_line(self.path / "samples" / f"rank-{distributed.rank()}.jsonl", {"step": step, "keys": keys})

    def nonfinite(self, step: int, reports: list[dict]) -> Path:
        """Write every rank's report of a step with NaN or Inf; returns the file's name."""
        if self.is_main:
            append_line(self.path / "nonfinite.jsonl", {"step": step, "ranks": reports})
        return self.path / "nonfinite.jsonl"

    def save(self, engine, position: Position, average: Average | None, then: Callable = lambda: None) -> None:
        """Start to write a checkpoint, unless this step has one, and the weights alone in model/, and to call `then` in
        the same thread; collective."""
        if position.step == self.saved:
            return self.start(then) if self.is_main else None
        self.saved = position.step
        state = {"samples": position.samples, "skipped": position.skipped, "config": resolved(self.config)}
        state |= {"data": self.identity, "model": self.model_config}
        return self.write(lambda: take_snapshot(engine, position.step, state, average), then)

    def write_more(self, snapshot: Snapshot) -> str:
        """The weights alone, in model/."""
        export(self.model, snapshot.whole, self.path / MODEL)
        if self.copier:
            self.copier.wake()
        return f" and {self.path / MODEL}"

    def keep_best(self, engine, position: Position, average: Average | None) -> None:
        """Save the step that was evaluated, if it is the best so far, and mark it as such; collective."""
        if self.best and self.best.step == position.step and position.step not in self.protected:
            self.protected |= {position.step}  # beside the one before, as long as that is marked
            best = replace(self.best)
            self.save(engine, position, average, then=lambda: self._mark(best))

    def _mark(self, best: Best) -> None:
        """In the thread: model/ holds that step's weights."""
        best.write(self.path)
        for file in sorted((self.path / MODEL).iterdir()):
            replace_file(self.path / BEST_MODEL / file.name, partial(shutil.copyfile, file))
        self.protected = frozenset([best.step])
        self.prune()
        if self.copier:
            self.copier.wake()

    def best_words(self) -> str:
        """A line on the best checkpoint, if there is one."""
        if not self.best or self.best.step is None:
            return ""
        where = f"{self.path}/checkpoints/step-{self.best.step} and {self.path / BEST_MODEL}"
        return f"best    step {self.best.step}, {self.best.metric} {self.best.value:.4g}: {where}"

    @contextmanager
    def traced(self, step: int) -> Iterator[None]:
        """Inside, a step is computed; those of `config.profile` are traced on rank 0 by torch's profiler."""
        first, last = self.config.profile or (0, 0)
        if self.is_main and first <= step <= last and not self.profiler:
            if not torch.cuda.is_available():
                os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or its own lines say that it found no driver
            self.profiler = profile()
            self.profiler.start()
        with record_function(f"step {step}"):
            yield
        if self.profiler and step == last:
            self.profiler.stop()
            path = self.path / "profile" / f"steps-{first}-{last}.json.gz"

            def write() -> None:
                path.parent.mkdir(exist_ok=True)
                self.profiler.export_chrome_trace(str(path))
                print(f"profile {path}: open it in ui.perfetto.dev or chrome://tracing", flush=True)

            or_tell(path, write)


def export(model: DualEncoder, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write weights (of the engine's module) to a folder of the run, as `model`."""
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()}, assign=True)
    save_model(model, folder)
