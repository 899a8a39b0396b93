"""python -m slurm.submit embed on a real Slurm: an array whose tasks share the shards."""

from __future__ import annotations

import os
import subprocess
import sys

from probemb.models import create_model, save_model
from probemb.search.embeddings import open_embeddings
from tests.slurm.jobs import ROOT


def test_parts_embed_every_shard_once(jobs):
    save_model(create_model("ViT-Micro-32"), jobs.folder / "model")
    folder, out = jobs.folder / "submitit", jobs.folder / "embeddings"
    own = ("--cpu", "--cpus-per-task=1", "--time=30", f"--folder={folder}", "--parts=2")
    words = ("--model", f"{jobs.folder}/model", "--data", str(jobs.train), "--out", str(out), "--workers=0")
    argv = [sys.executable, "-m", "slurm.submit", "embed", *own, "--", *words]
    environ = {**os.environ, **jobs.cluster.env, **jobs.env}
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    array = done.stdout.split()[1].split("_")[0]
    jobs.submitted.append(array)
    for task in range(2):
        state = jobs.cluster.until_ended(f"{array}_{task}")["JobState"]
        log = (folder / f"{array}_{task}_0_log.out").read_text()
        assert state == "COMPLETED", log
        assert "samples: 32 in" in log  # its own shard of 32, not the other's
    embeddings = open_embeddings(out)
    assert embeddings.count("image") == 64
    assert {part.count for part in embeddings.partitions("image")} == {32}
