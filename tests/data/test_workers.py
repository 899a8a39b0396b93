"""Worker processes that cannot hand over what they have read: in a process of its own, as it would wait for ever."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from probemb.data.worker_stacks import of_workers
from probemb.data.workers import make_loader, read

SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
import torch
from probemb.data.workers import make_loader, read
from probemb.cli.command import run_command

class Rows:
    def __len__(self):
        return 24

    def __getitem__(self, row):
        if {what} == "kill" and row == 12:
            time.sleep(1)
            os.kill(os.getpid(), 9)
        return {{"row": Stubborn() if {what} == "stubborn" and row == 12 else row, "pixels": torch.ones(row)}}

class Stubborn:
    def __reduce__(self):
        time.sleep(1)  # those before it have arrived
        raise OSError(24, "Too many open files")

def main():
    total = 0
    for rows in read(make_loader(Rows(), 2, batch_size=4, collate_fn=list)):
        total += sum(row["row"] for row in rows)
        if {what} == "kill":
            time.sleep(1)  # in the midst of another's work
    print(total)

run_command(main)
"""


def run(temporary, what):
    temporary.mkdir()
    script = SCRIPT.format(root=str(Path(__file__).parents[2]), what=repr(what))
    environment = {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)


def test_a_worker_that_cannot_hand_over_a_batch_is_told(tmp_path):
    what = "stubborn"
    done = run(tmp_path / "t", what)
    assert done.returncode == 2, done.stderr
    *before, what_is_wrong, _ = done.stderr.splitlines()
    assert what_is_wrong.startswith("error: A data worker was ended from outside (")
    lost = ["A data worker cannot hand over a batch: OSError: [Errno 24] Too many open files"]
    assert before == (lost if what == "stubborn" else [])


class Waiting:
    """Rows of which the second worker's first one waits for an event."""

    def __init__(self):
        self.event = multiprocessing.get_context("fork").Event()

    def __len__(self):
        return 8

    def __getitem__(self, row):
        if row == 4:
            self.wait_for_the_event()
        return row

    def wait_for_the_event(self):
        self.event.wait()


def test_a_waiting_worker_tells_where_it_is_and_a_stopped_one_does_not_answer():
    rows = Waiting()
    batches = read(make_loader(rows, 2, batch_size=4, multiprocessing_context="fork"))
    assert next(batches).tolist() == [0, 1, 2, 3]
    idle, waiting = sorted(worker.pid for worker in multiprocessing.active_children())
    try:
        until = time.monotonic() + 60
        while "in wait_for_the_event" not in stacks_by_worker()[waiting]:
            assert time.monotonic() < until
        os.kill(idle, signal.SIGSTOP)
        assert stacks_by_worker()[idle] == "no answer"
        os.kill(idle, signal.SIGCONT)
        while "in _worker_loop" not in (said := stacks_by_worker()[idle]):
            assert time.monotonic() < until
        assert "in wait_for_the_event" not in said
    finally:
        os.kill(idle, signal.SIGCONT)
        rows.event.set()
    assert next(batches).tolist() == [4, 5, 6, 7]
    batches.close()


def stacks_by_worker():
    parts = re.split(r"^\S+ \(pid (\d+)\):\n", of_workers(), flags=re.M)[1:]
    return {int(pid): text.strip() for pid, text in zip(parts[::2], parts[1::2])}
