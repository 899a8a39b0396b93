"""python -m slurm.submit build-index on a real Slurm: a job that trains, an array of parts, and one that merges."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest

from probemb.runs.lock import RunLock
from probemb.search import load_index
from probemb.search.embeddings import Embeddings
from slurm.submit import complete_files
from tests.search.test_folder import DIM, SIZES, contents, fill
from tests.slurm.jobs import ROOT
from tools.build_index import main

FACTORY = "IVF8,PQ8x4np"


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    return fill(Embeddings(tmp_path_factory.mktemp("embeddings"), "runs/x", "f" * 64, DIM, {}), SIZES)


def words(jobs, embeddings, out="index", factory=FACTORY):
    return ["--embeddings", str(embeddings.folder), "--out", str(jobs.folder / out), "--factory", factory]


def submit(jobs, arguments):
    """Returns the numbers of the three jobs."""
    own = ("--cpu", "--cpus-per-task=1", "--time=30", f"--folder={jobs.folder / 'submitit'}", "--parts=3")
    done = subprocess.run(
        [sys.executable, "-m", "slurm.submit", "build-index", *own, "--", *arguments],
        cwd=ROOT, env={**os.environ, **jobs.cluster.env, **jobs.env}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    numbers = done.stdout.splitlines()[-1].partition("scancel ")[2].split()
    jobs.submitted += numbers
    assert len(numbers) == 3
    return numbers


def submit_to_wait(jobs, embeddings):
    """Submit while another process, this one, seems to train; returns its lock and the numbers of two jobs."""
    arguments = words(jobs, embeddings)
    assert main([*arguments, "--train-for=3"]) == 0
    unfinished = jobs.folder / ".index.unfinished"
    (unfinished / "trained.faiss").unlink()
    lock = RunLock(unfinished / "training")
    train, _, merge = submit(jobs, arguments)
    return lock, train, merge


def log(jobs, job):
    return (jobs.folder / "submitit" / f"{job}_0_log.out").read_text()


def ended(jobs, job, state):
    assert jobs.cluster.until_ended(job)["JobState"] == state, log(jobs, job)


def test_an_array_builds_the_index_of_one_process(jobs, embeddings):
    train, array, merge = submit(jobs, words(jobs, embeddings))
    ended(jobs, merge, "COMPLETED")
    assert "ready for --part 1/3 to 3/3" in log(jobs, train)
    for task in range(3):
        assert f"part {task + 1}/3 is complete" in log(jobs, f"{array}_{task}")
    assert main([*words(jobs, embeddings, "alone"), "--part-items=234"]) == 0
    assert contents(jobs.folder / "index") == contents(jobs.folder / "alone")


def test_a_failed_part_ends_the_rest_and_the_next_submission_finishes_it(jobs, embeddings):
    """The means of the last shard cannot be read, which the second and the third part need."""
    path = embeddings.path(embeddings.partitions("image")[4])
    whole, status = path.read_bytes(), path.stat()
    path.write_bytes(whole[:500] + b"damage" + whole[506:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # so that it passes for the same file
    arguments = words(jobs, embeddings, factory="Flat")
    try:
        _, array, merge = submit(jobs, arguments)
        ended(jobs, f"{array}_2", "FAILED")
        assert "x-00004.npz cannot be read" in log(jobs, f"{array}_2")
        ended(jobs, f"{array}_0", "COMPLETED")
        jobs.cluster.until("the cancelled merge", lambda: jobs.cluster.job(merge)["JobState"] == "CANCELLED", merge)
    finally:
        path.write_bytes(whole)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    part = jobs.folder / ".index.unfinished" / "part-00000.faiss"
    before = part.stat().st_ino
    assert not (jobs.folder / "index").exists()
    _, array, merge = submit(jobs, arguments)
    ended(jobs, merge, "COMPLETED")
    assert "nothing to do" in log(jobs, f"{array}_0")
    assert (jobs.folder / "index" / "part-00000.faiss").stat().st_ino == before
    assert main([*words(jobs, embeddings, "alone", "Flat"), "--part-items=234"]) == 0
    assert contents(jobs.folder / "index") == contents(jobs.folder / "alone")


def test_a_preempted_job_is_requeued_and_resumes(jobs, embeddings):
    """It is preempted while it waits to train, which takes as long as the test holds the lock."""
    lock, train, merge = submit_to_wait(jobs, embeddings)
    path = jobs.folder / "submitit" / f"{train}_0_log.out"
    waits = "waiting for another process"
    jobs.cluster.until("the wait", lambda: path.is_file() and waits in path.read_text(), train)
    jobs.cluster.run("scancel", "--signal=USR2", train)
    jobs.cluster.until("the second start", lambda: path.read_text().count(waits) == 2, train)
    lock.release()
    ended(jobs, merge, "COMPLETED")
    assert jobs.cluster.job(train)["Restarts"] == "1"
    assert not (jobs.folder / ".index.unfinished").exists()


def test_a_job_that_never_completes_a_file_ends_after_three_starts(jobs, embeddings):
    """As if training took longer than the job's time; here it waits for a lock that is never released."""
    lock, train, merge = submit_to_wait(jobs, embeddings)
    path = jobs.folder / "submitit" / f"{train}_0_log.out"
    waits = "waiting for another process"
    for start in (1, 2, 3):
        began = partial(lambda n: path.is_file() and path.read_text().count(waits) == n, start)
        jobs.cluster.until(f"start {start}", began, train)
        jobs.cluster.run("scancel", "--signal=USR2", train)
    ended(jobs, train, "FAILED")
    lock.release()
    assert jobs.cluster.job(train)["Restarts"] == "2"
    assert "3 starts of tools.build_index in a row were asked to stop" in path.read_text()
    jobs.cluster.until("the cancelled merge", lambda: jobs.cluster.job(merge)["JobState"] == "CANCELLED", merge)
    _, _, merge = submit(jobs, words(jobs, embeddings))
    ended(jobs, merge, "COMPLETED")


def test_progress_is_what_this_part_completes(tmp_path):
    unfinished = tmp_path / ".index.unfinished"
    unfinished.mkdir()
    out = [f"--out={tmp_path}/index", "--factory", "Flat"]
    assert complete_files(out) == []
    for name in ("part-00000.faiss", "part-00001.faiss", "part-00003.faiss", "plan.json"):
        (unfinished / name).touch()
    assert complete_files(out) == ["part-00000.faiss", "part-00001.faiss", "part-00003.faiss"]
    assert complete_files([*out, "--part=2/2"]) == ["part-00001.faiss", "part-00003.faiss"]
    (unfinished / "trained.faiss").touch()
    assert complete_files([*out, "--part", "1/2"]) == ["trained.faiss", "part-00000.faiss"]
    assert complete_files([*out, "--train-for=2"])[0] == "trained.faiss"


@pytest.mark.parametrize("more", [(), ("--parts=2",)])
def test_an_index_is_built_here(more, embeddings, tmp_path):
    own = ("--local", "--cpu", "--cpus-per-task=1", "--time=10", f"--folder={tmp_path}/jobs", *more)
    words = ("--embeddings", str(embeddings.folder), "--out", str(tmp_path / "index"), "--factory=IVF8,Flat")
    argv = [sys.executable, "-m", "slurm.submit", "build-index", *own, "--", *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(load_index(tmp_path / "index").parts) == (2 if more else 1)
    if more:
        again = subprocess.run(
            [*argv, "--form=mean"], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60
        )
        assert again.returncode == 2
        assert "index is there already" in again.stderr
