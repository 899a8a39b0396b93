"""Runs that are asked to stop, lose a rank, share a folder or have no room; with real signals, ranks and disks."""

import json
import os
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


SLOW = [pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]


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
@pytest.mark.parametrize(("workers", "every", "stop"), [(1, 16, 2), (0, 160, 1)])
def test_a_signal_while_evaluating_stops_there_and_the_next_start_evaluates(
    workers, every, stop, options, scenes, tmp_path
):
    """Also at the step where the run was told to stop, and while a checkpoint is written: no thread beside a fork."""
    options |= {"evaluate.classes": scenes / "classes", "evaluate.every_samples": every, "evaluate.batch_size": 1}
    options |= {"data.workers": workers, "ema.half_life_samples": 100, "stop-at-step": stop, "save-every": 1}
    job = Job(options, ranks=2, output=tmp_path / "log", prepare=_read_slowly)
    job.until("reading")
    assert "written" in job.text()
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
    assert weights(tmp_path / "run", stop) == weights(tmp_path / "whole", stop)
    found, expected = (
        [row["zeroshot_top5"] for row in map(json.loads, file.read_text().splitlines()) if "zeroshot_top5" in row]
        for file in (tmp_path / "run/metrics.jsonl", tmp_path / "whole/metrics.jsonl")
    )
    assert found == expected
    assert len(found) == stop


def _read_slowly(rank):
    from probemb.data.image_loader import _Decoded
    from probemb.runs.checkpoints import Snapshot

    getitem, own, write = _Decoded.__getitem__, os.getpid(), Snapshot.write

    def write_slowly(*args):
        time.sleep(2)
        found = write(*args)
        print("written", flush=True)
        return found

    Snapshot.write = write_slowly

    def slowly(data, index):
        assert "data.workers=0" in " ".join(sys.argv) or os.getpid() != own  # a worker reads
        print("reading", flush=True)
        time.sleep(5)
        return getitem(data, index)

    _Decoded.__getitem__ = slowly


def test_a_signal_while_starting_ends_the_run_before_its_first_step(options, tmp_path):
    job = Job(options, ranks=1, output=tmp_path / "log", prepare=_signal_soon)
    assert job.wait() == [REQUEUE], job.text()
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def _signal_soon(rank):
    import pretrain.preparation

    make_stream = pretrain.preparation.make_stream

    def with_signal(*args):  # by then the command listens
        os.kill(os.getpid(), signal.SIGUSR1)
        return make_stream(*args)

    pretrain.preparation.make_stream = with_signal


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(("workers", "rank"), [(2, 0)])
def test_a_signal_while_one_rank_waits_for_its_data(workers, rank, silent, options, eight_shards, tmp_path):
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
    whole = {**options, "data.train": eight_shards, "stop-at-step": 4, "out": tmp_path / "whole"}
    assert Job(whole, ranks=2, output=tmp_path / "whole.log").wait() == [0, 0]
    assert weights(tmp_path / "run", 4) == weights(tmp_path / "whole", 4)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(("number", "says"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_to_torchrun_reaches_the_ranks_and_they_save(number, says, options, tmp_path):
    """A terminal sends Ctrl-C to the ranks as well."""
    log = tmp_path / "log"
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pretrain.run"]
    argv += [f"--{k}={v}" for k, v in options.items()]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(log, "w") as file:
        process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)
    try:
        while "step     2/" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
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
def test_a_run_that_diverges_stops_and_names_it(options, tmp_path):
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
