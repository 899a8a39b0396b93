"""A long run holds what it held at its start: memory and open files of every process, over 20,000 steps."""

import json
import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

from probemb.models import architectures
from tests.forked import OPTIONS, Job

RANKS, BATCH, STEPS, WARM_UP, EVERY = 2, 4, 20_000, 2_000, 200
NANO = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 8, "head_width": 8, "layers": 1},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 8, "heads": 1, "layers": 1},
}


def held(pid: int) -> tuple[float, int]:
    """Resident MiB and open files of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd"))


def data_worker(pid: int) -> int:
    """The first child of a rank."""
    children = " ".join((task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir())
    return min(map(int, children.split()))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_and_open_files_stay(scenes, tmp_path, monkeypatch):
    nano = tmp_path / "ViT-Nano.json"
    nano.write_text(json.dumps(NANO))
    monkeypatch.setitem(architectures.OWN, "ViT-Nano", nano)  # of the processes forked from this one
    options = {**OPTIONS, "data.train": scenes / "train", "data.workers": 1, "samples": STEPS * BATCH}
    options |= {"model.name": "ViT-Nano", "model.n_unc_layers": 0, "batch-size": BATCH, "out": tmp_path / "run"}
    options |= {"evaluate.pairs": scenes / "val", "evaluate.every_samples": 1000 * BATCH}
    options |= {"log-every": EVERY, "save-every": 500}
    job = Job(options, ranks=RANKS, output=tmp_path / "log")
    job.until("\nrun  ")
    names = {pid: f"rank {rank}" for rank, pid in enumerate(job.pids)}
    names |= {data_worker(pid): f"worker of rank {rank}" for rank, pid in enumerate(job.pids)}
    curves, log, step = defaultdict(list), tmp_path / "run" / "metrics.jsonl", 0
    while not job.poll():
        time.sleep(0.2)
        with suppress(OSError, ValueError, IndexError):  # the run has not begun, writes a line, or has ended
            if (now := json.loads(log.read_bytes().splitlines()[-1])["step"]) >= step + EVERY:
                step, found = now, {name: held(pid) for pid, name in names.items()}
                for name, values in found.items():
                    curves[name].append((step, *values))
    assert set(job.wait()) == {0}, job.text()
    assert len(curves) == 2 * RANKS
    for name, curve in curves.items():
        _, memory, files = zip(*(row for row in curve if row[0] >= WARM_UP))
        assert max(memory) < 1.03 * memory[0], name
        quarter = len(files) // 4
        assert min(files[-quarter:]) == min(files[:quarter]), name  # evaluations and checkpoints hold some for a moment
