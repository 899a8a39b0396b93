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
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerAction

from pretrain.config import RETRIEVAL, ZERO_SHOT, Config, Evaluate
from pretrain.engine.checkpoint import read_exported, take_snapshot
from pretrain.engine.state import Average
from probemb import distributed
from probemb.files import replace_file, replace_text
from probemb.models.dual_encoder import DualEncoder
from probemb.models.hub import save_model
from probemb.options import to_dict, with_absolute_paths
from probemb.runs.checkpoints import Best, Snapshot, best_until, prune
from probemb.runs.copy import Copier, Copy
from probemb.runs.folder import RunOutput
from probemb.runs.lock import RunLock
from probemb.runs.log import append_line, drop_lines_after, logged_lines, rsum_words, step_of, train_line

if TYPE_CHECKING:
    from pretrain.trainer import Position

MODEL, BEST_MODEL = "model", "model-best"
STEP = ".step"  # of model/ and model-best/: whose weights they are, written when the folder is complete


class RunFolder(RunOutput):
    """Files of a pretraining run.

    Args:
        model_config: of the model; identity: all that the order of the samples depends on, to compare when resuming.
        step: the step that the run resumes from, of `steps`.
        lock: of the folder, on rank 0.

    Attributes:
        left_out: numbers of the evaluations of `step` whose values are not in the log.
    """

    def __init__(
        self, config: Config, model_config: dict, identity: dict, step: int, steps: int, lock: RunLock | None = None
    ):
        self.model_config, self.identity, self.saved = model_config, identity, step or None
        super().__init__(config, step, steps, lock)
        metric, self.copier = config.evaluate.best, None
        best, rows = distributed.all_of((best_until(self.path, step), logged_evaluations(self.path, step)))[0]
        self.left_out = left_out(config.evaluate, rows)
        self.protected = frozenset([best.step] if best else [])
        self.best = best if best and best.metric == metric else Best(metric) if metric else None
        distributed.on_main(lambda: self._restore(step, best), self.path / MODEL, "Make room for it, and start again.")
        logged = [row[metric] for row in rows if metric in row]
        if self.best and logged and step not in self.best.values:
            self.best.add(step, logged[0])
        self.samples = open_sample_log(self.path, step) if config.log_samples else None

    def _restore(self, step: int, best: Best | None) -> None:
        """On rank 0: make what a kill or a fetched copy has left out of model/ and model-best/, and copy again."""
        # Not built in the thread, as building draws random numbers.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            self.model = DualEncoder(self.model_config)
        if step:
            restore_model(self.model, self.path, step, MODEL)
        if best:
            restore_model(self.model, self.path, best.step, BEST_MODEL)
        if best and self.best and best.metric != self.best.metric:
            print(f"resume  best.json is by {best.metric}; the best by {self.best.metric} is chosen from here on")
        if self.config.remote_copy:
            kept = self.config.keep_checkpoints, self.config.keep_every
            self.copier = Copier(self.path, Copy(self.config.remote_copy), step, *kept, lambda: self.protected)
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

    def line(self, step: int, values: dict[str, float]) -> str:
        """The printed line of `values`, which are as in metrics.jsonl; of evaluations with the name of their set."""
        name, own = split_set(values)
        head = f"{step_of(step, self.steps)} | {f'{name}: ' if name else ''}"
        if "rsum" in own:
            text = f"{head}validation loss {own['validation_loss']:.3f}, {rsum_words(own | {'is_best': False})}"
        elif "zeroshot_top1" in own:
            top1, top5 = 100 * own["zeroshot_top1"], 100 * own["zeroshot_top5"]
            text = f"{head}zero-shot top-1 {top1:.2f} %, top-5 {top5:.2f} %"
        else:
            text = train_line(step, self.steps, values)
        return text + (f" | best {self.best.metric} so far" if values.get("is_best") else "")

    def seen(self, step: int, keys: list[str]) -> None:
        """Log the samples that this rank has trained on in a step, if asked for."""
        if self.samples:
            append_line(self.samples, {"step": step, "keys": keys})

    def nonfinite(self, step: int, reports: list[dict]) -> Path:
        """Write every rank's report of a step with NaN or Inf; returns the file's name."""
        path = self.path / "nonfinite.jsonl"
        if self.is_main:
            # As text: JSON has no NaN.
            rows = [{**r, "terms": {name: str(value) for name, value in r["terms"].items()}} for r in reports]
            append_line(path, {"step": step, "ranks": rows})
        return path

    def save(
        self, engine, position: Position, average: Average | None, then: Callable[[], None] = lambda: None
    ) -> None:
        """Start to write a checkpoint, unless this step has one, and the weights alone in model/; collective.

        `then` is called in the writing thread afterwards. Raises UserError on all ranks: the one before could not be
        written.
        """
        if position.step == self.saved:
            return self.start(then) if self.is_main else None
        self.saved = position.step
        state = {
            "samples": position.samples,
            "skipped": position.skipped,
            "config": with_absolute_paths(to_dict(self.config), self.config),
            "data": self.identity,
            "model": self.model_config,
        }
        self.write(lambda: take_snapshot(engine, position.step, state, average), then)
        return None

    def write_more(self, snapshot: Snapshot) -> str:
        """The weights alone, in model/."""
        export(self.model, snapshot.whole, self.path / MODEL, snapshot.content["step"])
        if self.copier:
            self.copier.wake()
        return f" and {self.path / MODEL}"

    def keep_best(self, engine, position: Position, average: Average | None) -> None:
        """Save the step that was evaluated, if it is the best so far, and mark it as such; collective.

        Raises UserError: as `save`.
        """
        if self.best and self.best.step == position.step and position.step not in self.protected:
            self.protected |= {position.step}  # beside the one before, as long as that is marked
            best = replace(self.best, values=dict(self.best.values))
            self.save(engine, position, average, then=lambda: self._mark(best))

    def _mark(self, best: Best) -> None:
        """In the thread: model/ holds that step's weights."""
        best.write(self.path)
        (self.path / BEST_MODEL / STEP).unlink(missing_ok=True)
        for file in sorted((self.path / MODEL).iterdir()):
            if not file.name.startswith("."):
                replace_file(self.path / BEST_MODEL / file.name, partial(shutil.copyfile, file))
        replace_text(self.path / BEST_MODEL / STEP, f"{best.step}\n")
        self.protected = frozenset([best.step])
        self.prune()
        if self.copier:
            self.copier.wake()

    def best_words(self) -> str:
        """A line on the best checkpoint, if there is one."""
        if not self.best or self.best.step is None:
            return ""
        where, value = self.path / "checkpoints" / f"step-{self.best.step}", self.best.values[self.best.step]
        return f"best    step {self.best.step}, {self.best.metric} {value:.4g}: {where} and {self.path / BEST_MODEL}"

    def finish_copy(self, seconds: float) -> None:
        """Wait up to `seconds` until the remote copy is up to date or has failed; not collective, never raises."""
        if self.copier:
            self.copier.close(seconds)


