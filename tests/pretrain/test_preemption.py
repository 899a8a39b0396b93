"""Runs that are asked to stop, or diverge; with real signals and ranks."""

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
    options |= {"optimizer.lr": 1e30, "optimizer.clip_grad_norm": 0, "optimizer.warmup_samples": 0}
    job = Job(options, ranks=1, output=tmp_path / "log")
    refused(job, "At step 2 the ", "is NaN or Inf on rank 0 (loss nan", "nonfinite.jsonl", "--on-nonfinite")
    (line,) = map(json.loads, (tmp_path / "run" / "nonfinite.jsonl").read_text().splitlines())
    assert (line["step"], len(line["ranks"][0]["keys"])) == (2, 16)
