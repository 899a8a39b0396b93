"""Jobs of a test: what people type, and what they then look at."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from probemb import load_model
from tests import forked
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
STEPS = 240  # ten seconds: signals and queues take one or two to reach a running job
OPTIONS = {**forked.OPTIONS, "samples": 16 * STEPS, "save-every": 0}
CPU = {"PROBEMB_ALLOW_CPU": "1"}
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0", "--time=30")


class Jobs:
    """Jobs of a cluster that train on the shards `train`, with logs and run folders in `folder`."""

    def __init__(self, cluster: Cluster, train: Path, folder: Path):
        self.cluster, self.train, self.folder = cluster, train, folder
        self.env = {"PROBEMB_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.submitted: list[str] = []

    def arguments(self, run: str, **options) -> list[str]:
        """Of pretrain.run for the run folder `run`."""
        given = {**OPTIONS, **options, "data.train": self.train, "out": self.folder / run}
        return [f"--{key}={value}" for key, value in given.items()]

    def submit(self, *arguments: str, sbatch: tuple[str, ...] = TWO_NODES, script="pretrain.sh", **env: str) -> str:
        """`sbatch OPTIONS slurm/pretrain.sh ARGUMENTS` with more in its environment; returns the job's id."""
        argv = ["sbatch", "--parsable", f"--output={self.folder}/%j.out", *sbatch, f"{ROOT}/slurm/{script}"]
        environ = {**self.cluster.env, **self.env, **env}
        done = subprocess.run([*argv, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        self.submitted.append(done.stdout.strip())
        return self.submitted[-1]

    def log(self, job: str) -> str:
        """All that the job has printed, over all its starts."""
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.is_file() else ""

    def metrics(self, run: str) -> list[dict]:
        """The lines of a run's metrics.jsonl that are whole."""
        path = self.folder / run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def until_step(self, job: str, run: str, step: int) -> None:
        """Wait until the run has logged `step`."""
        self.cluster.until(f"step {step}", lambda: any(m["step"] >= step for m in self.metrics(run)), job)

    def ended(self, job: str, state: str) -> dict[str, str]:
        """Wait for the job's end, which must be `state`."""
        seen = self.cluster.until_ended(job)
        assert seen["JobState"] == state, f"{seen}\n{self.log(job)}"
        return seen

    def end(self) -> None:
        """Cancel what is left, and print the logs: pytest shows them where the test failed."""
        for job in self.submitted:
            self.cluster.run("scancel", job, check=False)
            print(f"===== {job}", *self.log(job).splitlines()[-40:], sep="\n")


def assert_same_run(jobs: Jobs, run: str, reference: str) -> None:
    """The same loss at every step, and the same weights, bit for bit."""
    losses = [(m["step"], m["loss"]) for m in jobs.metrics(run)]
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert losses == [(m["step"], m["loss"]) for m in jobs.metrics(reference)]
    models = [load_model(jobs.folder / name).model.state_dict() for name in (run, reference)]
    assert models[0].keys() == models[1].keys()
    for name, weight in models[0].items():
        assert torch.equal(weight, models[1][name]), name