def export(model: DualEncoder, weights: dict[str, torch.Tensor], folder: Path, step: int) -> None:
    """Write a step's weights (of the engine's module) to a folder of the run, as `model`."""
    prefix = "model."
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    model.load_state_dict(own, assign=True)
    (folder / STEP).unlink(missing_ok=True)
    save_model(model, folder)
    replace_text(folder / STEP, f"{step}\n")


def restore_model(model: DualEncoder, run: Path, step: int, name: str) -> None:
    """Export a step's weights again, unless the folder has them: copies elsewhere hold checkpoints alone, and a run
    that was killed may have written a checkpoint and not yet its weights.
    """
    with suppress(OSError, ValueError):
        if (run / name / STEP).read_text(encoding="utf-8").strip() == str(step):
            return
    export(model, read_exported(run / "checkpoints" / f"step-{step}"), run / name, step)


def split_set(values: dict[str, float]) -> tuple[str, dict[str, float]]:
    """The name of the evaluated set, empty for none, and its values without it."""
    name = next((key.partition("/")[0] for key in values if "/" in key), "")
    return name, {key.removeprefix(f"{name}/"): value for key, value in values.items()}


def logged_evaluations(run: Path, step: int) -> list[dict]:
    """The lines of a run's log on the evaluations of a step."""
    rows = [values for _, values in logged_lines(run / "metrics.jsonl") if values["step"] == step]
    return [values for values in rows if split_set(values)[1].keys() & {*RETRIEVAL, *ZERO_SHOT}]


def left_out(config: Evaluate, rows: list[dict]) -> list[int]:
    """The numbers of the evaluation sets whose values are not in these rows of the log."""
    logged = {key for row in rows for key in row}
    return [number for number, of in enumerate(config.sets) if not logged.intersection(of.keys)]


def open_sample_log(run: Path, step: int) -> Path:
    """This rank's file; rank 0 also cuts the files of ranks that no longer exist to the step that the run resumes
    from."""
    folder, rank = run / "samples", distributed.rank()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f".rank-{rank}.jsonl.*"):  # of a killed attempt
        left.unlink(missing_ok=True)
    for path in folder.glob("rank-*.jsonl"):
        of = int(path.stem.removeprefix("rank-"))
        if of == rank or (rank == 0 and of >= distributed.world_size()):
            drop_lines_after(path, step)
    return folder / f"rank-{rank}.jsonl"


@contextmanager
def profiling(config: Config, done: int) -> Iterator[Callable[[], None]]:
    """Trace rank 0's steps `config.profile` with torch's profiler; inside, call what is given after every step.

    The trace, profile/steps-FIRST-LAST.json.gz, has operators, kernels and copies. A step that was not taken is
    missing; a trace that cannot be written costs nothing else.
    """
    if not config.profile or not distributed.is_main():
        yield lambda: None
        return
    first, last = config.profile
    path = Path(config.out) / "profile" / f"steps-{first}-{last}.json.gz"
    if not torch.cuda.is_available():
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler's own lines say that it found no driver

    def action(taken: int) -> ProfilerAction:
        step = done + taken + 1
        if step == last:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if first <= step < last else ProfilerAction.NONE

    def write(profile: torch.profiler.profile) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(path))
            print(f"profile {path}: open it in ui.perfetto.dev or chrome://tracing", flush=True)
        except (OSError, RuntimeError) as error:
            print(f"warning: {path} cannot be written ({error}); the run continues.", flush=True)

    with torch.profiler.profile(schedule=action, on_trace_ready=write) as profile:
        yield profile.step
