"""A copy of a run in an object store or another folder: its checkpoints, and small files beside them.

    ADDRESS/checkpoints/step-N/…    as in the run folder; a step with a state.json, written last, is complete
    ADDRESS/config.yaml, metrics.jsonl, best.json

A thread of rank 0 keeps it up to date: the run neither waits for the copy nor fails with it.
"""

import fcntl
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import fsspec
from fsspec.implementations.dirfs import DirFileSystem

from probemb.data.remote import in_background
from probemb.errors import UserError
from probemb.files import flush
from probemb.runs.checkpoints import STATE, Damaged, complete_steps, read_best, read_content, superfluous

PATIENCE = 120.0  # seconds
SMALL = ("config.yaml", "metrics.jsonl", "best.json")


class Copy:
    """The copy at an address that fsspec knows, or in a folder. Its methods raise whatever the file system raises."""

    def __init__(self, address: str):
        self.address = address

    def __str__(self) -> str:
        return re.sub(r"(?<=://)[^/@]*@|\?.*", "", self.address)  # without secrets

    def reason(self, error: Exception) -> str:
        """An error of the file system in a few words, without secrets."""
        text = " ".join(str(error).split()).replace(self.address, str(self))[:300]
        return f"{type(error).__name__}: {text or 'no answer'}"

    def unusable(self, error: Exception) -> UserError:
        what = f"The remote copy {self} cannot be reached or written ({self.reason(error)})."
        return UserError(what, "Check the address and the credentials (s3:// needs `pip install 'probemb[s3]'`).")

    @cached_property
    def files(self) -> DirFileSystem:
        files, root = fsspec.url_to_fs(self.address, skip_instance_cache=True, use_listings_cache=False)
        return DirFileSystem(root, files)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, newest first. Raises TimeoutError: a server that does not answer."""

        def find() -> list[str]:
            with suppress(FileNotFoundError):
                return self.files.find("checkpoints")
            return []

        names = "\n".join(in_background(find).result(PATIENCE))
        return sorted(map(int, re.findall(rf"^checkpoints/step-(\d+)/{STATE}$", names, re.MULTILINE)), reverse=True)

    def put(self, name: str, folder: Path) -> None:
        self.files.makedirs(os.path.dirname(name), exist_ok=True)
        self.files.put_file(str(folder / name), name)

    def put_step(self, step: int, run: Path) -> None:
        """Copy a checkpoint, what makes it complete last; one of the same step is replaced."""
        self.remove([step])
        names = [file.name for file in (run / "checkpoints" / f"step-{step}").iterdir()]
        for name in sorted(names, key=STATE.__eq__):
            self.put(f"checkpoints/step-{step}/{name}", run)

    def get(self, name: str, folder: Path) -> None:
        """Fetch a file, or those of a checkpoint, into a folder; nothing if there are none."""
        for found in self.files.find(name):
            self.files.get_file(found, str(folder / os.path.basename(found)))

    def remove(self, steps: Collection[int]) -> None:
        """Remove checkpoints, what makes them complete first."""
        for step in steps:
            with suppress(FileNotFoundError):
                self.files.rm_file(f"checkpoints/step-{step}/{STATE}")
            with suppress(FileNotFoundError):
                self.files.rm(f"checkpoints/step-{step}", recursive=True)


class Copier:
    """Brings a copy up to date at every `wake`: the newest checkpoint first, those of `keep_every`, and `protected`
    ones; one that a newer one overtakes is left out. Then the copy keeps as many as the run folder. A failure is told,
    and the next `wake` tries again; it never reaches the run.
    """

    def __init__(self, run: Path, copy: Copy, keep: int, keep_every: int, protected: Callable[[], Collection[int]]):
        self.run, self.copy, self.keep, self.keep_every, self.protected = run, copy, keep, keep_every, protected
        self.in_use: frozenset[int] = frozenset()  # the step that is being copied; its checkpoint must stay
        self._thread = threading.Thread()

    def wake(self) -> None:
        """A checkpoint, or the mark of the best one, has been written; does not wait."""
        if not self._thread.is_alive():
            # A daemon: what is not copied when a run fails, or while a server hangs, is copied by the next start.
            self._thread = threading.Thread(target=self._bring_up_to_date, daemon=True, name="remote-copy")
            self._thread.start()

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` until the copy is up to date or has failed; never raises."""
        until = time.monotonic() + seconds
        if self._thread.is_alive():  # since before the last checkpoint, perhaps
            self._thread.join(seconds)
        self.wake()
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._say(f"not up to date after {seconds:.0f} s; --resume completes it")

    def _say(self, text: str) -> None:
        print(f"remote copy {self.copy}: {text}", flush=True)

    def _bring_up_to_date(self) -> None:
        try:
            there = set(self.copy.steps())
            while missing := [step for step in self._wanted() if step not in there]:
                self.in_use = frozenset(missing[:1])
                self.copy.put_step(missing[0], self.run)
                there.add(missing[0])
                self._say(f"step {missing[0]} is complete")
            for name in SMALL:
                if (self.run / name).exists():
                    self.copy.put(name, self.run)
            self.copy.remove(superfluous(there, there, self.keep, self.keep_every, self.protected()))
        except Exception as error:  # any, of any package
            self._say(f"failed ({self.copy.reason(error)}); the next checkpoint, or --resume, tries again")
        finally:
            self.in_use = frozenset()

    def _wanted(self) -> list[int]:
        here, kept = complete_steps(self.run), self.protected()
        return [s for s in here if s == here[0] or s in kept or (self.keep_every and s % self.keep_every == 0)]


