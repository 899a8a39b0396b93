"""sbatch slurm/download.sh on a real Slurm: an array that fetches, and a job that finishes."""

from __future__ import annotations

import json

import pytest

from probemb.data.shards.index import read_index
from tests.imagesite import serve_images

ONE_CORE = ("--cpus-per-task=1", "--mem=0", "--time=10")


@pytest.fixture
def site(cluster):
    """Where the virtual nodes reach it."""
    with serve_images(host=cluster._address(-1) if cluster.separate_networks else "127.0.0.1") as site:
        yield site


def arguments(site, jobs, words) -> list[str]:
    path = jobs.folder / "list.tsv"
    path.write_text("".join(f"a picture called {word}\t{site.address}/{word}\n" for word in words))
    return ["cc3m", str(path), "--out", str(jobs.folder / "out"), "--shard-size=10", "--private-hosts", "--threads=2"]


def test_an_array_and_the_job_that_finishes(site, jobs):
    words = arguments(site, jobs, [f"ok/{i}" for i in range(58)] + ["gone/1", "gone/2"])
    array = jobs.submit(*words, script="download.sh", sbatch=(*ONE_CORE, "--array=1-2"))
    afterwards = (*ONE_CORE, f"--dependency=afterany:{array}")
    last = jobs.submit(*words, "--processes=3", script="download.sh", sbatch=afterwards)
    jobs.ended(last, "COMPLETED")
    out = jobs.folder / "out"
    assert sum(shard.samples for shard in read_index(out)) == 58
    report = json.loads((out / "download" / "report.json").read_text())
    assert (report["got"], report["lost"]) == (58, {"HTTP 404": 2})
    assert set(site.requests.values()) == {1}  # neither task asked for what was the other's
    logs = "".join(path.read_text() for path in jobs.folder.glob("*.out"))
    assert "--part=1/2" in logs
    assert "--part=2/2" in logs
    assert logs.count("--processes=1") == 2  # the job's cores, where the command does not say
    assert logs.count("--processes") == 3


@pytest.mark.slow
def test_before_its_time_limit_it_requeues_itself(site, jobs):
    site.pause = 0.5
    job = jobs.submit(*arguments(site, jobs, [f"ok/{i}" for i in range(60)]), script="download.sh", sbatch=ONE_CORE)
    out = jobs.folder / "out"
    jobs.cluster.until("the first shard", lambda: list(out.glob("*.tar")), job)
    done = {path: path.read_bytes() for path in out.glob("*.tar")}
    site.pause = 0
    jobs.cluster.run("scancel", "--batch", "--signal=USR1", job)
    jobs.ended(job, "COMPLETED")
    assert "start 2" in jobs.log(job)
    assert sum(shard.samples for shard in read_index(out)) == 60
    assert all(path.read_bytes() == data for path, data in done.items())


@pytest.mark.slow
def test_scancel_brings_nothing_back(site, jobs):
    site.pause = 0.5
    job = jobs.submit(*arguments(site, jobs, [f"ok/{i}" for i in range(60)]), script="download.sh", sbatch=ONE_CORE)
    jobs.cluster.until("the first shard", lambda: list((jobs.folder / "out").glob("*.tar")), job)
    jobs.cluster.run("scancel", job)
    jobs.ended(job, "CANCELLED")
    assert "back into the queue" not in jobs.log(job)


def test_arrays_that_leave_shards_out(site, jobs):
    job = jobs.submit(*arguments(site, jobs, ["ok/1"]), script="download.sh", sbatch=(*ONE_CORE, "--array=2-3"))
    jobs.cluster.until("both logs", lambda: "error: The array counts from 2 to 3" in _logs(jobs))
    assert "Give sbatch --array=1-N" in _logs(jobs)
    assert job


def _logs(jobs) -> str:
    return "".join(path.read_text(errors="replace") for path in jobs.folder.glob("*.out"))


@pytest.mark.slow
def test_one_task_of_an_array_is_requeued_alone(site, jobs):
    """One task of every array has the array's own number, and to requeue that would requeue all of them."""
    site.pause = 0.5
    words = arguments(site, jobs, [f"ok/{i}" for i in range(60)])
    array = jobs.submit(*words, script="download.sh", sbatch=(*ONE_CORE, "--array=1-2"))
    out = jobs.folder / "out"
    jobs.cluster.until("shards of both", lambda: len(list(out.glob("*.tar"))) > 1, array)
    jobs.cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_2")
    jobs.cluster.until("its requeue", lambda: "back into the queue" in _logs(jobs))
    site.pause = 0
    jobs.cluster.until("all shards", lambda: len(list(out.glob("*.tar"))) == 6)
    assert _logs(jobs).count("start 1, on") == 2
    assert _logs(jobs).count("start 2, on") == 1
