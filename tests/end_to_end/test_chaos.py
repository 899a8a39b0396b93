"""A run that is killed again and again, at any moment, ends as if nothing had happened."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.forked import OPTIONS, Job

RANKS, KILLS, STEPS, BATCH, SAMPLES = 2, 10, 60, OPTIONS["batch-size"], 64


def samples_of(run: Path) -> dict[int, list[str]]:
    """The keys of every step, over all ranks."""
    steps: dict[int, list[str]] = {}
    for path in sorted((run / "samples").glob("rank-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(line["step"], []).extend(line["keys"])
    return steps


def partials(run: Path) -> set[tuple[str, int]]:
    """Checkpoints that are being written, and those a killed write left behind."""
    found = set()
    for path in (run / "checkpoints").glob(".step-*.partial"):
        try:
            found.add((path.name, path.stat().st_ino))
        except FileNotFoundError:  # renamed meanwhile
            continue
    return found


def count_lines(path: Path) -> int:
    """Lines of a log, which begins with its first line."""
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def strike(job: Job, run: Path, chance: random.Random) -> None:
    """Kill it while it starts, after some steps, or inside a write of a checkpoint."""
    kind = chance.choice(["start", "steps", "write", "write"])
    if kind == "start":
        time.sleep(chance.uniform(0, 2))
    elif kind == "steps":
        job.until("\nrun  ")  # by then the log of samples has been cut to where the run goes on
        lines = run / "samples" / "rank-0.jsonl"
        goal = count_lines(lines) + chance.randint(1, 3)
        while count_lines(lines) < goal and not job.poll():
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
    else:
        seen, count = partials(run), chance.randint(1, 2)
        while not job.poll():
            new = partials(run) - seen
            count -= len(new)
            seen |= new
            if count <= 0:
                break
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.15))
    assert job.kill() == [-signal.SIGKILL] * RANKS, job.text()


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_kills_at_any_moment_change_nothing(stage, scenes, tmp_path):
    options = {**OPTIONS, "data.train": scenes / "train", "data.workers": 1, "samples": STEPS * BATCH}
    options |= {"optimizer.lr": 1e-3, "log-samples": "true", "engine.zero_stage": stage}
    whole, run = tmp_path / "whole", tmp_path / "killed"
    first = Job({**options, "out": whole, "save-every": 0}, ranks=RANKS, output=tmp_path / "whole.log")
    assert first.wait(600) == [0, 0], first.text()

    chance, cut_writes = random.Random(20), 0
    options = {**options, "out": run, "save-every": 1, "keep-checkpoints": 2}
    for kill in range(KILLS):
        strike(Job(options, "--resume", ranks=RANKS, output=tmp_path / f"{kill}.log"), run, chance)
        cut_writes += bool(partials(run))
    assert cut_writes >= 2  # the moments were what they are meant to be
    last = Job(options, "--resume", ranks=RANKS, output=tmp_path / "last.log")
    assert last.wait(600) == [0, 0], last.text()
    assert "resumed at step" in last.text()

    for file in ("weights.safetensors", "optimizer.safetensors", "random.safetensors"):
        expected, found = ((r / "checkpoints" / f"step-{STEPS}" / file).read_bytes() for r in (whole, run))
        assert expected == found, file
    for name, weight in load_file(whole / "model" / "model.safetensors").items():
        assert weight.equal(load_file(run / "model" / "model.safetensors")[name]), name

    seen = samples_of(run)
    assert seen == samples_of(whole)
    assert sorted(seen) == list(range(1, STEPS + 1))
    per_epoch = SAMPLES // BATCH
    for first in range(1, STEPS + 1, per_epoch):
        keys = [key for step in range(first, first + per_epoch) for key in seen[step]]
        assert len(keys) == len(set(keys)) == SAMPLES
    losses = [
        [(line["step"], line["loss"]) for line in map(json.loads, (r / "metrics.jsonl").read_text().splitlines())]
        for r in (whole, run)
    ]
    assert losses[1] == losses[0]
    hidden = [p.relative_to(run).as_posix() for p in run.rglob(".*")]
    assert sorted(hidden) == [".lock"]  # what the kills left half-written is gone
