"""The folder in which an index grows: what is complete in it outlives an interrupted build."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from probemb.errors import UserError
from probemb.files import replace_text
from probemb.runs.lock import NAME as LOCK
from probemb.runs.lock import RunLock
from probemb.search.folder import ITEMS, UNCERTAINTY

PLAN, TRAINED = "plan.json", "trained.faiss"


class Unfinished:
    """`.NAME.unfinished` beside the index NAME; one command at a time builds in it.

    Args:
        out: where the index will be.
        plan: plain JSON; what is complete is of use to a build of the same plan alone.

    Attributes:
        folder: where to write: files that appear as a whole.

    Raises:
        UserError: another command builds there, parts of another plan are complete, the folder cannot be written.
    """

    def __init__(self, out: Path, plan: dict):
        self.out, self.folder = out, out.parent / f".{out.name}.unfinished"
        try:
            self._lock = RunLock(self.folder)
            if self._read_plan() != plan:
                if parts := self.parts():
                    raise UserError(
                        f"{self.folder} holds {parts:,} finished part{'s' * (parts > 1)} of an index with other "
                        "settings or of other embeddings.",
                        "Repeat that command, which goes on, or remove the folder.",
                    )
                self._clear(all_of_it=True)
                replace_text(self.folder / PLAN, json.dumps(plan, indent=1) + "\n")
            self._clear()
        except OSError as error:
            raise UserError(
                f"The index cannot be written to {out}: {error.strerror}.", "Name another --out."
            ) from error

    def part(self, number: int) -> Path:
        """The file of a part."""
        return self.folder / f"part-{number:05d}.faiss"

    def parts(self) -> int:
        """How many parts are complete: the first ones."""
        count = 0
        while self.part(count).exists():
            count += 1
        return count

    def finish(self) -> None:
        """Make it the index. Raises OSError."""
        for name in (PLAN, TRAINED, LOCK):
            (self.folder / name).unlink(missing_ok=True)
        self.folder.rename(self.out)
        self._lock.release()

    def leave(self) -> None:
        """After a failure: nothing stays that would not spare work."""
        if not self.parts() and not (self.folder / TRAINED).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            self._clear()
        self._lock.release()

    def _read_plan(self) -> object:
        try:
            return json.loads((self.folder / PLAN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _clear(self, all_of_it: bool = False) -> None:
        """Remove what was being written when a build was killed, or everything."""
        whole = {LOCK} if all_of_it else {LOCK, PLAN, TRAINED, UNCERTAINTY, ITEMS}
        parts = set() if all_of_it else {self.part(number).name for number in range(self.parts())}
        for path in self.folder.iterdir():
            if path.name not in whole | parts:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
