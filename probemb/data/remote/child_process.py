"""Programs that print a shard; killed when they are silent for too long, and together with their parent."""

import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from probemb.data.remote.transfer import CHUNK, TransferFailed, copy

# When this process ends, even by SIGKILL, the kernel closes the program's standard input; then a watcher kills the
# whole process group. The shell waits for both, because orphans stay zombies where nothing reaps them (in most
# containers). Other commands do not inherit this end of the pipe, and forked workers end soon after their parent.
_WATCHED = """
exec 3<&0 </dev/null
(exec >/dev/null 2>&1; read -r _ <&3; kill -KILL 0) &
"$@" 3<&-
code=$?
exec 2>/dev/null
kill -KILL $!
wait $!
exit $code
"""


def read_output(argv: list[str], file: BinaryIO, limit: int, timeout: float) -> None:
    """Write the output of a program to `file`, at most `limit` bytes; as `run_program`."""
    file.seek(0)
    run_program(argv, lambda read: copy(read, file, limit, timeout), timeout)


def run_program(argv: list[str], take: Callable[[Callable[[], bytes]], None], timeout: float) -> None:
    """Run a program; `take` gets a function that reads its output, and returns nothing at the end.

    The program and its children are killed after `timeout` seconds without output, and when this process ends. Raises
    TransferFailed, TimeoutError.
    """
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHED, "sh", *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words,
            start_new_session=True, bufsize=0,
        )  # fmt: skip
        ready = select.poll()
        ready.register(process.stdout, select.POLLIN)

        def read() -> bytes:
            if not ready.poll(timeout * 1000):
                raise TimeoutError
            return os.read(process.stdout.fileno(), CHUNK)

        try:
            take(read)
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            with suppress(ProcessLookupError):  # the program's children may outlive it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            process.stdin.close()
        if process.returncode:
            words.seek(max(0, words.seek(0, os.SEEK_END) - 2000))
            said = words.read().decode(errors="replace").strip().splitlines()
            raise TransferFailed(f"exit code {process.returncode}{': ' + said[-1] if said else ''}")
