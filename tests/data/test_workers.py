"""Worker processes that cannot hand over what they have read: in a process of its own, as it would wait for ever."""

import os
import subprocess
import sys
from pathlib import Path

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
