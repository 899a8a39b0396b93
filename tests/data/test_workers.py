"""Data workers end with the process that reads them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

READER = """
import time
from probemb.data.workers import make_loader, start_workers
batches = start_workers(make_loader(["x" * 200_000] * 64, 2, batch_size=None, prefetch_factor=8))
next(batches)
print(*(worker.pid for worker in batches._workers), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_workers_end_after_their_reader_was_killed():
    """Their batches fill a pipe that nobody reads any more."""
    reader = subprocess.Popen([sys.executable, "-c", READER], stdout=subprocess.PIPE, text=True)
    workers = [Path(f"/proc/{pid}") for pid in reader.stdout.readline().split()]
    time.sleep(2)  # until the pipe is full
    reader.kill()
    reader.wait()
    limit = time.monotonic() + 30
    while any(worker.exists() for worker in workers) and time.monotonic() < limit:
        time.sleep(0.2)
    left = [worker.name for worker in workers if worker.exists()]
    for pid in left:
        os.kill(int(pid), 9)
    assert not left
