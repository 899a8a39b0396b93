"""sbatch slurm/finetune.sh on a real Slurm over two nodes: preempted and resumed, one method for each array task."""

from __future__ import annotations

import torch

from probemb import load_model
from tests.slurm.jobs import CPU, Jobs

OPTIONS = {
    "model.name": "ViT-Micro-32",
    "model.pretrained": "null",
    "model.embed_dim": 32,
    "batch_size": 16,
    "epochs": 2,
    "log_every": 1,
    "swa_epochs": 1,
    "data.workers": 0,
    "optimizer.freeze_epochs": 1,
    "optimizer.warmup_epochs": 0,
    "optimizer.decay_epochs": 1,
}
STEPS = 40  # 64 images with five captions each, twice


def arguments(jobs: Jobs, run: str, **options) -> list[str]:
    given = {**OPTIONS, **options, "data.path": jobs.train.parent, "out": jobs.folder / run}
    return [f"--{key}={value}" for key, value in given.items()]


def losses(jobs: Jobs, run: str) -> list[tuple[int, float]]:
    return [(m["step"], m["loss"]) for m in jobs.metrics(run) if "loss" in m]


def test_preempted_requeued_finished_and_equal_to_an_undisturbed_run(jobs):
    """USR1 to the batch script is what --signal=B:USR1@300 sends before the time limit."""
    whole = jobs.submit(*arguments(jobs, "whole"), script="finetune.sh", **CPU)
    job = jobs.submit(*arguments(jobs, "cut"), script="finetune.sh", **CPU)
    jobs.until_step(job, "cut", 3)
    jobs.cluster.run("scancel", "--batch", "--signal=USR1", job)
    seen = jobs.ended(job, "COMPLETED")
    assert seen["Restarts"] == "1"
    first, second = jobs.log(job).split("start 2, on ")
    assert "asked to stop: back into the queue" in first
    assert "engine  2 x cpu" in first
    assert "resumed at step" in second
    assert f"step {STEPS}/{STEPS}" in second
    jobs.ended(whole, "COMPLETED")
    assert jobs.cluster.job(whole)["Restarts"] == "0"
    assert [step for step, _ in losses(jobs, "whole")] == list(range(1, STEPS + 1))
    assert losses(jobs, "cut") == losses(jobs, "whole")
    for name in ("model", "model-swa"):
        cut, other = (load_model(jobs.folder / run / name).model.state_dict() for run in ("cut", "whole"))
        for key, weight in other.items():
            assert torch.equal(weight, cut[key]), key
