"""The run folder: config.yaml, metrics.jsonl, tensorboard/, checkpoints/step-N/, model/, and samples/ if asked for."""

from __future__ import annotations

import json
import time
from pathlib import Path

from pretrain.config import Config
from pretrain.engine.background_writer import BackgroundWriter
from pretrain.engine.checkpoint import Snapshot, take_snapshot
from pretrain.engine.nonfinite import culprits
from pretrain.progress import SampleLog, evaluation_line, train_line
from probemb import distributed
from probemb.cli.configuration import to_dict, to_yaml
from probemb.errors import UserError
from probemb.files import replace_text
from probemb.models import DualEncoder, save_model
from probemb.runs.checkpoints import prune
from probemb.runs.folder import changes, remove_leftovers
from probemb.runs.log import RunLog

FREE_TO_CHANGE = (
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
    "wandb",
    "evaluate",
)


def refuse_another_run(config: Config, state: dict, data_identity: dict, earlier: Path) -> list[str]:
    """Resuming goes on with the same data order, model and recipe, unless `allow_changes` says otherwise.

    Returns:
        what has changed, "KEY: BEFORE -> NOW" each.

    Raises:
        UserError: names all of that, without `allow_changes`.
    """
    now = to_dict(config)
    before = {"objective": "pcmepp", **state["config"]}  # the only one of runs that do not name it
    changed = changes(before, now, ignore=(*FREE_TO_CHANGE, "engine", "data"))
    known = {key for key, _, _ in changed}
    for key, old, new in changes(state["data"], data_identity):
        if key == "corpus":  # two sums say little: name the paths too
            paths = [" ".join(_listed(one["data"]["train"])) for one in (before, now)]
            old, new = (f"{a} ({b})" for a, b in zip(paths, (old, new)))
        if key not in known:
            changed.append((f"data.{key}", old, new))
    told = [f"{key}: {old} -> {new}" for key, old, new in changed]
    if told and not config.allow_changes:
        raise UserError(
            f"The run is not the one that {earlier} belongs to: {'; '.join(told)}.",
            "Resume with the settings in the run folder's config.yaml (--config) and the same data, "
            "pass --allow-changes, or start a new run with another --out.",
        )
    return told


def _listed(paths: list | str) -> list[str]:
    return [paths] if isinstance(paths, str) else list(map(str, paths))


class RunFolder:
    """What a run writes; every rank holds one, as saving is collective, and rank 0 writes.

    Checkpoints and the model are written in a thread, while training goes on. A step waits for the copy in rank 0's
    memory, and for the write before if that is still going on.

    Args:
        config: the resolved configuration.
        model: the model of the engine, for its configuration.
        data_identity: what the order of the samples depends on, kept for `refuse_another_run`.
        steps: length of the whole run.
        step: the step that it goes on from.
    """

    def __init__(
        self,
        config: Config,
        model: DualEncoder,
        data_identity: dict,
        rank: int,
        world_size: int,
        steps: int,
        step: int,
    ):
        self.path, self.config, self.steps, self.is_main = Path(config.out), config, steps, rank == 0
        self.model_config, self.data_identity = model.config, data_identity
        self.writer = BackgroundWriter()
        self.log = self.samples = None
        if self.is_main:
            # The thread gets it ready-made: building a model draws random numbers, which training must not notice.
            self.model = _empty_model(model.config)
            self.path.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.path)
            replace_text(self.path / "config.yaml", to_yaml(config))
            self.log = RunLog(self.path, step, config.wandb, to_dict(config))
        if config.log_samples:
            distributed.barrier()  # a folder that holds samples/ has its config.yaml, and is known to be a run's
            self.samples = SampleLog(self.path, step, rank, world_size)

    @property
    def failed(self) -> bool:
        """Whether a checkpoint could not be written, on this rank."""
        return self.writer.failed

    def check(self) -> None:
        """Raise on all ranks what has `failed` on any; collective."""
        self.writer.check()

    def report(self, step: int, values: dict[str, float]) -> None:
        """One line for people and one for programs."""
        if self.log:
            self.log.write(step, values)
            line = evaluation_line if "zeroshot_top1" in values else train_line
            print(line(step, self.steps, values), flush=True)

    def seen(self, step: int, keys: list[str]) -> None:
        """The samples that this rank has trained on in a step."""
        if self.samples:
            self.samples.write(step, keys)

    def nonfinite(self, step: int, reports: list[dict]) -> str:
        """Every rank's report of a step with NaN or Inf; returns the name of the file that holds them."""
        path = self.path / "nonfinite.jsonl"
        if self.is_main:
            # As text: JSON has no NaN.
            rows = [{**r, "terms": {name: str(value) for name, value in r["terms"].items()}} for r in reports]
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "ranks": rows}) + "\n")
            if self.config.on_nonfinite == "skip":
                first = culprits(reports)[0]
                keys = ", ".join(first["keys"][:3])
                print(
                    f"step {step}/{self.steps} | skipped on all ranks: the {first['stage']} is NaN or Inf on rank "
                    f"{first['rank']} ({keys}{', …' if len(first['keys']) > 3 else ''}); see {path}",
                    flush=True,
                )
        return str(path)

    def save(self, engine, step: int, samples: int, skipped: int = 0) -> None:
        """Begin to write a checkpoint to resume from, and the weights alone in model/; collective.

        Raises:
            UserError: the one before could not be written; on all ranks.
        """
        began = time.perf_counter()
        self.finish()
        state = {
            "samples": samples,
            "skipped": skipped,
            "config": to_dict(self.config),
            "data": self.data_identity,
            "model": self.model_config,
        }
        snapshot = take_snapshot(engine, step, state)
        if snapshot:
            stopped = time.perf_counter() - began
            self.writer.start(lambda: self._write(snapshot, step, stopped))

    def _write(self, snapshot: Snapshot, step: int, stopped: float) -> None:
        """In the thread."""
        began = time.perf_counter()
        where = snapshot.write(self.path)
        prune(self.path, self.config.keep_checkpoints, self.config.keep_every)
        prefix = "model."
        weights = {n.removeprefix(prefix): t for n, t in snapshot.whole.items() if n.startswith(prefix)}
        self.model.load_state_dict(weights, assign=True)
        save_model(self.model, self.path / "model", overwrite=True)
        print(
            f"step {step}/{self.steps} | saved {where} and {self.path / 'model'} "
            f"(training stood {stopped:.1f} s, written in {time.perf_counter() - began:.1f} s)",
            flush=True,
        )

    def finish(self) -> None:
        """Wait until everything is written; collective.

        Raises:
            UserError: it could not be; on all ranks.
        """
        self.writer.wait()
        self.writer.check()

    def close(self) -> None:
        """Flush everything; not collective."""
        self.writer.wait()
        for log in (self.log, self.samples):
            if log:
                log.close()


def _empty_model(model_config: dict) -> DualEncoder:
    """Without memory for its weights."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return DualEncoder(model_config)
