"""The run folder: config.yaml, metrics.jsonl, tensorboard/, checkpoints/step-N/, model/, and if asked for model-best/
with best.json, and samples/.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from pretrain.config import Config
from pretrain.engine.average import Average
from pretrain.engine.checkpoint import read_exported, take_snapshot
from pretrain.engine.nonfinite import culprits
from pretrain.evaluation_sets import left_out, logged_evaluations, lower_is_better, split_set
from pretrain.sample_log import SampleLog
from probemb import distributed
from probemb.cli.configuration import to_dict, with_absolute_paths
from probemb.files import replace_file, replace_text
from probemb.models import DualEncoder, save_model
from probemb.runs.best import NAME as BEST
from probemb.runs.best import Best, read_best
from probemb.runs.checkpoints import Snapshot, prune, read_state
from probemb.runs.copy import Copier, Copy
from probemb.runs.lock import RunLock
from probemb.runs.log import rsum_words, step_of, train_line
from probemb.runs.log_file import LogFile
from probemb.runs.output import RunOutput

FREE_TO_CHANGE = (
    "engine",
    "loss.exchange",  # the same loss
    "data",  # the resulting samples and their order are compared
    "out",
    "resume",
    "allow_changes",
    "stop_at_step",
    "log_every",
    "save_every",
    "keep_checkpoints",
    "keep_every",
    "on_nonfinite",
    "log_samples",
    "profile",
    "remote_copy",
    "wandb",
    "evaluate",
)


DIGEST = ("corpus", "data.corpus", "train")  # see `refuse_another_run`
TERMS = ("clip", "siglip", "ppcl", "match", "vib", "pseudo_positive", "inclusion", "image_inclusion", "text_inclusion")
MODEL, BEST_MODEL = "model", "model-best"
STEP = ".step"  # of model/ and model-best/: whose weights they are, written when the folder is complete


class RunFolder(RunOutput):
    """Files of a pretraining run: those of `RunOutput`, and with each checkpoint the weights alone in model/.

    Args:
        data_identity: all that the order of the samples depends on, to compare when resuming.
        step: the step that the run resumes from, of `steps`.
        lock: of the folder, on rank 0.
        average: of the engine's weights, which model/ then has.
    """

    def __init__(
        self,
        config: Config,
        model: DualEncoder,
        data_identity: dict,
        steps: int,
        step: int,
        lock: RunLock | None = None,
        average: Average | None = None,
    ):
        self.average = average
        self.model_config, self.data_identity, self.samples = model.config, data_identity, None
        if distributed.is_main():
            # Not built in the writer's thread, as building draws random numbers.
            self.model = _empty_model(model.config)
        super().__init__(config, step, steps, lock)
        self.copier = make_copier(config, step, lambda: self.protected) if self.is_main else None
        if step:
            self._restore(step, MODEL)
        self.best, self.saved = self._resume_best(step), step if step else None
        self.left_out = self._resume_evaluations(step)
        if config.log_samples:
            self.samples = SampleLog(self.path, step, distributed.rank(), distributed.world_size())

    def prune(self) -> None:
        """Also leaves what is being copied elsewhere."""
        in_use = self.copier.in_use if self.copier else frozenset()
        prune(self.path, self.config.keep_checkpoints, self.config.keep_every, self.protected | in_use)

    def _restore(self, step: int, name: str) -> None:
        distributed.on_main(
            lambda: restore_model(self.path, step, name), self.path / name, "Make room for it, and start again."
        )

    def _resume_best(self, step: int) -> Best | None:
        """The best so far by the metric that this run asks for; collective."""
        metric = self.config.evaluate.best
        found = distributed.all_of(read_best(self.path, step) if self.is_main else None)[0]
        if found:
            self.protected = frozenset([found.step])
            self._restore(found.step, BEST_MODEL)
        if metric is None or (found and found.metric == metric):
            return found if metric else None
        if found and self.is_main:
            print(f"resume  {self.path / BEST} is by {found.metric}; the best by {metric} is chosen from here on")
        return Best(metric, lower_is_better(metric))

    def _resume_evaluations(self, step: int) -> list[int]:
        """The evaluations that the log lacks of `step`; notes whether one that it has is the best; collective."""
        rows = logged_evaluations(self.path, step) if self.is_main and step else []
        rows = distributed.all_of(rows)[0]
        if self.best:
            self.best.add_logged(step, rows)
        return left_out(self.config.evaluate, rows)

    def report(self, step: int, values: dict[str, float]) -> None:
        """Log a step and print its progress line; notes whether it is the best."""
        if self.best and self.best.metric in values and self.best.add(step, values[self.best.metric]):
            values = {**values, "is_best": True}
        super().report(step, values)

    def keep_best(self, engine, step: int, samples: int, skipped: int = 0) -> None:
        """Save the step that was evaluated, if it is the best so far, and mark it as such; collective.

        Raises:
            UserError: as `save`.
        """
        if not self.best or self.best.step != step or step in self.protected:
            return
        self.protected |= {step}  # beside the one before, as long as that is marked
        self.save(engine, step, samples, skipped)
        if self.is_main:
            best = replace(self.best, values=dict(self.best.values))
            self.writer.then(lambda: self.or_say_why(lambda: self._mark(best)))

    def _mark(self, best: Best) -> None:
        """In the writer's thread: model/ holds that step's weights."""
        if self.writer.failed:
            return
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

    def line(self, step: int, values: dict[str, float]) -> str:
        """The printed line of `values`, which are as in metrics.jsonl."""
        values = dict(values)
        is_best = values.pop("is_best", False)
        return self._line(step, values) + (f" | best {self.best.metric} so far" if is_best else "")

    def _line(self, step: int, values: dict[str, float]) -> str:
        name, own = split_set(values)
        head = f"{step_of(step, self.steps)} | {f'{name}: ' if name else ''}"
        if "rsum" in own:
            return f"{head}validation loss {own['validation_loss']:.3f}, {rsum_words(own)}"
        if "zeroshot_top1" in own:
            top1, top5 = 100 * own["zeroshot_top1"], 100 * own["zeroshot_top5"]
            return f"{head}zero-shot top-1 {top1:.2f} %, top-5 {top5:.2f} %"
        return train_line(step, self.steps, values, TERMS)

    def seen(self, step: int, keys: list[str]) -> None:
        """Log the samples that this rank has trained on in a step."""
        if self.samples:
            self.samples.write(step, keys)

    def nonfinite(self, step: int, reports: list[dict]) -> str:
        """Write every rank's report of a step with NaN or Inf; returns the file's name."""
        path = self.path / "nonfinite.jsonl"
        if self.is_main:
            # As text: JSON has no NaN.
            rows = [{**r, "terms": {name: str(value) for name, value in r["terms"].items()}} for r in reports]
            file = LogFile(path, self.log.warnings)
            file.write(f"{json.dumps({'step': step, 'ranks': rows})}\n".encode())
            file.close()
            if self.config.on_nonfinite == "skip":
                first = culprits(reports)[0]
                keys = ", ".join(first["keys"][:3])
                print(
                    f"{step_of(step, self.steps)} | skipped on all ranks: the {first['stage']} is NaN or Inf on rank "
                    f"{first['rank']} ({keys}{', …' if len(first['keys']) > 3 else ''}); see {path}",
                    flush=True,
                )
        return str(path)

    def save(self, engine, step: int, samples: int, skipped: int = 0) -> None:
        """Start writing a checkpoint, and the weights alone in model/, unless this step has one; collective.

        Raises:
            UserError: the one before could not be written; on all ranks.
        """
        if step == self.saved:
            return
        self.saved = step
        state = {
            "samples": samples,
            "skipped": skipped,
            "config": with_absolute_paths(to_dict(self.config), self.config),
            "data": self.data_identity,
            "model": self.model_config,
        }
        self.write(lambda: take_snapshot(engine, step, state, self.average))

    def write_more(self, snapshot: Snapshot) -> str:
        """The weights alone, in model/."""
        prefix = "model."
        weights = {n.removeprefix(prefix): t for n, t in snapshot.whole.items() if n.startswith(prefix)}
        self.model.load_state_dict(weights, assign=True)
        (self.path / MODEL / STEP).unlink(missing_ok=True)
        save_model(self.model, self.path / MODEL, overwrite=True)
        replace_text(self.path / MODEL / STEP, f"{snapshot.content['step']}\n")
        if self.copier:
            self.copier.wake()
        return f" and {self.path / MODEL}"

    def finish_copy(self, seconds: float) -> None:
        """Wait so long until the remote copy is up to date, or given up; not collective, never raises."""
        if self.copier:
            self.copier.wake()  # lines have been logged since the last checkpoint was copied
            self.copier.close(seconds)

    def close(self) -> None:
        """Flush everything; not collective."""
        super().close()
        if self.samples:
            self.samples.close()


def make_copier(config: Config, step: int, protected: Callable[[], frozenset[int]]) -> Copier | None:
    """The copier of the run's checkpoints, if asked for; begins with what an earlier attempt did not copy."""
    if not config.remote_copy:
        return None
    kept = (config.keep_checkpoints, config.keep_every)
    copier = Copier(Path(config.out), Copy(config.remote_copy), step, *kept, protected)
    if step:
        copier.wake()
    return copier


