"""The folder of an unfinished index; its complete files survive an interrupted build.

.NAME.unfinished/plan.json               what is built; commands of another plan are refused
.NAME.unfinished/trained.faiss           the trained, empty index
.NAME.unfinished/part-00000.faiss …      complete parts, in any order
.NAME.unfinished/share-3-of-16/          partial files of the third of sixteen processes, while it runs
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from probemb.errors import UserError
from probemb.files import flush, replace_file, replace_text
from probemb.runs.lock import NAME as LOCK
from probemb.runs.lock import RunLock
from probemb.search.folder import ITEMS, UNCERTAINTY

PLAN, TRAINED, TRAINING = "plan.json", "trained.faiss", "training"
WORDS = {"rows": "--part-items", "train_items": "--train-items", "embeddings": "the embeddings"}  # of keys of a plan
NOTES = ("why", "shares")  # keys of a plan in which commands may differ
STARTS = 20  # attempts to begin beside other processes


@dataclass(frozen=True)
class Share:
    """The `number`-th, from 1, of `of` processes that build an index at the same time; number 0 trains it only."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def read_plan(out: Path) -> dict:
    """The plan of an unfinished index; {} if there is none."""
    try:
        plan = json.loads((_folder(out) / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    numbers = [plan.get(name) for name in ("count", "rows", "train_items")] if isinstance(plan, dict) else [""]
    return plan if all(number is None or type(number) is int for number in numbers) else {}


def _folder(out: Path) -> Path:
    return out.parent / f".{out.name}.unfinished"


def complete_files(out: Path, share: Share | None = None) -> list[str]:
    """Names of the complete files of an unfinished index that `share` needs or builds; with None, of all."""
    folder = _folder(out)
    numbers = sorted(_numbers(folder))
    if share and share.number:
        numbers = [number for number in numbers if number % share.of == share.number - 1]
    names = [TRAINED, *(f"part-{number:05d}.faiss" for number in numbers)]
    return [name for name in names if (folder / name).exists()]


def _numbers(folder: Path) -> set[int]:
    names = [re.fullmatch(r"part-(\d{5,9})\.faiss", path.name) for path in folder.glob("part-*.faiss")]
    return {int(name[1]) for name in names if name}


class Unfinished:
    """`.NAME.unfinished` beside the index NAME: one command builds in it alone, or several each build their share.

    Args:
        out: the folder of the finished index.
        plan: plain JSON; only a build of the same plan reuses complete files.
        share: of this process; None if it builds alone.

    Attributes:
        folder: the unfinished folder, in which each file is written atomically.

    Raises UserError: another command builds there, the complete files have another plan, the folder cannot be written.
    """

    def __init__(self, out: Path, plan: dict, share: Share | None = None):
        self.out, self.folder, self.plan, self.share = out, _folder(out), plan, share
        self._work = self.folder / f"share-{share.number}-of-{share.of}" if share else self.folder
        self._locks: list[RunLock] = []
        self._began = not read_plan(out)
        try:
            if share:
                self._begin_beside_others()
            else:
                self._begin_alone()
        except OSError as error:
            self.leave()
            what = f"The index cannot be written to {out}: {error.strerror}."
            raise UserError(what, "Free some space, or name another folder with --out.") from error
        except UserError:
            self._release()
            raise

    def _begin_alone(self) -> None:
        self._lock(self.folder)
        before = read_plan(self.out)
        if _essence(before) != _essence(self.plan):
            if self.built() or (self.folder / TRAINED).exists():
                self._refuse(before)
            self._clear(all_of_it=True)
            replace_text(self.folder / PLAN, json.dumps(self.plan, indent=1) + "\n")
        self._clear()

    def _begin_beside_others(self) -> None:
        """Hold the folder together with other processes; the first one writes the plan, for which it is alone."""
        for left in reversed(range(STARTS)):
            before = read_plan(self.out)
            try:
                if not before:
                    self._begin_alone()
                    self._release()
                self._lock(self.folder, shared=True)
                break
            except UserError:  # another one is about to write the plan
                self._release()
                if before or not left:
                    raise
        before = read_plan(self.out)
        if _essence(before) != _essence(self.plan):
            self._refuse(before)
        self._lock(self._work)
        for path in self._work.iterdir():  # of a killed process
            if path.name != LOCK:
                path.unlink()

    def _lock(self, folder: Path, shared: bool = False) -> None:
        lock = RunLock(folder, shared)
        self._locks.append(lock)
        if not lock.is_current():  # its holder has finished or removed the folder
            raise UserError(f"Another command that built {self.out} has just ended.", "Repeat this one.")

    def _release(self) -> None:
        while self._locks:
            self._locks.pop().release()

    def _refuse(self, before: dict) -> None:
        changed = [key for key in _essence(self.plan) if before.get(key) != self.plan[key]]
        if changed == ["embeddings"]:
            raise UserError(
                f"The embeddings have changed since {self.folder} was started.",
                "Remove that folder, and build the index again.",
            )
        raise UserError(
            f"{self.folder} holds the unfinished work of a command that differed in "
            f"{', '.join(WORDS.get(key, key) for key in changed)}.",
            "Repeat that command, which resumes, or remove the folder.",
        )

    def _removed(self) -> UserError:
        return UserError(f"Files of {self.folder} were removed while it was written.", "Repeat the command.")

    def part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.faiss"

    def built(self) -> set[int]:
        """Numbers of the complete parts."""
        return _numbers(self.folder)

    def keep(self, path: Path, write: Callable[[Path], object], first: bool = False) -> None:
        """Let `write` fill a complete file of the folder. If it is to be the `first`, one that is there stays.

        Raises OSError, UserError.
        """
        if not (self.folder / PLAN).exists():
            raise self._removed()
        if not self.share:
            replace_file(path, write)
            return
        aside = self._work / path.name
        replace_file(aside, write)
        if first:  # decided by the file system, which may have no locks
            try:
                os.link(aside, path)
            except FileExistsError:
                pass
            except OSError:  # it has no hard links either
                aside.replace(path)
            aside.unlink(missing_ok=True)
        else:
            aside.replace(path)
        flush(self.folder)

    @contextmanager
    def training(self, say: Callable[[str], object]) -> Iterator[None]:
        """One process at a time; the others wait."""
        if not self.share:
            yield
            return
        lock = None
        while lock is None:
            try:
                lock = RunLock(self.folder / TRAINING)
            except UserError as error:
                if say:
                    say(f"waiting for another process to train the index: {error.what}")
                say = None
        try:
            yield
        finally:
            lock.release()

    def require(self, parts: int) -> None:
        """Refuse to finish without all parts. Raises UserError, which names the missing ones."""
        missing = sorted(set(range(parts)) - self.built())
        if not missing:
            return
        files = ", ".join(self.part(number).name for number in missing[:5]) + (", …" if len(missing) > 5 else "")
        shares = read_plan(self.out).get("shares")
        remedy = "Repeat the command without --merge, which builds the rest."
        if type(shares) is int and shares > 1:
            told = [f"--part {Share(number % shares + 1, shares)}" for number in missing]
            told = list(dict.fromkeys(told))
            more = ", …" if len(told) > 5 else ""
            remedy = f"Repeat it with {', '.join(told[:5])}{more}, or without --merge, which builds them here."
        raise UserError(f"{len(missing):,} of the {parts:,} parts of {self.out} are missing: {files}.", remedy)

    def finish(self, parts: int) -> None:
        """Turn the folder into the index of so many parts. Raises OSError, UserError."""
        complete = self.built() == set(range(parts))
        if not complete or not (self.folder / ITEMS).exists() or not (self.folder / UNCERTAINTY).exists():
            raise self._removed()
        if self.out.exists():
            what = f"{self.out} has appeared while the index was built."
            raise UserError(what, "Remove it and repeat the command, which resumes.")
        self.folder.rename(self.out)
        for name in (PLAN, TRAINED, LOCK):
            (self.out / name).unlink(missing_ok=True)
        flush(self.out.parent)
        self._release()

    def end_share(self) -> None:
        """Leave the files of this share to the command that finishes the index."""
        shutil.rmtree(self._work, ignore_errors=True)
        self._release()

    def leave(self) -> None:
        """Clean up after a failure: keep only files that a repeated command, or another process, can use."""
        if self.share:
            self.end_share()
            with suppress(UserError, OSError):  # others build
                if self._began:
                    self._lock(self.folder)
        if not self._locks:
            return
        if not read_plan(self.out) or (not self.built() and not (self.folder / TRAINED).exists()):
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            self._clear()
        self._release()

    def _clear(self, all_of_it: bool = False) -> None:
        """Remove partial files of a killed build, or everything."""
        whole = {LOCK} if all_of_it else {LOCK, PLAN, TRAINED, UNCERTAINTY, ITEMS}
        parts = set() if all_of_it else {self.part(number).name for number in self.built()}
        for path in self.folder.iterdir():
            if path.name not in whole | parts:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _essence(plan: dict) -> dict:
    """The settings that all commands building one index must agree on."""
    return {key: value for key, value in plan.items() if key not in NOTES}
