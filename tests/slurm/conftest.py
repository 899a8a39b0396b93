"""One cluster and one small synthetic world for all tests of this folder."""

import os

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.jobs import Jobs


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


@pytest.fixture
def jobs(cluster, scenes, tmp_path):
    """Submits and watches; cancels at the end what still runs, and shows the logs of a test that failed."""
    jobs = Jobs(cluster, scenes / "train", tmp_path)
    yield jobs
    jobs.end()
