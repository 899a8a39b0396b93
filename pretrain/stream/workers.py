"""Worker processes that prepare batches ahead, in memory shared with the training process.

Each worker owns the same rows of every batch. The memory holds a few batches and is an anonymous mapping that forked
workers inherit, as /dev/shm is small in containers. Errors and deaths of workers surface at once, and no worker
outlives its parent.
"""

import mmap
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

import torch

from pretrain.stream.open_shards import LOOK_UP_SECONDS
from probemb.data.workers import SIGNALS, describe_process
from probemb.errors import UserError

_LOOK_AROUND_SECONDS = 1.0  # between an idle worker's checks for its parent


def shared_tensors(*shapes_and_types: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    """Zeroed tensors in memory that processes forked from now on share."""
    offsets, size = [], 0
    for shape, dtype in shapes_and_types:
        offsets.append(size)
        size += -(-torch.Size(shape).numel() * dtype.itemsize // 64) * 64
    memory = mmap.mmap(-1, size)
    return [
        torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel(), offset=offset).view(shape)
        for (shape, dtype), offset in zip(shapes_and_types, offsets, strict=True)
    ]


class Team:
    """Workers that run jobs 0, 1, 2, …, each at most `ahead` jobs ahead of `release`.

    Args:
        jobs: for each worker a function of the job's number, with a picklable result.
        ahead: number of jobs that may be done or in progress before the first is released.
    """

    def __init__(self, jobs: list[Callable[[int], Any]], ahead: int):
        try:
            context = multiprocessing.get_context("fork")
        except ValueError:
            raise UserError("This system cannot fork data workers.", "Use 0 workers.") from None
        self._processes: list[multiprocessing.Process] = []
        self._connections: list[Connection] = []
        self._next = 0
        # Runs when the team is dropped or the interpreter ends, before multiprocessing waits for its children.
        self.close = Finalize(self, _end, args=(self._processes, self._connections), exitpriority=10)
        for number, job in enumerate(jobs):
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            process = context.Process(
                target=_work,
                args=(theirs, list(self._connections), os.getpid(), job, ahead),
                name=f"data-worker-{number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)

    def collect(self, while_waiting: Callable[[], None] | None = None) -> list[Any]:
        """Wait for the workers' results of the next job, in the workers' order.

        Args:
            while_waiting: called repeatedly meanwhile; its exceptions end the wait.

        Raises:
            UserError: a worker raised it, or was killed.
            RuntimeError: another exception in a worker, with its traceback.
        """
        results = []
        for process, connection in zip(self._processes, self._connections, strict=True):
            while not wait([connection, process.sentinel], LOOK_UP_SECONDS if while_waiting else None):
                while_waiting()
            try:
                if not connection.poll():
                    raise EOFError
                result, error = connection.recv()
            except (EOFError, OSError):  # OSError: killed in the middle of its message
                process.join(1)
                raise UserError(
                    f"{process.name} was ended from outside (exit code {process.exitcode}).",
                    "If memory ran out, use fewer workers or a smaller prefetch.",
                ) from None
            if isinstance(error, UserError):
                raise error
            if error is not None:
                raise RuntimeError(f"{process.name} failed:\n{error}")
            results.append(result)
        return results

    def late(self) -> list[tuple[int, str]]:
        """Workers whose next result is not there: their numbers, and "data-worker-0 (pid 7, stopped)"."""
        late = [i for i, connection in enumerate(self._connections) if not connection.poll()]
        return [(i, f"{self._processes[i].name} ({describe_process(self._processes[i].pid)})") for i in late]

    def release(self) -> None:
        """Allow the memory of the oldest job to be overwritten."""
        for connection in self._connections:
            with suppress(BrokenPipeError, ConnectionResetError):  # collect() reports a dead worker
                connection.send(None)


def _end(processes: list[multiprocessing.Process], connections: list[Connection]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for connection in connections:
        connection.close()


def _work(
    connection: Connection, parents_ends: list[Connection], parent: int, job: Callable[[int], Any], ahead: int
) -> None:
    # Ctrl-C and a scheduler's warnings reach the whole process group; the parent handles them.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for end in parents_ends:  # so that a write fails once the parent is gone
        end.close()
    torch.set_num_threads(1)
    done, allowed = 0, ahead
    try:
        while True:
            while done == allowed:
                if connection.poll(_LOOK_AROUND_SECONDS):
                    connection.recv()
                    allowed += 1
                elif os.getppid() != parent:
                    return
            connection.send((job(done), None))
            done += 1
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except BaseException as error:
        with suppress(OSError):  # the parent may be gone
            connection.send((None, error if isinstance(error, UserError) else traceback.format_exc()))
