"""The folder of an unfinished index; its complete files survive an interrupted build."""

import json
import shutil
from pathlib import Path

from probemb.errors import UserError
from probemb.files import flush, replace_text
from probemb.runs.lock import NAME as LOCK
from probemb.runs.lock import RunLock
from probemb.search.folder import ITEMS, UNCERTAINTY

PLAN, TRAINED = "plan.json", "trained.faiss"
WORDS = {"rows": "--part-items", "train_items": "--train-items", "embeddings": "the embeddings"}  # of keys of a plan


def read_plan(out: Path) -> dict:
    """The plan of an unfinished index; {} if there is none."""
    try:
        plan = json.loads((_folder(out) / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return plan if isinstance(plan, dict) else {}


def _folder(out: Path) -> Path:
    return out.parent / f".{out.name}.unfinished"


class Unfinished:
    """`.NAME.unfinished` beside the index NAME; one command at a time builds in it.

    Args:
        out: the folder of the finished index.
        plan: plain JSON; only a build of the same plan reuses complete files.

    Attributes:
        folder: the unfinished folder, in which each file is written atomically.

    Raises UserError: another command builds there, the complete files have another plan, the folder cannot be written.
    """

    def __init__(self, out: Path, plan: dict):
        self.out, self.folder, self.plan = out, _folder(out), plan
        self._lock: RunLock | None = None
        try:
            self._lock = RunLock(self.folder)
            self._begin()
        except OSError as error:
            if self._lock:
                self.leave()
            what = f"The index cannot be written to {out}: {error.strerror}."
            raise UserError(what, "Free some space, or name another folder with --out.") from error
        except UserError:
            if self._lock:
                self._lock.release()
            raise

    def _begin(self) -> None:
        if not self._lock.is_current():  # its holder has finished or removed the folder
            raise UserError(f"Another command that built {self.out} has just ended.", "Repeat this one.")
        before = read_plan(self.out)
        if before != self.plan:
            if self.parts() or (self.folder / TRAINED).exists():
                changed = ", ".join(WORDS.get(key, key) for key in self.plan if before.get(key) != self.plan[key])
                raise UserError(
                    f"{self.folder} holds the unfinished work of a command that differed in {changed}.",
                    "Repeat that command, which resumes, or remove the folder.",
                )
            self._clear(all_of_it=True)
            replace_text(self.folder / PLAN, json.dumps(self.plan, indent=1) + "\n")
        self._clear()

    def part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.faiss"

    def parts(self) -> int:
        """Number of complete parts at the start."""
        count = 0
        while self.part(count).exists():
            count += 1
        return count

    def finish(self, parts: int) -> None:
        """Turn the folder into the index of so many parts. Raises OSError, UserError."""
        if self.parts() != parts or not (self.folder / ITEMS).exists() or not (self.folder / UNCERTAINTY).exists():
            raise UserError(f"Files of {self.folder} were removed while it was written.", "Repeat the command.")
        if self.out.exists():
            what = f"{self.out} has appeared while the index was built."
            raise UserError(what, "Remove it and repeat the command, which resumes.")
        self.folder.rename(self.out)
        for name in (PLAN, TRAINED, LOCK):
            (self.out / name).unlink(missing_ok=True)
        flush(self.out.parent)
        self._lock.release()

    def leave(self) -> None:
        """Clean up after a failure: keep only files that a repeated command can use."""
        if not self.parts() and not (self.folder / TRAINED).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            self._clear()
        self._lock.release()

    def _clear(self, all_of_it: bool = False) -> None:
        """Remove partial files of a killed build, or everything."""
        whole = {LOCK} if all_of_it else {LOCK, PLAN, TRAINED, UNCERTAINTY, ITEMS}
        parts = set() if all_of_it else {self.part(number).name for number in range(self.parts())}
        for path in self.folder.iterdir():
            if path.name not in whole | parts:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
