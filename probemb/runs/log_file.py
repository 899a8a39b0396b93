"""Log files that never decide what becomes of a run."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path


class Warnings:
    """Prints one warning, however many logs of a process cannot be written."""

    def __init__(self):
        self._told = False

    def tell(self, path: Path, error: Exception) -> None:
        if not self._told:
            self._told = True
            reason = getattr(error, "strerror", None) or error
            print(f"warning: {path} cannot be written ({reason}); the run continues.", file=sys.stderr, flush=True)


class LogFile:
    """A file to which whole records are appended.

    A record that cannot be written is dropped, never half of it, and later ones are tried again. Errors are told, not
    raised.
    """

    def __init__(self, path: Path, warnings: Warnings | None = None):
        self.path, self._warnings, self._file = path, warnings or Warnings(), -1

    def write(self, record: bytes) -> None:
        """Append a record."""
        try:
            if self._file < 0:
                self.path.parent.mkdir(exist_ok=True)
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            before = os.fstat(self._file).st_size
            written = os.write(self._file, record)
            if written < len(record):
                os.ftruncate(self._file, before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._warnings.tell(self.path, error)

    def close(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):  # a network's file system may report lost writes here
                os.close(self._file)
            self._file = -1
