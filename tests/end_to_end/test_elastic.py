"""A run that goes on with another number of ranks: the same samples at every step, the same losses up to rounding."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from probemb import load_model
from tests.forked import Job
from tools.make_scenes import Plan, make

BATCH, STEPS, STOP = 16, 8, 3
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    out = tmp_path_factory.mktemp("scenes") / "world"
    make(Plan(train=64, val=16, classes_images=24, size=32, shard_size=32), out, workers=1)
    return out


def run_job(ranks: int, log: Path, options: dict, *words: str) -> None:
    job = Job(options, *words, ranks=ranks, output=log)
    assert job.wait() == [0] * ranks, job.text()


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


def keys(run: Path) -> dict[int, list[str]]:
    """The samples of every step over all ranks; which rank had them depends on how many there were."""
    steps: dict[int, list[str]] = {}
    for path in (run / "samples").glob("rank-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(line["step"], []).extend(line["keys"])
    return {step: sorted(found) for step, found in sorted(steps.items())}


def everywhere(world: Path) -> dict:
    """Options of every run."""
    return {
        "data.train": world / "train",
        "data.workers": 0,
        "model.name": "ViT-Micro-32",
        "batch-size": BATCH,
        "samples": STEPS * BATCH,
        "optimizer.warmup_samples": 64,
        "log-every": 1,
        "engine.threads": 1,
    }


@pytest.mark.parametrize(
    ("before", "after", "stages"),
    [(2, 1, (1, 0)), *(pytest.param(*case, marks=SLOW) for case in [(1, 2, (0, 3)), (2, 4, (2, 2)), (4, 2, (3, 1))])],
)
def test_another_number_of_ranks_and_zero_stage_goes_on_alike(before, after, stages, world, tmp_path):
    options = {
        **everywhere(world),
        "log-samples": "true",
        "engine.zero-stage": stages[0],
    }
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_job(before, tmp_path / "1", {**options, "out": whole})
    run_job(before, tmp_path / "2", {**options, "out": run, "stop-at-step": STOP})
    run_job(after, tmp_path / "3", {**options, "out": run, "engine.zero-stage": stages[1]}, "--resume")
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)
    assert losses(run)[:STOP] == losses(whole)[:STOP]
    assert keys(run) == keys(whole)
    assert sorted(keys(run)) == list(range(1, STEPS + 1))
    assert all(len(set(found)) == BATCH for found in keys(run).values())


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "stages"), [(2, 2, (1, 1)), (2, 1, (3, 0)), (1, 2, (2, 3))])
def test_an_average_of_the_weights_goes_on_and_is_what_is_evaluated_and_exported(
    before, after, stages, world, tmp_path
):
    options = {
        **everywhere(world),
        "optimizer.lr": 0.01,
        "engine.zero-stage": stages[0],
        "ema.half_life_samples": 2 * BATCH,
        "ema.rampup": 0.5,
        "evaluate.pairs": world / "val",
        "evaluate.every_samples": 2 * BATCH,
        "evaluate.best": "validation_loss",
    }
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_job(before, tmp_path / "1", {**options, "out": whole})
    run_job(before, tmp_path / "2", {**options, "out": run, "stop-at-step": STOP + 1})
    run_job(after, tmp_path / "3", {**options, "out": run, "engine.zero-stage": stages[1]}, "--resume")
    values = [[m["validation_loss"] for m in map(json.loads, (r / "metrics.jsonl").open()) if "rsum" in m]
              for r in (whole, run)]  # fmt: skip
    assert len(values[0]) == STEPS / 2
    assert values[1] == pytest.approx(values[0], abs=1e-4)

    files = [r / "checkpoints" / f"step-{STEPS}" for r in (whole, run)]
    expected, found = (load_file(file / "optimizer.safetensors") for file in files)
    weights, model = load_file(files[1] / "weights.safetensors"), load_model(run).model
    exported = model.state_dict()
    for name, mean in found.items():
        if before == after:
            assert torch.equal(mean, expected[name]), name
        if name.startswith("average."):
            assert torch.allclose(mean, expected[name], atol=1e-4), name
            assert torch.equal(mean, exported[name.removeprefix("average.model.")]), name
    assert max((weights[f"model.{name}"] - value).abs().max() for name, value in exported.items()) > 1e-3

    # What the run says of its end is what its exported model does, and model-best/ is that of the best value.
    best = json.loads((run / "best.json").read_text())["steps"][-1]
    for folder, value in ((run / "model", values[1][-1]), (run / "model-best", best["value"])):
        start = {**options, "out": tmp_path / folder.name, "model.pretrained": folder, "optimizer.lr": 0}
        run_job(1, tmp_path / "4", {**start, "engine.zero-stage": 0, "samples": 2 * BATCH})
        logged = [json.loads(line) for line in (tmp_path / folder.name / "metrics.jsonl").read_text().splitlines()]
        assert [m["validation_loss"] for m in logged if "rsum" in m] == pytest.approx([value], abs=1e-4)


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=SLOW) for stage in (0, 2, 3))])
def test_the_same_number_of_ranks_goes_on_bit_for_bit_at_every_zero_stage(stage, world, tmp_path):
    options = {
        **everywhere(world),
        "engine.zero-stage": stage,
    }
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_job(2, tmp_path / "1", {**options, "out": whole})
    run_job(2, tmp_path / "2", {**options, "out": run, "stop-at-step": STOP})
    run_job(2, tmp_path / "3", {**options, "out": run}, "--resume")
    assert losses(run) == losses(whole)
    for name in ("weights.safetensors", "optimizer.safetensors"):
        expected, found = ((r / "checkpoints" / f"step-{STEPS}" / name).read_bytes() for r in (whole, run))
        assert expected == found, name
