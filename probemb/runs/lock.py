"""One job at a time, and none that starts forever: the lock of a run folder, new folders, and a limit on starts without
progress.
"""

import errno
import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from probemb.errors import UserError
from probemb.files import flush, replace_text

NAME = ".lock"
PATIENCE = 2.0  # seconds in which a process that was just killed, or only checks, releases the lock
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # such a file system, like Lustre without -o flock
MAX_STARTS = 3


class RunLock:
    """The lock of a run folder, which is made if it is missing; it names the host and process that hold it. It is
    flock's, so machines share it where the file system does (NFS, Lustre with `-o flock`); elsewhere a warning is
    printed. Raises UserError: another job holds it.
    """

    def __init__(self, run: Path):
        run.mkdir(parents=True, exist_ok=True)
        self._file = open(run / NAME, "a+", encoding="utf-8")  # noqa: SIM115  held open for the life of the run
        _take(self._file, fcntl.LOCK_EX, run)
        self._file.truncate(0)
        self._file.write(f"{socket.gethostname()} {os.getpid()}\n")
        self._file.flush()

    def is_current(self) -> bool:
        """True if the lock is still the folder's; somebody may have removed or replaced the folder."""
        try:
            return os.path.samestat(os.stat(self._file.name), os.fstat(self._file.fileno()))
        except OSError as error:  # others say nothing about the folder
            return not isinstance(error, (FileNotFoundError, NotADirectoryError))

    def close(self) -> None:
        self._file.close()


def refuse_locked(run: Path, minutes: float = 0.0, tell: Callable[[str], object] = print) -> None:
    """Raise UserError if another job writes the folder; writes nothing.

    Where Slurm has started this job again, the other one may be its earlier start, on a machine that Slurm has lost but
    that still runs. Its watchdog ends it; so this waits up to `minutes`, and says it through `tell`.
    """
    with suppress(FileNotFoundError, NotADirectoryError), open(run / NAME, encoding="utf-8") as file:
        _take(file, fcntl.LOCK_SH, run, minutes if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else 0.0, tell)


def _take(file, kind: int, run: Path, minutes: float = 0.0, tell: Callable[[str], object] = print) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                file.seek(0)
                words = file.read(300).split()
                holder = f"process {words[1]} on {words[0]}" if len(words) == 2 else "another process"
                used = f"{run} is in use: {holder} is writing it."
                if not minutes:
                    raise UserError(used, "Wait until that job has ended, or choose another --out.") from None
                tell(
                    f"{used} If it is an earlier start of this job, on a machine that was lost, it ends by itself; "
                    f"waiting up to {minutes:g} minutes (engine.timeout)"
                )
                until, minutes = time.monotonic() + 60 * minutes, 0.0
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            without = f"warning: the file system of {run} has no locks; make sure that only one job writes it"
            return print(without, file=sys.stderr)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` at the end; makes missing folders. What a killed process left is removed.

    Raises UserError: another job makes it; OSError, also if `path` is a folder with something in it. There is no new
    folder then.
    """
    aside = path.parent / f".{path.name}.unfinished"
    with closing(RunLock(aside)):
        folder = aside / "folder"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield folder
            folder.rename(path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    flush(path.parent)


def count_start(file: Path, first: int, now: int) -> int:
    """Starts in a row, this one included, that ended where they had begun; kept in `file`, "POSITION COUNT", whose
    errors do not decide anything. After `MAX_STARTS` the count begins again.
    """
    count = 0
    if now == first:
        with suppress(OSError, ValueError):
            at, before = map(int, file.read_text().split())
            count = before if at == now else 0
        count += 1
    with suppress(OSError):
        if 0 < count < MAX_STARTS:
            replace_text(file, f"{now} {count}\n")
        else:
            file.unlink(missing_ok=True)
    return count
