"""Run a stage on Slurm.

    python -m slurm.rank MODULE ARGUMENTS         in a batch script: starts the ranks, and requeues a run that has saved
    python -m slurm.rank task MODULE ARGUMENTS    in srun: becomes one rank; under submitit it is the child of a `Stage`

SIGUSR1 asks a stage to save and to exit with 85. Ranks ignore it until they have a handler, so it is repeated.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from probemb.cli.command import run_command
from probemb.errors import UserError
from probemb.runs.preemption import REQUEUE

TRAINERS = ("pretrain.run", "finetune.run")
METHODS = "pcmepp pcmepp-mu infonce vse pcme daa p2rm ncr decl"
GPU_BINDING = "--gpu-bind=none"  # NCCL needs to see all GPUs of a node to copy between them
# Not --kill-on-bad-exit, which would end ranks after one that has saved. All ranks end at once; if one failed, its
# peers' connections break, and a minute later srun ends those that did not notice.
SRUN_OPTIONS = (GPU_BINDING, "--kill-on-bad-exit=0", "--wait=60", "--label", "--export=ALL")
TASK = ("bash", "-c", 'trap "" USR1 USR2; exec "$@"', "rank", sys.executable, "-u", "-m", "slurm.rank", "task")
FIRST_SIGNAL, NEXT_SIGNAL = 15, 5  # seconds: until all ranks ignore SIGUSR1; between two of them


# ------------------------------------------------------------------------------------------------ arguments of each run
def argument_lists(arguments: list[str], methods: str | None = None, sweep: str | None = None) -> list[list[str]]:
    """Arguments of every run of a job array: `arguments`, followed by the run's own, which take precedence.

    `methods`: of finetuning, each with the folder of its name in --out; `sweep`: a file with one line of arguments for
    each run, as in a shell; comments start with #. Raises UserError.
    """
    out, own = take("--out", arguments)[0], [[]]
    if sweep is not None:
        try:
            own = [shlex.split(line, comments=True) for line in Path(sweep).read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise UserError(f"The list of a sweep, {sweep}, cannot be read: {error}.", "Correct it.") from None
        own = [line for line in own if line]
        folders = {take("--out", line)[0] for line in own}
        if not own or None in folders or len(folders) < len(own):
            raise UserError(f"A line of {sweep} has no --out of its own.", "Give each run a folder of its own.")
    elif methods is not None:
        if not out:
            raise UserError("Each method needs a folder of its own in --out.", "Add --out, or use --sweep FILE.")
        names = dict.fromkeys(methods.replace(",", " ").split())
        own = [["--method", name, "--out", str(Path(out) / name)] for name in names]
    return [[*arguments, *line] for line in own]


def take(option: str, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of the last `--option VALUE` or `--option=VALUE`, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(option, dest="value")
    known, others = parser.parse_known_args(words)
    return known.value, others


def arguments_here(module: str, words: list[str]) -> list[str]:
    """Arguments of this job, or of this task of its array, with what every start of the stage gets."""
    number, cpus = os.environ.get("SLURM_ARRAY_TASK_ID"), os.environ.get("SLURM_CPUS_PER_TASK", "1")
    if module == "tools.download":
        first, last, count = (os.environ.get(f"SLURM_ARRAY_TASK_{name}", "1") for name in ("MIN", "MAX", "COUNT"))
        if (first, last) != ("1", count):
            raise UserError(f"The array counts from {first} to {last} in {count} tasks.", "Give sbatch --array=1-N.")
        words = words if take("--processes", words)[0] else [*words, f"--processes={cpus}"]
        return [*words, f"--part={number}/{count}"] if number else words
    sweep, words = take("--sweep", words)
    if sweep and not number:
        raise UserError("--sweep works in job arrays only.", "Add --array=1-N to sbatch.")
    if number and (sweep or module == "finetune.run"):
        runs = argument_lists(words, os.environ.get("PROBEMB_METHODS", METHODS), sweep)
        if not 1 <= int(number) <= len(runs):
            raise UserError(f"{sweep or 'METHODS'} has no line {number}.", f"Give sbatch --array=1-{len(runs)}.")
        words = runs[int(number) - 1]
    return ["--resume", f"--engine.threads={cpus}", *words] if module in TRAINERS else words


# -------------------------------------------------------------------------------------------------------------- the job
def job(module: str, words: list[str]) -> int:
    """Run a stage on every rank of this job; requeues it if it was asked to stop and has saved. Raises UserError."""
    slurm = os.environ
    if "SLURM_JOB_ID" not in slurm:
        raise UserError("This is a batch script for Slurm.", "Start it with: sbatch slurm/SCRIPT.sh ARGUMENTS")
    gpus, tasks = int(slurm.get("SLURM_GPUS_ON_NODE", "0")), int(slurm.get("SLURM_NTASKS_PER_NODE", "1"))
    if gpus != tasks and module != "tools.download" and slurm.get("PROBEMB_ALLOW_CPU") != "1":
        n, what = max(gpus, tasks), f"The job has {gpus or 'no'} GPUs for {tasks} tasks on each node."
        remedy = f"Give sbatch --gpus-per-node={n} and --ntasks-per-node={n}, or set PROBEMB_ALLOW_CPU=1 for CPUs."
        raise UserError(f"{what} Every task needs one.", remedy)
    arguments, start = arguments_here(module, words), int(slurm.get("SLURM_RESTART_COUNT", "0")) + 1
    print(f"== job {slurm['SLURM_JOB_ID']}, start {start}, on {slurm['SLURM_JOB_NODELIST']}: ", end="")
    ranks = f"{slurm['SLURM_NTASKS']} ranks, meeting at {':'.join(meeting_place())}"
    print(f"{ranks}: {shlex.join(arguments)}", flush=True)
    # srun does not inherit --cpus-per-task from sbatch.
    sizes = f"--ntasks-per-node={tasks}", f"--cpus-per-task={slurm.get('SLURM_CPUS_PER_TASK', '1')}"
    came: set[int] = set()  # SIGUSR1: time limit near, or preemption; SIGTERM: scancel or a failed node
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: came.add(number))
    srun = subprocess.Popen(["srun", *sizes, *SRUN_OPTIONS, *TASK, module, *arguments])
    signal_at = time.monotonic() + FIRST_SIGNAL
    while (code := srun.poll()) is None:
        if signal.SIGUSR1 in came and time.monotonic() > signal_at:
            srun.send_signal(signal.SIGUSR1)
            signal_at = time.monotonic() + NEXT_SIGNAL
        time.sleep(0.1)
    this = "_".join(slurm[f"SLURM_ARRAY_{name}_ID"] for name in ("JOB", "TASK") if f"SLURM_ARRAY_{name}_ID" in slurm)
    this = this or slurm["SLURM_JOB_ID"]  # a task of an array alone
    shown = subprocess.run(["scontrol", "show", "job", this], capture_output=True, text=True).stdout
    if code == REQUEUE and (signal.SIGTERM not in came or "Reason=TimeLimit" in shown):
        print("== asked to stop: back into the queue", flush=True)
        if subprocess.run(["scontrol", "requeue", this]).returncode == 0:
            return 0
        print("error: Slurm does not requeue the job.\n       Submit it again: it resumes.", file=sys.stderr)
    elif signal.SIGTERM in came:
        print("== ended by Slurm (scancel, time limit or a failed node)", flush=True)
    return code


def meeting_place() -> tuple[str, str]:
    """The first node of this job, and a port that differs between jobs, below the ephemeral ones."""
    show = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    return subprocess.check_output(show, text=True).split()[0], str(10_000 + int(os.environ["SLURM_JOB_ID"]) % 20_000)


# --------------------------------------------------------------------------------------------------------------- a rank
def task(module: str, arguments: list[str]) -> None:
    """Become the rank of a stage that this task of srun is. Raises UserError: torch does not see the job's GPUs."""
    slurm = os.environ
    world, here = slurm["SLURM_NTASKS"], int(slurm["SLURM_NTASKS"]) // int(slurm["SLURM_JOB_NUM_NODES"])
    ranks = {"RANK": slurm["SLURM_PROCID"], "LOCAL_RANK": slurm["SLURM_LOCALID"], "WORLD_SIZE": world}
    slurm.update({**ranks, "LOCAL_WORLD_SIZE": str(here)}, **dict(zip(("MASTER_ADDR", "MASTER_PORT"), meeting_place())))
    if slurm.get("PROBEMB_ALLOW_CPU") == "1":
        if slurm.get("SLURM_GPUS_ON_NODE", "0") == "0":
            slurm["CUDA_VISIBLE_DEVICES"] = ""  # GPUs of the node are not this job's
    elif module != "tools.download" and slurm["SLURM_LOCALID"] == "0":
        import torch

        if torch.cuda.device_count() < here:  # the run would continue on CPUs
            node = os.uname().nodename
            remedy = f"Look at nvidia-smi and the torch build there, or avoid it with --exclude={node}."
            raise UserError(f"torch does not see the job's {here} GPUs on {node}.", remedy)
    os.execv(sys.executable, [sys.executable, "-u", "-m", module, *arguments])


