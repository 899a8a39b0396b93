"""A run that goes on with other ranks and ZeRO stages: the same samples in every step, losses alike up to rounding."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.test_chaos import samples_of
from tests.forked import OPTIONS, Job

BATCH, STEPS, STOP = OPTIONS["batch-size"], 8, 3
SLOW = pytest.mark.slow


def run_job(ranks: int, log: Path, options: dict, *words: str) -> None:
    job = Job(options, *words, ranks=ranks, output=log)
    assert job.wait() == [0] * ranks, job.text()


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


@pytest.mark.parametrize(
    "legs",
    [((1, 0), (2, 1), (1, 0)), *(pytest.param(case, marks=SLOW) for case in [((1, 2), (2, 3)), ((4, 3), (2, 0))])],
)
def test_other_numbers_of_ranks_and_zero_stages_go_on_alike(legs, scenes, tmp_path):
    options = {**OPTIONS, "data.train": scenes / "train", "samples": STEPS * BATCH, "log-samples": "true"}
    whole, run = tmp_path / "whole", tmp_path / "run"
    ranks, stage = legs[0]
    run_job(ranks, tmp_path / "log", {**options, "out": whole, "engine.zero-stage": stage})
    for leg, (ranks, stage) in enumerate(legs, 1):
        stop = {"stop-at-step": leg * STOP} if leg < len(legs) else {}
        given = {**options, **stop, "out": run, "engine.zero-stage": stage}
        run_job(ranks, tmp_path / str(leg), given, "--resume")
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)
    assert losses(run)[:STOP] == losses(whole)[:STOP]
    found, expected = samples_of(run), samples_of(whole)  # which rank had them depends on how many there were
    assert {step: sorted(keys) for step, keys in found.items()} == {s: sorted(keys) for s, keys in expected.items()}
    assert sorted(found) == list(range(1, STEPS + 1))
    assert all(len(set(keys)) == BATCH for keys in found.values())
