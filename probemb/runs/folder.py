"""A run folder: what it may hold when a run starts, and what every run writes to it."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch import nn

from probemb.distributed import agree, all_of, is_main, on_main
from probemb.errors import UserError
from probemb.files import replace_text
from probemb.options import flat, resolved, to_yaml
from probemb.runs.checkpoints import Snapshot, find_checkpoint, prune, remove_after, restore_replaced
from probemb.runs.lock import MAX_STARTS, RunLock, count_start, refuse_locked
from probemb.runs.log import RunLog, evaluation_line, start_wandb, step_of, train_line

BYTES_OF_CHECKPOINT, BYTES_OF_MODEL = 12, 4  # a parameter: a float32 weight and Adam's two moments; the weight


# ------------------------------------------------------------------------------------------------ before a run starts
def newest_checkpoint(
    out: str | Path, resume: bool, tell: Callable[[str], object] = print, minutes: float = 0.0,
    fetch: Callable[[], object] = lambda: None,
) -> Path | None:  # fmt: skip
    """The checkpoint to resume from, or None for a new run; writes nothing, but a name that a kill took.

    `tell` gets a sentence about newer, damaged ones, or about the wait of up to `minutes` for an earlier start of this
    job. `fetch` may put a checkpoint into the folder, once that is known to be a run's or empty. Raises UserError: a
    new run would overwrite something, or another job writes the folder.
    """
    run = Path(out)
    refuse_locked(run, minutes if resume else 0.0, tell)
    restore_replaced(run)
    is_run = (run / "checkpoints").is_dir()  # the first that a run writes
    what = f"{run} holds something else than a run, or a run without its checkpoints, which a new run would overwrite."
    other = UserError(what, "Choose another --out, or put checkpoints/ back and add --resume.")
    if not is_run and any(path.name != "wandb" for path in run.glob("[!.]*")):
        raise other
    if not resume:
        if is_run:
            raise UserError(f"{run} already holds a run.", "Add --resume to continue it, or choose another --out.")
        return None
    fetch()
    earlier = find_checkpoint(run, tell)
    if not earlier and any(run.glob("model*/*")):
        raise other
    return earlier


def refuse_full_disk(out: str | Path, model: nn.Module, models: int = 1, average: bool = False) -> None:
    """Raise UserError unless the disk has room for another checkpoint, with an `average`, and exported `models`."""
    n = sum(p.numel() for p in model.parameters())
    needed = n * (BYTES_OF_CHECKPOINT + (models + average) * BYTES_OF_MODEL)
    path = Path(out).absolute()
    free = shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.is_dir())).free
    if free < needed:
        room = f"{free / 1e6:,.1f} MB free, and a checkpoint and the exported weights need {needed / 1e6:,.1f} MB"
        raise UserError(f"The disk of {out} has {room}.", "Make room, or choose an --out on another disk.")


def refuse_another_run(config, state: dict, identity: dict, earlier: Path, free: tuple[str, ...]) -> list[str]:
    """Changes since `state`, of the checkpoint `earlier`, "KEY: BEFORE -> NOW" each; UserError if one is not of the
    `free` keys and groups, and `config.allow_changes` is not set. `identity`: what the batches depend on.
    """
    before, now = flat(state["config"]), flat(resolved(config))
    keys = [key for key in sorted({*before, *now}) if not f"{key}.".startswith(tuple(f"{one}." for one in free))]
    changes = {key: (before.get(key), now.get(key)) for key in keys}
    before, now = flat(state["data"], "data."), flat(identity, "data.")
    changes |= {k: (before.get(k), now.get(k)) for k in {**before, **now} if k.removeprefix("data.") not in changes}
    found = [f"{key}: {old} -> {new}" for key, (old, new) in changes.items() if old != new]
    allowed = getattr(config, "allow_changes", None)  # None: such runs have no such option
    if found and not allowed:
        what = f"The run is not the one that {earlier} belongs to: {'; '.join(found)}."
        more = "" if allowed is None else "pass --allow-changes, "
        raise UserError(what, f"Resume with its folder's config.yaml and the same data, {more}or choose another --out.")
    return found


def refuse_endless_starts(run: Path, first: int, step: int) -> None:
    """Raise UserError on all ranks if a start that began at `first` and was asked to stop at `step` is the third in a
    row without a new step, which a scheduler would repeat forever; collective.
    """
    count = count_start(run / ".starts", first, step) if is_main() else 0
    if all_of(count)[0] >= MAX_STARTS:
        what = f"{MAX_STARTS} starts in a row were asked to stop before they had made a step, the last at step {step}."
        raise UserError(what, "Continue with --resume, and give it more time (sbatch --time).")


def take_lock(run: Path | str) -> RunLock | None:
    """The lock of a run folder, on rank 0; collective."""
    return on_main(lambda: RunLock(Path(run)), run, "Choose another --out.")


# ------------------------------------------------------------------------------------------------------ what it writes
class RunOutput:
    """config.yaml, metrics.jsonl, tensorboard/ and checkpoints/, written by rank 0; every rank holds one, as saving is
    collective.

    Checkpoints are written in a thread during training. A step waits for the copy to rank 0's memory, and for the
    previous write if that is still in progress. An error of the thread is kept until `check` raises it on every rank.
    With a `lock`, a folder that is deleted meanwhile ends the run.
    """

    def __init__(self, config, step: int, steps: int, lock: RunLock | None = None):
        self.path, self.config, self.steps, self.lock = Path(config.out), config, steps, lock
        self.is_main = is_main()
        self.protected: frozenset[int] = frozenset()  # steps whose checkpoints stay
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.log: RunLog | None = on_main(lambda: self._begin(step), self.path, "Choose another --out.")

    def _begin(self, step: int) -> RunLog:
        self.path.mkdir(parents=True, exist_ok=True)
        wandb = start_wandb(self.config.wandb, self.path, resolved(self.config))  # first: the login may fail
        (self.path / "checkpoints").mkdir(exist_ok=True)
        for pattern in (".*.*", "model*/.*.*", "model*/.tmp*"):  # of a killed attempt: ours, and safetensors' own
            for left in self.path.glob(pattern):
                left.unlink(missing_ok=True)
        remove_after(self.path, step)
        replace_text(self.path / "config.yaml", to_yaml(self.config))
        return RunLog(self.path, step, wandb)

    def report(self, step: int, values: dict[str, float]) -> None:
        """Log a step's values and print their line."""
        if self.log:
            self.log.write(step, values)
            now = step, self.steps, values
            print(evaluation_line(*now) or train_line(*now), flush=True)
            self._failure = self._failure or self._explained(None)

    @property
    def failed(self) -> bool:
        """True on a rank that could not write a checkpoint, or whose folder is gone."""
        return self._failure is not None

    def check(self) -> None:
        """Raise the error of any rank on all of them; collective."""
        failure, self._failure = self._failure, None
        agree(failure)

    def write(self, take: Callable[[], Snapshot | None], then: Callable[[], None] = lambda: None) -> None:
        """Start to write the snapshot that `take` copies on rank 0, and call `then` in the thread; collective."""
        began = time.perf_counter()
        self.finish()
        if snapshot := take():
            paused = time.perf_counter() - began
            self.start(lambda: (self._write(snapshot, paused), then()))

    def start(self, job: Callable[[], object]) -> None:
        """Run a job in the thread, which is no daemon: a process that ends, also with Ctrl-C, finishes its writes."""

        def run() -> None:
            self._failure = self._failure or self._explained(None)
            try:
                if not self._failure:  # or a deleted folder would be recreated without the rest of the run
                    job()
            except Exception as error:
                self._failure = self._explained(error)

        self._wait()
        self._thread = threading.Thread(target=run, name="checkpoint-writer")
        self._thread.start()

    def _explained(self, error: Exception | None) -> Exception | None:
        if self.lock and not self.lock.is_current():
            what = f"The run folder is gone: {self.path} was deleted or replaced while the run was writing it."
            return UserError(what, "Start the run again, or put the folder back and continue with --resume.")
        if not isinstance(error, OSError):
            return error
        what = f"{error.filename or self.path} could not be written: {error.strerror or error}."
        return UserError(what, "Make room, or the folder writable, and --resume; earlier checkpoints are complete.")

    def _write(self, snapshot: Snapshot, paused: float) -> None:
        began = time.perf_counter()
        where = snapshot.write(self.path)
        self.prune()
        more = self.write_more(snapshot)
        print(
            f"{step_of(snapshot.content['step'], self.steps)} | saved {where}{more} "
            f"(training paused for {paused:.1f} s, written in {time.perf_counter() - began:.1f} s)",
            flush=True,
        )

    def prune(self) -> None:
        prune(self.path, self.config.keep_checkpoints, getattr(self.config, "keep_every", 0), self.protected)

    def write_more(self, snapshot: Snapshot) -> str:
        """Hook in the thread: write a stage's own files beside a checkpoint; returns a few words on them."""
        return ""

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Wait until everything is written, or raise the error of a write on all ranks; collective."""
        self._wait()
        self.check()

    def close(self) -> None:
        """Finish writes and close the log; not collective, never raises."""
        self._wait()
        if self.log:
            self.log.close()
