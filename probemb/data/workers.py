"""Worker processes of a DataLoader, with all that is private of torch and multiprocessing; failures do not hang."""

import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.queues import Queue
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probemb.errors import ended_worker, worker_ended

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LOOK_UP_SECONDS = 0.5  # how often a process that waits for data looks at what else there is
_LONGEST = 71  # bytes of a folder that leave room for a socket's /pymp-xxxxxxxx/listener-xxxxxxxx


def make_loader(dataset, workers: int, **options) -> "DataLoader":
    """A DataLoader with so many processes; `options` are DataLoader's own. Iterate over it with `read`."""
    from torch.utils.data import DataLoader

    if workers:
        shorten_sockets()
    return DataLoader(dataset, num_workers=workers, worker_init_fn=_begin, **options)


def start_workers(loader: "DataLoader", owner: object = None) -> Iterator:
    """The loader's iterator, for `next_batch`; its `end()` kills the workers, as does the owner's end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # they would kill a worker that does not ignore them
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if not hasattr(batches, "end"):  # persistent workers have it; called before multiprocessing joins its children
        batches.end = Finalize(owner, _kill, args=(batches,), exitpriority=10)
    return batches


def read(loader: "DataLoader") -> Iterator:
    """All batches, once; the workers end with the iteration. Raises UserError."""
    batches = start_workers(loader)
    try:
        while True:
            yield next_batch(batches)
    except StopIteration:
        return
    finally:
        batches.end()


def next_batch(batches: Iterator, while_waiting: Callable[[], object] | None = None) -> Any:
    """The next item; `while_waiting` is called at each `timeout` of the loader. Raises StopIteration, UserError."""
    while True:
        try:
            return next(batches)
        except (EOFError, ConnectionError) as error:
            if not getattr(batches, "_num_workers", 0) or "Caught " in str(error):  # raised by the dataset
                raise
            raise worker_ended("in the middle of a batch") from error
        except RuntimeError as error:
            if ended := ended_worker(error):
                raise ended from error
            if not while_waiting or not str(error).startswith("DataLoader timed out"):
                raise
        while_waiting()


def _kill(batches: Iterator) -> None:
    """Kill the workers of a DataLoader's iterator, any of which may wait for a disk or a server for minutes."""
    from torch.utils.data._utils.signal_handling import _remove_worker_pids

    if getattr(batches, "_worker_pids_set", False):
        _remove_worker_pids(id(batches))  # their end is no error
        batches._worker_pids_set = False
        for worker in batches._workers:
            worker.kill()
        batches._shutdown_workers()


def shorten_sockets() -> None:
    """Use /tmp for the sockets between processes if TMPDIR's name is too long; their paths have at most 107 bytes."""
    wanted = tempfile.gettempdir()
    if len(os.fsencode(wanted)) > _LONGEST:
        try:
            tempfile.tempdir = "/tmp"
            multiprocessing.util.get_temp_dir()  # made at the first call; children inherit it
        finally:
            tempfile.tempdir = wanted


def name_workers(batches: Iterator) -> list[str]:
    """ "data-worker-0 (pid 7, stopped)" for each worker, with what keeps it from running, as Linux knows it."""
    states = {"T": ", stopped", "t": ", stopped", "D": ", waiting for a disk", "Z": ", ended"}
    names = []
    for i, worker in enumerate(getattr(batches, "_workers", ())):
        state = ""
        with suppress(OSError):
            state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]
        names.append(f"data-worker-{i} (pid {worker.pid}{states.get(state, '')})")
    return names


def _begin(_: int) -> None:
    # Ctrl-C and a scheduler's warnings reach the whole process group; the parent handles them.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    Queue._on_queue_feeder_error = staticmethod(_end_worker)
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True, name="parent").start()


def _end_after(parent: int) -> None:
    """End the worker once its parent was killed: it would wait forever for somebody to read its batches."""
    while os.getppid() == parent:
        time.sleep(2)
    os._exit(1)


def _end_worker(error: BaseException, _batch: object) -> None:
    """End the worker: a batch that cannot be sent would be dropped, and the parent would wait indefinitely."""
    os.write(2, f"A data worker cannot hand over a batch: {type(error).__name__}: {error}\n".encode())
    os._exit(1)
