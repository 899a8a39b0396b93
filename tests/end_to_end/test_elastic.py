"""A run that goes on with another number of ranks: the same samples at every step, the same losses up to rounding."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.test_chaos import samples_of
from tests.forked import Job

BATCH, STEPS, STOP = 16, 8, 3
SLOW = pytest.mark.slow


def run_job(ranks: int, log: Path, options: dict, *words: str) -> None:
    job = Job(options, *words, ranks=ranks, output=log)
    assert job.wait() == [0] * ranks, job.text()


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


@pytest.mark.parametrize(
    ("before", "after", "stages"),
    [(2, 1, (1, 0)), *(pytest.param(*case, marks=SLOW) for case in [(1, 2, (0, 3)), (4, 2, (3, 1))])],
)
def test_another_number_of_ranks_and_zero_stage_goes_on_alike(before, after, stages, scenes, tmp_path):
    options = {
        "data.train": scenes / "train",
        "data.workers": 0,
        "model.name": "ViT-Micro-32",
        "batch-size": BATCH,
        "samples": STEPS * BATCH,
        "optimizer.warmup_samples": 64,
        "log-every": 1,
        "engine.threads": 1,
        "log-samples": "true",
        "engine.zero-stage": stages[0],
    }
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_job(before, tmp_path / "1", {**options, "out": whole})
    run_job(before, tmp_path / "2", {**options, "out": run, "stop-at-step": STOP})
    run_job(after, tmp_path / "3", {**options, "out": run, "engine.zero-stage": stages[1]}, "--resume")
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)
    assert losses(run)[:STOP] == losses(whole)[:STOP]
    found, expected = samples_of(run), samples_of(whole)  # which rank had them depends on how many there were
    assert {step: sorted(keys) for step, keys in found.items()} == {s: sorted(keys) for s, keys in expected.items()}
    assert sorted(found) == list(range(1, STEPS + 1))
    assert all(len(set(keys)) == BATCH for keys in found.values())
