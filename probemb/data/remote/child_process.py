"""Programs whose output is a shard: ended when they are silent for too long, and with the process that runs them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
from contextlib import suppress
from typing import BinaryIO

from probemb.data.remote.transfer import CHUNK, Failed, copy

# Our end of its standard input is closed by the kernel however we end, SIGKILL included; then a watcher beside the
# program ends the whole process group. The shell waits for both, as orphans stay zombies where nobody collects them (in
# most containers). Another command of ours does not inherit our end, and a forked worker ends soon after us.
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
    """Write what a program prints to `file`, at most `limit` bytes.

    It and all that it started are ended when nothing came for `timeout` seconds, and when this process ends. Raises
    Failed, TimeoutError.
    """
    file.seek(0)
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHED, "sh", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            start_new_session=True,
            bufsize=0,
        )
        ready = select.poll()
        ready.register(process.stdout, select.POLLIN)

        def read() -> bytes:
            if not ready.poll(timeout * 1000):
                raise TimeoutError
            return os.read(process.stdout.fileno(), CHUNK)

        try:
            copy(read, file, limit, timeout)
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            with suppress(ProcessLookupError):  # children of the program may be left even when it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            process.stdin.close()
        if process.returncode:
            words.seek(max(0, words.seek(0, os.SEEK_END) - 2000))
            said = words.read().decode(errors="replace").strip().splitlines()
            raise Failed(f"exit code {process.returncode}{': ' + said[-1] if said else ''}")
