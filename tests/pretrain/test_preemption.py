"""Runs that are asked to stop, lose a rank, share a folder or have no room; with real signals, ranks and disks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from probemb.runs.preemption import REQUEUE
from tests.forked import Job
from tests.jobs import refused

ROOT = Path(__file__).resolve().parents[2]


def weights(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step}" / "weights.safetensors").read_bytes()


SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGUSR1, signal.SIGHUP)]


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGTERM, *SLOW])
def test_a_signal_to_one_rank_ends_all_of_them_with_a_checkpoint(number, options, tmp_path):
    """And the run goes on from it as if it had not been stopped; a second and third signal change nothing."""
    job = Job(options, ranks=2, output=tmp_path / "log")
    job.until("step     2/")
    job.signal(number, rank=1)
    for rank in (0, 1, 1):
        job.signal(number, rank)
    assert job.wait() == [REQUEUE, REQUEUE] == [85, 85], job.text()
    assert "continue with --resume" in job.text()
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    last = {"stop-at-step": step + 2}
    on = Job({**options, **last}, "--resume", ranks=2, output=tmp_path / "on")
    assert on.wait() == [0, 0], on.text()
    assert f"resumed at step {step}" in on.text()
    whole = Job({**options, **last, "out": tmp_path / "whole"}, ranks=2, output=tmp_path / "whole.log")
    assert whole.wait() == [0, 0], whole.text()
    assert weights(tmp_path / "run", step + 2) == weights(tmp_path / "whole", step + 2)


@pytest.mark.chaos
@pytest.mark.slow
def test_the_first_ctrl_c_saves_and_a_second_one_ends_at_once(options, tmp_path):
    """The terminal sends it to all ranks, and torchrun hands it on right after."""
    job = Job(options, ranks=2, output=tmp_path / "log")
    job.until("step     2/")
    for _ in range(2):
        job.signal(signal.SIGINT)
    assert job.wait() == [130, 130], job.text()
    assert job.text().count("Ctrl-C again ends at once") == 1
    assert "stopped by Ctrl-C; continue with --resume" in job.text()
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1

    slow = Job({**options, "out": tmp_path / "slow"}, ranks=1, output=tmp_path / "slow.log", prepare=_never_stops)
    slow.until("step     2/")
    slow.signal(signal.SIGINT)
    slow.until("Ctrl-C again")
    time.sleep(1.5)
    slow.signal(signal.SIGINT)
    assert slow.wait() == [130], slow.text()
    assert "interrupted" in slow.text()
    assert not list((tmp_path / "slow" / "checkpoints").iterdir())


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_while_evaluating_stops_there_and_the_next_start_evaluates(workers, options, world, tmp_path):
    options |= {"evaluate.classes": world / "classes", "evaluate.every_samples": 16, "evaluate.batch_size": 1}
    options |= {"data.workers": workers, "ema.half_life_samples": 100, "stop-at-step": 2}
    job = Job(options, ranks=2, output=tmp_path / "log", prepare=_read_slowly)
    job.until("reading")
    began = time.monotonic()
    job.signal(signal.SIGTERM, rank=1)
    assert job.wait() == [REQUEUE, REQUEUE], job.text()
    assert time.monotonic() - began < 20  # a rank would read for 60 s
    assert "zero-shot" not in job.text()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]
    on = Job(options, "--resume", ranks=2, output=tmp_path / "on")
    assert on.wait() == [0, 0], on.text()
    whole = Job({**options, "out": tmp_path / "whole"}, ranks=2, output=tmp_path / "whole.log")
    assert whole.wait() == [0, 0], whole.text()
    assert weights(tmp_path / "run", 2) == weights(tmp_path / "whole", 2)
    found, expected = (
        [row["zeroshot_top5"] for row in map(json.loads, file.read_text().splitlines()) if "zeroshot_top5" in row]
        for file in (tmp_path / "run/metrics.jsonl", tmp_path / "whole/metrics.jsonl")
    )
    assert found == expected
    assert len(found) == 2


def _read_slowly(rank):
    from probemb.data.image_loader import _Decoded

    getitem, own = _Decoded.__getitem__, os.getpid()

    def slowly(data, index):
        assert "data.workers=0" in " ".join(sys.argv) or os.getpid() != own  # a worker reads
        print("reading", flush=True)
        time.sleep(5)
        return getitem(data, index)

    _Decoded.__getitem__ = slowly


def _never_stops(rank):
    from probemb.runs.preemption import Preemption

    Preemption.asked = lambda self: False


def test_a_signal_while_starting_ends_the_run_before_its_first_step(options, tmp_path):
    job = Job(options, ranks=1, output=tmp_path / "log", prepare=_signal_soon)
    assert job.wait() == [REQUEUE], job.text()
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.chaos
def test_three_starts_in_a_row_without_a_step_are_the_last(options, tmp_path):
    """A start with a step in between, and one after the run has ended so, count from one again."""

    def start(*words, prepare=_signal_soon, **more):
        return Job({**options, **more}, "--resume", *words, ranks=1, output=tmp_path / "log", prepare=prepare)

    def one_step(rank):
        pass

    for _ in range(2):
        assert start().wait() == [REQUEUE]
    assert start(prepare=one_step, **{"stop-at-step": 1}).wait() == [0]
    for _ in range(2):
        for _ in range(2):
            assert start().wait() == [REQUEUE]
        refused(start(), "3 starts in a row were asked to stop before they had made a step", "step 1", "sbatch --time")


def _signal_soon(rank):
    import pretrain.preparation

    make_stream = pretrain.preparation.make_stream

    def with_signal(*args):  # by then the command listens
        os.kill(os.getpid(), signal.SIGUSR1)
        return make_stream(*args)

    pretrain.preparation.make_stream = with_signal


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(("workers", "rank"), [(0, 0), (0, 1), (2, 0)])
def test_a_signal_while_one_rank_waits_for_its_data(workers, rank, silent, options, shards, tmp_path):
    """Rank 1 waits for a server that would keep it for minutes, and rank 0 for rank 1; either may get the signal."""
    options = {**options, "data.workers": workers}
    job = Job(options, ranks=2, output=tmp_path / "log")
    job.until("step     2/")
    time.sleep(1)  # both wait
    began = time.monotonic()
    job.signal(signal.SIGUSR1, rank)
    assert job.wait() == [REQUEUE, REQUEUE], job.text()
    assert time.monotonic() - began < 30  # the server would keep it for minutes
    assert "step 2/10000 | stopped by" in job.text()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]
    silent.troubles.clear()
    on = Job({**options, "stop-at-step": 4}, "--resume", ranks=2, output=tmp_path / "on")
    assert on.wait() == [0, 0], on.text()
    assert "resumed at step 2" in on.text()
    whole = {**options, "data.train": shards, "stop-at-step": 4, "out": tmp_path / "whole"}
    assert Job(whole, ranks=2, output=tmp_path / "whole.log").wait() == [0, 0]
    assert weights(tmp_path / "run", 4) == weights(tmp_path / "whole", 4)


@pytest.mark.slow
def test_a_signal_while_a_single_process_waits_for_its_data(silent, options, tmp_path):
    """A second start finds the server silent as before: there is nothing new to save."""
    for words in ("step     2/", "resumed at step 2"):
        job = Job(options, "--resume", ranks=1, output=tmp_path / "log")
        job.until(words)
        time.sleep(1)
        began = time.monotonic()
        job.signal(signal.SIGTERM)
        assert job.wait() == [REQUEUE], job.text()
        assert time.monotonic() - began < 30  # the server would keep it for minutes
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]


def torchrun(options: dict, log: Path) -> subprocess.Popen:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pretrain.run"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(log, "w") as file:
        return subprocess.Popen(
            [*argv, *(f"--{k}={v}" for k, v in options.items())], cwd=ROOT, env=env, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip


def await_words(process: subprocess.Popen, log: Path, words: str) -> None:
    while words not in log.read_text():
        assert process.poll() is None, log.read_text()
        signal.sigtimedwait([], 0.05)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGTERM, "SIGTERM"), pytest.param(signal.SIGINT, "Ctrl-C", marks=pytest.mark.slow)]
)
def test_a_signal_to_torchrun_reaches_the_ranks_and_they_save(number, says, options, tmp_path):
    """A terminal sends Ctrl-C to the ranks as well."""
    log = tmp_path / "log"
    process = torchrun(options, log)
    try:
        await_words(process, log, "step     2/")
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        process.wait(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1  # torchrun's own: it does not hand the ranks' on
    assert f"stopped by {says}; continue with --resume" in log.read_text()
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


@pytest.mark.slow
@pytest.mark.chaos
def test_a_killed_rank_takes_the_job_down(options, tmp_path):
    """Rank 1 is killed; torchrun and rank 0 end by themselves, and no lock or process is left."""
    log = tmp_path / "log"
    process = torchrun(options, log)
    try:
        await_words(process, log, "step     2/")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (victim,) = (c for c in children if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{c}/environ").read_bytes())
        os.kill(int(victim), signal.SIGKILL)
        process.wait(timeout=300)  # torchrun ends the others within 30 s
    finally:
        process.kill()
    assert process.returncode == 1
    assert not [c for c in children if Path(f"/proc/{c}").exists()]
    on = Job({**options, "stop-at-step": 1}, "--resume", ranks=1, output=tmp_path / "on")
    assert on.wait() == [0], on.text()


@pytest.mark.slow
@pytest.mark.chaos
def test_two_jobs_never_write_one_folder(options, tmp_path):
    first = Job(options, ranks=1, output=tmp_path / "log")
    first.until("step     1/")
    try:
        for words in ((), ("--resume",)):
            second = Job(options, *words, ranks=1, output=tmp_path / "second")
            refused(second, "is in use", f"process {first.pids[0]} on {os.uname().nodename}")
    finally:
        first.kill()
    assert Job({**options, "stop-at-step": 1}, "--resume", ranks=1, output=tmp_path / "third").wait() == [0]


def test_a_run_that_diverges_stops_and_names_it_or_skips_and_counts(options, tmp_path):
    """A learning rate of 1e30: the first step ruins the weights, and every step from the second on is NaN."""
    options = {**options, "optimizer.lr": 1e30, "optimizer.clip_grad_norm": 0, "optimizer.warmup_samples": 0}
    run = tmp_path / "run"
    stopped = Job({**options, "save-every": 1, "log-samples": "true"}, ranks=2, output=tmp_path / "log")
    refused(
        stopped,
        "At step 2 the ",
        "is NaN or Inf on rank 0, 1 (loss nan",
        "00000.tar/",
        "nonfinite.jsonl",
        "--on-nonfinite",
    )
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-1"]
    (line,) = map(json.loads, (run / "nonfinite.jsonl").read_text().splitlines())
    assert line["step"] == 2
    assert [len(rank["keys"]) for rank in line["ranks"]] == [8, 8]

    for last, skipped in ((4, 3), (6, 5)):  # from step 1 on; the count goes on after the checkpoint of step 4
        skip = {**options, "stop-at-step": last, "log-every": 2, "on-nonfinite": "skip"}
        on = Job(skip, "--resume", ranks=2, output=tmp_path / f"{last}")
        assert on.wait() == [0, 0], on.text()
        assert "skipped on all ranks: the " in on.text()
        assert f"every step since the last line was skipped | {skipped} steps skipped" in on.text()
        assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["skipped"] == skipped
    assert weights(run, 1) == weights(run, 4) == weights(run, 6)


def test_resume_says_which_checkpoint_it_took_and_why_not_a_newer_one(options, tmp_path):
    """One byte of the newest is wrong, and a newer one was never finished."""
    run = tmp_path / "run"
    options = {**options, "save-every": 2, "keep-checkpoints": 1, "keep-every": 4, "stop-at-step": 8}
    assert Job(options, ranks=1, output=tmp_path / "log").wait() == [0]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-4", "step-8"]
    (run / "checkpoints" / ".step-10.partial").mkdir()
    file = run / "checkpoints" / "step-8" / "optimizer.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    on = Job(options, "--resume", ranks=1, output=tmp_path / "on")
    assert on.wait() == [0], on.text()
    assert "resume  The checkpoint of step 10 was never finished" in on.text()
    assert "step-8 is damaged: the contents of optimizer.safetensors are not what was written" in on.text()
    assert f"resumed at step 4 from {run / 'checkpoints' / 'step-4'}" in on.text()


def test_every_change_is_named_and_refused_unless_allowed(options, world, tmp_path):
    run = tmp_path / "run"
    assert Job({**options, "stop-at-step": 6}, ranks=1, output=tmp_path / "log").wait() == [0]
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    shutil.copytree(world / "train", tmp_path / "other")
    index = json.loads((tmp_path / "other" / "index.json").read_text())
    index["shards"] = index["shards"][:1]
    (tmp_path / "other" / "index.json").write_text(json.dumps(index))
    changed = {**options, "batch-size": 32, "seed": 7, "optimizer.lr": 1e-4, "data.train": tmp_path / "other"}
    changed["samples"] = 32 * 8
    names = ("batch_size: 16 -> 32", "seed: 0 -> 7", "optimizer.lr: 0.0005 -> 0.0001", "data.corpus: ", "other")
    refused(Job(changed, "--resume", ranks=1, output=tmp_path / "1"), *names, "--allow-changes")
    model = {**options, "model.n_unc_layers": 1}
    refused(Job(model, "--resume", ranks=1, output=tmp_path / "2"), "model.n_unc_layers: None -> 1")
    refused(Job(model, "--resume", "--allow-changes", ranks=1, output=tmp_path / "3"), "a checkpoint of another model")
    assert all(p.read_bytes() == raw for p, raw in before.items())

    on = Job(changed, "--resume", "--allow-changes", ranks=1, output=tmp_path / "4")
    assert on.wait() == [0], on.text()
    assert "resume  changed " in on.text()
    assert "the data resumes after 96 samples seen" in on.text()
    for name in names:
        assert name in on.text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(m["step"], m["samples"]) for m in lines[5:]] == [(6, 96), *((6 + n, 96 + 32 * n) for n in range(1, 6))]
    assert lines[-1]["lr"] == 0
