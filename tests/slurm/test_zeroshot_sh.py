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
