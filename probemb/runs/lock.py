"""The lock of a run folder: rank 0 holds it for the life of the run, and it ends with the process."""

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from probemb.errors import UserError

NAME = ".lock"
PATIENCE = 2.0  # seconds in which a process that was just killed, or only checks, releases the lock
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # such a file system, like Lustre without -o flock


class RunLock:
    """The lock of a run folder, which is made if it is missing; the lock file names the host and process that hold it.

    It is flock's: it also holds between machines where the file system supports that (NFS does, Lustre with `-o
    flock`). Without locks, a warning is printed and the run continues. Raises UserError: another job holds it.
    """

    def __init__(self, run: Path):
        run.mkdir(parents=True, exist_ok=True)
        self._file = open(run / NAME, "a+", encoding="utf-8")  # noqa: SIM115  held open for the life of the run
        if not _take(self._file, fcntl.LOCK_EX, run):
            holder = _holder(self._file)
            self._file.close()
            raise _in_use(run, holder)
        self._file.truncate(0)
        self._file.write(f"{socket.gethostname()} {os.getpid()}\n")
        self._file.flush()

    def is_current(self) -> bool:
        """True if the lock is still the folder's; somebody may have removed or replaced the folder."""
        try:
            return os.path.samestat(os.stat(self._file.name), os.fstat(self._file.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # says nothing about the folder
            return True

    def release(self) -> None:
        self._file.close()


def refuse_locked(run: Path, minutes: float = 0.0, tell: Callable[[str], object] | None = None) -> None:
    """Refuse a folder that another job writes; writes nothing.

    Where Slurm has started this job again, the other one may be its earlier start, on a machine that Slurm has lost but
    that still runs. Its watchdog ends it; so this waits up to `minutes`, and says it through `tell`.

    Raises UserError, which names the host and process.
    """
    try:
        file = open(run / NAME, encoding="utf-8")  # noqa: SIM115
    except OSError:
        return
    with file:
        if _take(file, fcntl.LOCK_SH, run):
            return
        holder = _holder(file)
        if minutes and os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
            (tell or print)(
                f"{run} is in use: {holder} is writing it. If it is an earlier start of this job, on a machine that "
                f"was lost, it ends by itself; waiting up to {minutes:g} minutes (engine.timeout)"
            )
            if _take(file, fcntl.LOCK_SH, run, 60 * minutes):
                return
        raise _in_use(run, holder)


def _take(file, kind: int, run: Path, patience: float | None = None) -> bool:
    until = time.monotonic() + (PATIENCE if patience is None else patience)
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            print(
                f"warning: the file system of {run} has no locks; make sure that only one job writes it",
                file=sys.stderr,
            )
            return True


def _holder(file) -> str:
    file.seek(0)
    words = file.read(300).split()
    return f"process {words[1]} on {words[0]}" if len(words) == 2 else "another process"


def _in_use(run: Path, holder: str) -> UserError:
    return UserError(
        f"{run} is in use: {holder} is writing it.", "Wait until that job has ended, or choose another --out."
    )
