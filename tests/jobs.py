"""A command in processes forked from this one, which has imported everything: a start costs a second.

The processes are real: own process group, own ranks that meet at a port, killed with real signals. What a fork does not
show is the launcher; tests of torchrun and accelerate start it.
"""

import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from probemb.cli.command import run_command


class Job:
    """A command on `ranks` ranks, begun at once; 0 is one process without a launcher.

    `options` are without their dashes. All ranks append to `output` (and stderr to `errors`). `prepare` is called with
    the rank in every process, before the command.
    """

    def __init__(
        self, main: Callable[[], int], options: dict, *words: str, ranks: int, output: Path,
        prepare=lambda rank: None, errors: Path | None = None,
    ):  # fmt: skip
        argv = ["command", *(f"--{name}={value}" for name, value in options.items()), *words]
        output.touch()
        self.output, self.before = output, output.stat().st_size
        port = meeting_port()
        sys.stdout.flush()
        self.pids: list[int] = []
        for rank in range(max(1, ranks)):
            pid = os.fork()
            if pid == 0:
                try:
                    os.setpgid(0, self.pids[0] if self.pids else 0)
                    _become(argv, rank, ranks, port, output, errors or output)
                    prepare(rank)
                    run_command(main)
                except SystemExit as ended:
                    _end(ended.code)
                except BaseException:
                    traceback.print_exc()
                    _end(1)
            self.pids.append(pid)
            with suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, self.pids[0])  # here as well: whoever comes first
        self.codes: dict[int, int] = {}

    def signal(self, number: int, rank: int | None = None) -> None:
        """To one rank, or to all of them and their data workers."""
        if rank is None:
            os.killpg(self.pids[0], number)
        else:
            os.kill(self.pids[rank], number)

    def poll(self) -> bool:
        """True once all ranks have ended."""
        for pid in self.pids:
            if pid not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.pids)

    def wait(self, seconds: float = 600) -> list[int]:
        """Exit codes in rank order, minus the signal's number where one ended a rank."""
        until = time.monotonic() + seconds
        while not self.poll():
            if time.monotonic() > until:
                self.kill()
                raise TimeoutError(self.text())
            time.sleep(0.01)
        return [self.codes[pid] for pid in self.pids]

    def kill(self) -> list[int]:
        """SIGKILL to everything, and wait for the end."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        for pid in self.pids:
            if pid not in self.codes:
                self.codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return [self.codes[pid] for pid in self.pids]

    def text(self) -> str:
        """The output of this job so far."""
        with open(self.output, "rb") as file:
            file.seek(self.before)
            return file.read().decode()

    def until(self, words: str, seconds: float = 600) -> None:
        """Wait until these words are in the output."""
        until = time.monotonic() + seconds
        while words not in self.text():
            if self.poll() or time.monotonic() > until:
                self.kill()
                raise AssertionError(f"'{words}' never came:\n{self.text()}")
            time.sleep(0.01)


def meeting_port() -> int:
    """A free port below those that the kernel hands out, which it may give to another process before the ranks meet."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _become(argv: list[str], rank: int, ranks: int, port: int, output: Path, errors: Path) -> None:
    for stream, place in ((1, output), (2, errors)):
        os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = argv
    torch.set_num_threads(1)
    if not ranks:
        return
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in {**places, "MASTER_PORT": port}.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def _end(code: int) -> None:
    """As the interpreter does: non-daemon threads finish first."""
    threading._shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refused(job: Job, *words: str) -> None:
    """Exit code 2 on every rank, two lines without a traceback from rank 0, with these words in them."""
    assert set(job.wait()) == {2}, job.text()
    text = job.text()
    assert "Traceback" not in text
    assert "error: " in text
    for word in words:
        assert word in text, text
