"""One cluster and one small synthetic world for all tests of this folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.jobs import ROOT, Jobs


@pytest.fixture(scope="session")
def cluster():
    """Three virtual nodes. Skips where Slurm cannot run, or fails there if PROBEMB_REQUIRE_SLURM=1."""
    if reason := missing():
        if os.environ.get("PROBEMB_REQUIRE_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    cluster = Cluster(nodes=3)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def train(scenes) -> Path:
    """64 captioned images in two shards."""
    return scenes / "train"


@pytest.fixture
def jobs(cluster, train, tmp_path):
    """Submits and watches; cancels at the end what still runs, and shows the logs of a test that failed."""
    jobs = Jobs(cluster, train, tmp_path)
    yield jobs
    jobs.end()


@pytest.fixture
def here(train, tmp_path):
    """`here(ranks=2)`: the command with --local, in the background, and where to look for its run."""
    local = Jobs(None, train, tmp_path)
    started = []

    def start(ranks: int, **options) -> tuple[subprocess.Popen, Jobs]:
        own = ("--local", "--cpu", f"--tasks-per-node={ranks}", "--cpus-per-task=1", f"--folder={tmp_path}/submitit")
        argv = [sys.executable, "-m", "slurm.submit", "pretrain", *own]
        argv += ["--", *local.arguments("run", **options)]
        output = (tmp_path / "output").open("w")
        environ = {**os.environ, **local.env}
        process = subprocess.Popen(
            argv, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        started.append(process)
        return process, local

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