@dataclass
class Stage:
    """A rank under submitit: `python -m module arguments`."""

    module: str
    arguments: list[str]
    child: subprocess.Popen | None = field(default=None, init=False, repr=False)

    def __call__(self) -> int:
        """Run to the end; returns 0. Raises RuntimeError: the stage failed, or was ended by scancel."""
        self.child = subprocess.Popen([*TASK, self.module, *self.arguments])
        waiting = threading.Thread(target=self.child.wait)  # so that `checkpoint`, in a signal's handler, need not
        waiting.start()
        while waiting.is_alive():
            time.sleep(0.1)
        code = self.child.returncode
        if code == REQUEUE and os.environ["SLURM_PROCID"] != "0":
            sys.exit(0)  # no result: rank 0 has the job requeued
        if code:
            raise RuntimeError(f"{self.module} ended with code {code}; see its output above.")
        return 0


class ResumableStage(Stage):
    """A stage that saves on SIGUSR1, exits with 85, and resumes with the same arguments."""

    def checkpoint(self):
        """Make the run save; on SIGUSR2 submitit calls this on rank 0, and requeues the job with the returned value."""
        from submitit.helpers import DelayedSubmission

        while self.child and self.child.returncode is None:
            self.child.send_signal(signal.SIGUSR1)
            time.sleep(1)
        if self.child and self.child.returncode not in (0, REQUEUE):
            raise RuntimeError(f"{self.module} ended with code {self.child.returncode} when it was asked to save.")
        return DelayedSubmission(type(self)(self.module, self.arguments))


def main() -> int | None:
    words = sys.argv[1:]
    return task(words[1], words[2:]) if words[0] == "task" else job(words[0], words[1:])


if __name__ == "__main__":
    run_command(main)
