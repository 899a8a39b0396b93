"""Files that a run writes to its folder: config.yaml, metrics.jsonl, tensorboard/ and checkpoints/."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from probemb import distributed
from probemb.distributed import agree, on_main
from probemb.errors import UserError
from probemb.files import replace_text
from probemb.options import to_dict, to_yaml
from probemb.runs.checkpoints import Snapshot, prune, set_aside_after
from probemb.runs.folder import remove_leftovers
from probemb.runs.lock import RunLock
from probemb.runs.log import RunLog, start_wandb, step_of, train_line


def take_lock(run: Path | str) -> RunLock | None:
    """The lock of a run folder, on rank 0, and None on the others; collective.

    Raises UserError on all ranks: another job holds it, or the folder cannot be written.
    """
    return on_main(lambda: RunLock(Path(run)), run, "Choose another --out.")


class RunOutput:
    """The files of a run. Every rank holds one, as saving is collective; rank 0 writes.

    Checkpoints are written in a thread during training. A step waits for the copy to rank 0's memory, and for the
    previous write if that is still in progress. An error of the thread is kept until `check`, which raises it on every
    rank.

    Args:
        config: resolved; has out, wandb, keep_checkpoints and perhaps keep_every.
        step: the step that the run resumes from.
        steps: length of the whole run.
        lock: of the folder, on rank 0; a folder that is deleted meanwhile ends the run.

    Raises UserError on all ranks: the folder cannot be written.
    """

    def __init__(self, config, step: int, steps: int, lock: RunLock | None = None):
        self.path, self.config, self.steps, self.lock = Path(config.out), config, steps, lock
        self.is_main = distributed.is_main()
        self.protected: frozenset[int] = frozenset()  # steps whose checkpoints stay
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.log: RunLog | None = on_main(lambda: self._begin(step), self.path, "Choose another --out.")

    def _begin(self, step: int) -> RunLog:
        self.path.mkdir(parents=True, exist_ok=True)
        wandb = start_wandb(self.config.wandb, self.path, to_dict(self.config))  # first: the login may fail
        (self.path / "checkpoints").mkdir(exist_ok=True)
        remove_leftovers(self.path)
        set_aside_after(self.path, step)
        replace_text(self.path / "config.yaml", to_yaml(self.config))
        return RunLog(self.path, step, wandb)

    def line(self, step: int, values: dict[str, float]) -> str:
        """The progress line; `values` as in metrics.jsonl."""
        return train_line(step, self.steps, values)

    def report(self, step: int, values: dict[str, float]) -> None:
        """Log a step and print its progress line."""
        if self.log:
            self.log.write(step, values)
            print(self.line(step, values), flush=True)
            if self._is_gone():
                self._failure = self._failure or self._gone_error()

    @property
    def failed(self) -> bool:
        """True if a checkpoint could not be written, or the folder is gone, on this rank."""
        return self._failure is not None

    def check(self) -> None:
        """Raise the error of any rank on all of them; collective."""
        failure, self._failure = self._failure, None
        agree(failure)

    def write(self, take: Callable[[], Snapshot | None], then: Callable[[], None] = lambda: None) -> None:
        """Start to write the snapshot that `take` copies on rank 0, and call `then` in the thread; collective.

        Raises UserError on all ranks: the previous one could not be written.
        """
        began = time.perf_counter()
        self.finish()
        if snapshot := take():
            paused = time.perf_counter() - began
            self.start(lambda: (self._write(snapshot, paused), then()))

    def start(self, job: Callable[[], object]) -> None:
        """Run a job in the thread, when nothing is being written.

        The thread is not a daemon: a process that ends, also with Ctrl-C, finishes its writes.
        """

        def run() -> None:
            try:
                if self._is_gone():  # or it would be recreated without the rest of the run folder
                    raise self._gone_error()
                job()
            except Exception as error:
                self._failure = self._failure or self._explained(error)

        self._wait()
        self._thread = threading.Thread(target=run, name="checkpoint-writer")
        self._thread.start()

    def _is_gone(self) -> bool:
        return self.lock is not None and not self.lock.is_current()

    def _gone_error(self) -> UserError:
        return UserError(
            f"The run folder is gone: {self.path} was deleted or replaced while the run was writing it.",
            "Start the run again, or put the folder back and continue with --resume.",
        )

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, (UserError, OSError)) and self._is_gone():
            return self._gone_error()
        if not isinstance(error, OSError):
            return error
        return UserError(
            f"{error.filename or self.path} could not be written: {error.strerror or error}.",
            "Make room, or make the folder writable, and continue with --resume; earlier checkpoints are complete.",
        )

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
        """Delete checkpoints that are not to be kept."""
        prune(self.path, self.config.keep_checkpoints, getattr(self.config, "keep_every", 0), self.protected)

    def write_more(self, snapshot: Snapshot) -> str:
        """Hook, called in the thread: write a stage's own files beside a checkpoint; returns a few words on them."""
        return ""

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait until everything is written; collective. Raises UserError on all ranks: a write failed."""
        self._wait()
        self.check()

    def close(self) -> None:
        """Finish writes and close the log; not collective, never raises."""
        self._wait()
        if self.log:
            self.log.close()
