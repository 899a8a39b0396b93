"""A copy of a run in an object store or another folder: its checkpoints, and small files beside them.

    ADDRESS/checkpoints/step-N/…    as in the run folder; a step with a state.json, written last, is complete
    ADDRESS/config.yaml, metrics.jsonl, best.json

A thread of rank 0 keeps it up to date. Every operation has a deadline and a thread of its own, which is abandoned when
a server hangs: the run neither waits for the copy nor fails with it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import fsspec

from probemb.errors import UserError
from probemb.files import flush
from probemb.runs.checkpoints import (
    OPTIMIZER,
    RANDOM,
    STATE,
    WEIGHTS,
    Damaged,
    complete_steps,
    read_best,
    read_content,
    superfluous,
    verify_files,
)

SMALL = ("config.yaml", "metrics.jsonl", "best.json")
PATIENCE, SLOWEST = 120.0, 1e6  # deadline of an operation: seconds, and bytes a second
PAUSES = (10.0, 60.0, 600.0)  # seconds after the first failure in a row, the second, and all others
ATTEMPTS_AT_END = 3
LOCK = ".fetching"


class CopyFailed(Exception):
    """An operation on a copy failed; the text is the reason."""


class Copy:
    """The copy at an address that fsspec knows, or in a folder. Its methods raise CopyFailed."""

    def __init__(self, address: str):
        self.address = address

    def __str__(self) -> str:
        return re.sub(r"(?<=://)[^/@]*@|\?.*", "", self.address)  # without secrets

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, newest first."""
        found = [re.search(rf"/step-(\d+)/{STATE}$", name) for name in self._do("find", "checkpoints", missing=[])]
        return sorted((int(one[1]) for one in found if one), reverse=True)

    def try_writing(self) -> None:
        """Write a small file and remove it again."""
        self._do("makedirs", "", exist_ok=True)
        self._do("touch", ".writable")
        self._do("rm_file", ".writable")

    def put(self, folder: Path) -> None:
        """Copy a checkpoint; one of the same step is replaced."""
        self.remove([int(folder.name.removeprefix("step-"))])
        for file in sorted(folder.iterdir(), key=lambda file: file.name == STATE):
            self.put_file(file, f"checkpoints/{folder.name}/{file.name}")

    def put_file(self, file: Path, name: str) -> None:
        """Copy a file, which gets its name when it is complete; of a checkpoint only the last one needs to."""
        aside = name if name.endswith(".safetensors") else f"{name}.partial"
        self._do("makedirs", os.path.dirname(name), exist_ok=True)
        self._do("put_file", file, aside, bytes=file.stat().st_size)
        if aside != name:
            self._do("mv", aside, name)

    def get(self, name: str, file: Path) -> None:
        """Fetch a file, if it exists."""
        if size := self._do("size", name, missing=0):
            self._do("get_file", name, file, bytes=size)

    def remove(self, steps: Collection[int]) -> None:
        """Remove checkpoints, what makes them complete first."""
        for folder in (f"checkpoints/step-{step}" for step in steps):
            self._do("rm_file", f"{folder}/{STATE}", missing=True)
            self._do("rm", folder, recursive=True, missing=True)

    def _do(self, method: str, *places: str | Path, missing: Any = None, bytes: int = 0, **options) -> Any:
        """The result of a file system's method for files of the copy (str) and here (Path); `missing` if it raises
        FileNotFoundError.
        """
        found: dict[str, Any] = {"error": TimeoutError("no answer")}

        def run() -> None:
            try:
                files, root = fsspec.url_to_fs(self.address, skip_instance_cache=True, use_listings_cache=False)
                paths = [str(one) if isinstance(one, Path) else f"{root.rstrip('/')}/{one}" for one in places]
                found.update(result=getattr(files, method)(*paths, **options), error=None)
            except FileNotFoundError as error:
                found.update(result=missing, error=None if missing is not None else error)
            except Exception as error:  # any, of any package
                found["error"] = error

        thread = threading.Thread(target=run, daemon=True, name="remote-copy-operation")
        thread.start()
        thread.join(PATIENCE + bytes / SLOWEST)
        if (error := found["error"]) is None:
            return found["result"]
        reason = " ".join(str(error).split()).replace(self.address, str(self))[:300]
        raise CopyFailed(f"{type(error).__name__}: {reason}")


