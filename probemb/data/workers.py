"""Worker processes that read for a DataLoader; none of what goes wrong with them is waited for in vain."""

from __future__ import annotations

import multiprocessing.util
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING

from probemb.errors import UserError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_LONGEST = 71  # bytes of a folder in which a socket's whole path, /pymp-xxxxxxxx/listener-xxxxxxxx with it, fits


def make_loader(dataset, workers: int, begin: Callable[[], None] | None = None, **options) -> DataLoader:
    """A DataLoader with so many processes, each of which calls `begin` first; `options` are DataLoader's own.

    Read it within `naming_ended_workers`. Raises UserError: the processes could not hand anything over.
    """
    from torch.utils.data import DataLoader

    if workers:
        shorten_sockets()
    return DataLoader(dataset, num_workers=workers, worker_init_fn=partial(_begin, begin), **options)


@contextmanager
def naming_ended_workers() -> Iterator[None]:
    """Raises UserError in place of what a DataLoader raises when one of its processes has ended."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        if "Caught " in str(error):  # raised in a worker, by what it reads
            raise
        raise _ended("in the middle of a batch") from error
    except RuntimeError as error:
        if told := ended_worker(error):
            raise told from error
        raise


def ended_worker(error: RuntimeError) -> UserError | None:
    """What to say if PyTorch tells by this error, which its signal handler may raise anywhere, that a worker ended."""
    said = " ".join(str(error).split())
    return _ended(said[:200].rstrip(".")) if said.startswith("DataLoader worker (pid") else None


def _ended(how: str) -> UserError:
    return UserError(
        f"A data worker was ended from outside ({how}).",
        "If memory ran out, use fewer workers or a smaller batch; if /dev/shm is full, enlarge it.",
    )


def shorten_sockets() -> None:
    """Let the sockets between processes lie in a short folder if TMPDIR's name is too long for them.

    A socket's path has at most 107 bytes (103 on macOS). Python 3.14 does the same by itself. Raises UserError.
    """
    wanted = tempfile.gettempdir()
    if len(os.fsencode(wanted)) <= _LONGEST:
        return
    for short in ("/tmp", "/var/tmp"):
        tempfile.tempdir = short
        try:
            multiprocessing.util.get_temp_dir()  # made at the first call, inherited by children, removed at the end
            return
        except OSError:
            continue
        finally:
            tempfile.tempdir = wanted
    raise UserError(
        f"The name of the folder for temporary files, {wanted}, is too long for sockets between processes.",
        "Set TMPDIR to a shorter one, or use 0 workers.",
    )


def _begin(begin: Callable[[], None] | None, _: int) -> None:
    Queue._on_queue_feeder_error = staticmethod(_end_worker)
    if begin:
        begin()


def _end_worker(error: BaseException, _batch: object) -> None:
    """A batch that cannot be handed over would otherwise be dropped, and waited for for ever."""
    os.write(2, f"A data worker cannot hand over a batch: {type(error).__name__}: {error}\n".encode())
    os._exit(1)