def check_copy(copy: Copy, out: str | Path, step: int | None, tell: Callable[[str], object]) -> None:
    """Check that the copy is the run's that resumes from `step`, or is new (None).

    Raises UserError: it holds a run, or later steps of this one, or a new run cannot reach or write it.
    """
    if Path(copy.address.removeprefix("file://")).absolute() == Path(out).absolute():
        raise UserError(f"The remote copy {copy} is the run folder.", "Name another place.")
    try:
        there = copy.steps()
        copy.files.makedirs("", exist_ok=True)
        copy.files.touch(".writable")
        copy.files.rm_file(".writable")
    except Exception as error:  # any, of any package
        if step is None:
            raise copy.unusable(error) from None
        tell(f"{copy.unusable(error).what} The run tries again.")
        return
    if there and step is None:
        remedy = "Add --resume to continue it, or name another place."
        raise UserError(f"The remote copy {copy} already holds a run.", remedy)
    if there and there[0] > step:
        what = f"The remote copy {copy} has step {there[0]}, and the run would resume from step {step}."
        raise UserError(what, "Resume in an empty --out to continue from the copy, or name another place.")


def fetch_newest(copy: Copy, run: Path, tell: Callable[[str], object]) -> None:
    """Fetch the newest whole checkpoint of a copy, and the best one, into a run folder that has none.

    Of several ranks of a machine the first one fetches, and the others wait for it. Checkpoints get their names when
    everything is there, so a fetch that was killed is made again.

    Raises UserError: the copy cannot be read, all its checkpoints are damaged, or the folder cannot be written.
    """
    try:
        if complete_steps(run) or not (steps := copy.steps()):
            return
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        with open(run / "checkpoints" / ".fetching", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete_steps(run):
                _fetch(copy, run, steps, tell)
    except UserError:
        raise
    except Exception as error:  # any, of any package
        raise copy.unusable(error) from None


def _fetch(copy: Copy, run: Path, steps: list[int], tell: Callable[[str], object]) -> None:
    newest = next((step for step in steps if _fetch_step(copy, run, step, tell)), None)
    if newest is None:
        raise UserError(f"Every checkpoint in {copy} is damaged.", "Restore one, or start a new run elsewhere.")
    for name in SMALL:
        copy.get(name, run)
    best = read_best(run)
    older = [step for step in steps if best and step == best.step < newest and _fetch_step(copy, run, step, tell)]
    for step in (*older, newest):
        (run / "checkpoints" / f".step-{step}.fetched").rename(run / "checkpoints" / f"step-{step}")
        flush(run / "checkpoints")
    tell(f"fetched step {newest} from {copy}")


def _fetch_step(copy: Copy, run: Path, step: int, tell: Callable[[str], object]) -> bool:
    """Fetch a checkpoint under a hidden name; False if it is damaged."""
    folder = run / "checkpoints" / f".step-{step}.fetched"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        copy.get(f"checkpoints/step-{step}", folder)
        read_content(folder, verify=True)
    except Damaged as error:
        tell(f"{error.what} It is skipped.")
        shutil.rmtree(folder)
        return False
    for file in (*folder.iterdir(), folder):
        flush(file)
    return True