class Copier:
    """Brings a copy up to date after every `wake`, newest checkpoint first.

    The newest checkpoint, those of `keep_every` and the best are copied; one that a newer one overtakes is not.
    Afterwards the copy keeps as many as the run folder. A failure is reported and retried; it never reaches the run.

    Args:
        step: the step that the run resumes from: what the copy has up to it needs no other copy.
        keep, keep_every: as the run's `keep_checkpoints` and `keep_every`; protected: further steps to keep.
    """

    def __init__(
        self, run: Path, copy: Copy, step: int, keep: int, keep_every: int, protected: Callable[[], Collection[int]]
    ):
        self.run, self.copy, self.keep, self.keep_every, self.protected = run, copy, keep, keep_every, protected
        self.in_use: frozenset[int] = frozenset()  # the step that is being copied; its checkpoint must stay
        self._step, self._copied = step, set[int]()
        self._due, self._closing = threading.Event(), threading.Event()
        # A daemon: what is not copied when a run fails is copied by the next start.
        self._thread = threading.Thread(target=self._work, daemon=True, name="remote-copy")
        self._thread.start()

    def wake(self) -> None:
        """A checkpoint, or the mark of the best one, has been written; does not wait."""
        self._due.set()

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` until the copy is up to date or has failed; never raises."""
        self._closing.set()
        self._due.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            print(f"remote copy {self.copy}: not up to date after {seconds:.0f} s; --resume completes it", flush=True)

    def _work(self) -> None:
        failures = last_attempts = 0
        while True:
            pause = PAUSES[0 if last_attempts else min(failures, len(PAUSES)) - 1]
            self._due.wait(pause if failures else None)
            self._due.clear()
            closing = self._closing.is_set()
            reason = self._bring_up_to_date()
            failures = failures + 1 if reason else 0
            last_attempts += closing
            if closing and (not reason or last_attempts == ATTEMPTS_AT_END):
                if reason:
                    print(f"remote copy {self.copy}: not up to date ({reason}); --resume completes it", flush=True)
                return
            if reason:
                print(f"remote copy {self.copy}: failed ({reason}); it is tried again", flush=True)

    def _bring_up_to_date(self) -> str | None:
        """The reason of a failure, or None."""
        try:
            there = {step for step in self.copy.steps() if step in self._copied or step <= self._step}
            while (step := self._next(there)) is not None:
                self.in_use = frozenset([step])
                self.copy.put(self.run / "checkpoints" / f"step-{step}")
                self._copied.add(step)
                there.add(step)
                print(f"remote copy {self.copy}: step {step} is complete", flush=True)
            for name in SMALL:
                if (self.run / name).exists():
                    self.copy.put_file(self.run / name, name)
            self.copy.remove(superfluous(there, there, self.keep, self.keep_every, self.protected()))
        except (CopyFailed, OSError) as error:
            return str(error)
        finally:
            self.in_use = frozenset()
        return None

    def _next(self, there: Collection[int]) -> int | None:
        """The newest step that is still to be copied."""
        here, best, every = complete_steps(self.run), self.protected(), self.keep_every
        wanted = [step for step in here if step == here[0] or step in best or (every and step % every == 0)]
        return next((step for step in wanted if step not in there), None)


def check_copy(copy: Copy, out: str | Path, step: int | None, tell: Callable[[str], object]) -> None:
    """Check that the copy is the run's that resumes from `step`, or is new (None).

    Raises UserError: it holds a run, or later steps of this one, or a new run cannot reach or write it.
    """
    if Path(copy.address.removeprefix("file://")).absolute() == Path(out).absolute():
        raise UserError(f"The remote copy {copy} is the run folder.", "Name another place.")
    try:
        there = copy.steps()
        copy.try_writing()
    except CopyFailed as error:
        if step is None:
            raise _unreachable(copy, error) from None
        tell(f"The remote copy {copy} cannot be reached or written ({error}); the run tries again.")
        return
    if there and step is None:
        raise UserError(
            f"The remote copy {copy} already holds a run.", "Add --resume to continue it, or name another place."
        )
    if step is not None and there and there[0] > step:
        raise UserError(
            f"The remote copy {copy} has step {there[0]}, and the run would resume from step {step}.",
            "Resume in an empty --out to continue from the copy, or name another place for this one.",
        )


def fetch_newest(copy: Copy, run: Path, tell: Callable[[str], object]) -> None:
    """Fetch the newest whole checkpoint of a copy, and the best one, into a run folder that has none.

    Several ranks of a machine may call it: the first one fetches, the others wait for it. Checkpoints get their names
    when everything is there, so a fetch that was killed is made again.

    Raises UserError: the copy cannot be read, all its checkpoints are damaged, or the folder cannot be written.
    """
    if complete_steps(run):
        return
    try:
        if not (steps := copy.steps()):
            return
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        with open(run / "checkpoints" / LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete_steps(run):
                _fetch(copy, run, steps, tell)
    except CopyFailed as error:
        raise _unreachable(copy, error) from None
    except OSError as error:
        raise UserError(f"{run} cannot be written ({error.strerror or error}).", "Choose another --out.") from None


def _fetch(copy: Copy, run: Path, steps: list[int], tell: Callable[[str], object]) -> None:
    newest = next((step for step in steps if _fetch_step(copy, run, step, tell)), None)
    if newest is None:
        raise UserError(f"Every checkpoint in {copy} is damaged.", "Restore one, or start a new run elsewhere.")
    for name in SMALL:  # the configuration first: with it the folder is a run's for other ranks
        copy.get(name, hidden := run / "checkpoints" / f".{name}.fetched")
        if hidden.exists():
            hidden.replace(run / name)
    marked = read_best(run)
    best = [marked.step] if marked and marked.step in steps and marked.step < newest else []
    for step in [step for step in best if _fetch_step(copy, run, step, tell)] + [newest]:
        _fetched(run, step).rename(run / "checkpoints" / f"step-{step}")
        flush(run / "checkpoints")
    tell(f"fetched step {newest} from {copy}")


def _fetch_step(copy: Copy, run: Path, step: int, tell: Callable[[str], object]) -> bool:
    """Fetch a checkpoint under a hidden name; False if it is damaged."""
    folder = _fetched(run, step)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        for name in (WEIGHTS, OPTIMIZER, RANDOM, STATE):
            copy.get(f"checkpoints/step-{step}/{name}", folder / name)
        verify_files(folder, read_content(folder))
    except Damaged as error:
        tell(f"{error.what} It is skipped.")
        shutil.rmtree(folder)
        return False
    for file in (*folder.iterdir(), folder):
        flush(file)
    return True


def _fetched(run: Path, step: int) -> Path:
    return run / "checkpoints" / f".step-{step}.fetched"


def _unreachable(copy: Copy, error: CopyFailed) -> UserError:
    return UserError(
        f"The remote copy {copy} cannot be reached or written ({error}).",
        "Check the address and the credentials (s3:// needs `pip install 'probemb[s3]'`), or try again.",
    )
