"""sbatch slurm/zeroshot.sh on a real Slurm."""

from __future__ import annotations

import json

from probemb.models import create_model, save_model
from tests.slurm.jobs import CPU

ONE_NODE = ("--cpus-per-task=1", "--gpus-per-node=0", "--time=30")


def test_an_evaluation(jobs):
    save_model(create_model("ViT-Micro-32"), jobs.folder / "model")
    out = jobs.folder / "results"
    words = ("--model", f"{jobs.folder}/model", "--data", f"{jobs.train.parent}/classes", "--out", str(out))
    job = jobs.submit(*words, "--filter", "all", script="zeroshot.sh", sbatch=ONE_NODE, **CPU)
    jobs.ended(job, "COMPLETED")
    assert "24 images" in jobs.log(job)
    assert json.loads((out / "results.json").read_text())


def test_without_a_gpu_it_is_refused(jobs):
    job = jobs.submit("--model", "x", script="zeroshot.sh", sbatch=ONE_NODE)
    assert jobs.ended(job, "FAILED")["ExitCode"] == "2:0"
    assert "error: The job has no GPU." in jobs.log(job)
    assert "PROBEMB_ALLOW_CPU=1" in jobs.log(job)


def test_the_stage_s_own_refusal_reaches_the_person(jobs):
    job = jobs.submit("--flter", "all", script="zeroshot.sh", sbatch=ONE_NODE, **CPU)
    assert jobs.ended(job, "FAILED")["ExitCode"] == "2:0"
    assert "Did you mean '--filter'?" in jobs.log(job)
