"""sbatch slurm/download.sh on a real Slurm: an array that fetches, and a job that finishes."""

from __future__ import annotations

import json

import pytest

from probemb.data.shards.index import read_index
from tests.imagesite import serve_images

ONE_CORE = ("--cpus-per-task=1", "--mem=0", "--time=10")


@pytest.fixture
def site():
    with serve_images(host="127.0.0.1") as site:
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