def complete_finished(config: Config, step: int) -> None:
    """Make what is missing of a run that is finished: models here, if it was fetched, and what a copy lacks."""
    run, metric = Path(config.out), config.evaluate.best
    best = read_best(run, step)
    if metric and (best is None or best.metric == metric):
        best = best or Best(metric, lower_is_better(metric))
        if best.add_logged(step, logged_evaluations(run, step)):
            best.write(run)
    restore_model(run, step, MODEL)
    kept = frozenset([best.step] if best and best.values else [])
    for one in kept:
        restore_model(run, one, BEST_MODEL)
    if copier := make_copier(config, step, lambda: kept):
        copier.close(30 * config.engine.timeout)


def restore_model(run: Path, step: int, name: str) -> None:
    """Write a step's weights to a folder of the run, unless it has them: copies elsewhere hold checkpoints alone, and a
    run that was killed may have written a checkpoint and not yet its weights.
    """
    import torch

    try:
        is_complete = (run / name / STEP).read_text(encoding="utf-8").strip() == str(step)
    except (OSError, ValueError):
        is_complete = False
    if is_complete:
        return
    checkpoint = run / "checkpoints" / f"step-{step}"
    with torch.random.fork_rng(devices=[]):
        model = DualEncoder(read_state(checkpoint)["model"])
    weights = {key.removeprefix("model."): tensor for key, tensor in read_exported(checkpoint).items()}
    model.load_state_dict(weights)
    (run / name / STEP).unlink(missing_ok=True)
    save_model(model, run / name, overwrite=True)
    replace_text(run / name / STEP, f"{step}\n")


def _empty_model(model_config: dict) -> DualEncoder:
    """Without memory for its weights."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return DualEncoder(model_config)
