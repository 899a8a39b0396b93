"""Run a stage on Slurm.

    python -m slurm.rank MODULE ARGUMENTS         in a batch script: starts the ranks, and requeues a run that has saved
    python -m slurm.rank task MODULE ARGUMENTS    in srun: one rank; under submitit it is a `Stage`

A stage is a child of its rank's process, so that a signal that comes before it has its handlers kills nobody: SIGUSR1
asks it to save and to exit with 85.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from probemb.cli.command import run_command
from probemb.errors import UserError, nearest
from probemb.runs.preemption import REQUEUE

TRAINERS = ("pretrain.run", "finetune.run")
SRUN_OPTIONS = ("--gpu-bind=none", "--wait=600")  # NCCL needs to see all GPUs of a node to copy between them
METHODS = "pcmepp pcmepp-mu infonce vse pcme daa p2rm ncr decl"
PR_SET_PDEATHSIG = 1
SECONDS_BETWEEN_SIGNALS = 5
KILLED_BY_USR1 = 128 + signal.SIGUSR1


# ------------------------------------------------------------------------------------------------ arguments of each run
def argument_lists(
    module: str, arguments: Sequence[str], methods: str | None = None, sweep: str | None = None
) -> list[list[str]]:
    """Arguments of every run of a job array: `arguments`, followed by the run's own, which take precedence.

    `methods`: of finetuning, each with the folder of its name in --out; `sweep`: a file with one line of arguments for
    each run, as in a shell; comments start with #. Raises UserError.
    """
    if methods is not None and sweep is not None:
        raise UserError("--methods and --sweep exclude each other.", "Write --method into the lines of the sweep.")
    if sweep is not None:
        return [[*arguments, *line] for line in _lines(Path(sweep))]
    if methods is None:
        return [list(arguments)]
    from finetune.methods import METHODS as known

    names, out = list(dict.fromkeys(methods.replace(",", " ").split())), value_of("--out", arguments)
    for name in names:
        if name not in known:
            raise UserError(f"There is no method '{name}'.{nearest(name, known)}", f"Choose from {', '.join(known)}.")
    if not names or not out or module != "finetune.run" or value_of("--method", arguments):
        raise UserError(
            "Several methods are for finetuning, without --method, and each needs a folder of its own in --out.",
            "Add --out, leave --method out, or give every run its own arguments with --sweep FILE.",
        )
    return [[*arguments, "--method", name, "--out", str(Path(out) / name)] for name in names]


def _lines(path: Path) -> list[list[str]]:
    try:
        lines = [shlex.split(line, comments=True) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"The list of a sweep, {path}, cannot be read: {error}.", "Correct it.") from None
    lines = [line for line in lines if line]
    folders = [value_of("--out", line) for line in lines]
    if not lines or None in folders or len(set(folders)) < len(folders):
        raise UserError(f"A line of {path} has no --out of its own.", "Give each run of a sweep a folder of its own.")
    return lines


def value_of(option: str, words: Sequence[str]) -> str | None:
    """The value of the last `--option VALUE` or `--option=VALUE`."""
    joined = [f"{word}={after}" if word == option else word for word, after in zip(words, [*words[1:], ""])]
    found = [word.partition("=")[2] for word in joined if word.startswith(f"{option}=")]
    return found[-1] if found else None


def arguments_here(module: str, words: list[str]) -> list[str]:
    """Arguments of this job, or of this task of its array, with what every start of the stage gets."""
    number, cpus = os.environ.get("SLURM_ARRAY_TASK_ID"), os.environ.get("SLURM_CPUS_PER_TASK", "1")
    if module == "tools.download":
        first, last, count = (os.environ.get(f"SLURM_ARRAY_TASK_{name}", "1") for name in ("MIN", "MAX", "COUNT"))
        if (first, last) != ("1", count):
            raise UserError(f"The array counts from {first} to {last} in {count} tasks.", "Give sbatch --array=1-N.")
        words = words if value_of("--processes", words) else [*words, f"--processes={cpus}"]
        return [*words, f"--part={number}/{count}"] if number else words
    sweep = value_of("--sweep", words)
    words = [
        w for w, before in zip(words, ["", *words]) if "--sweep" not in (before, w) and not w.startswith("--sweep=")
    ]
    if sweep and not number:
        raise UserError("--sweep works in job arrays only.", "Add --array=1-N to sbatch.")
    if number and (sweep or module == "finetune.run"):
        methods = None if sweep else os.environ.get("PROBEMB_METHODS", METHODS)
        runs = argument_lists(module, words, methods, sweep)
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
    if module != "tools.download":
        _check_gpus(int(slurm.get("SLURM_GPUS_ON_NODE", "0")), int(slurm.get("SLURM_NTASKS_PER_NODE", "1")))
    arguments = arguments_here(module, words)
    nodes = subprocess.check_output(["scontrol", "show", "hostnames", slurm["SLURM_JOB_NODELIST"]], text=True).split()
    meeting = {"MASTER_ADDR": nodes[0], "MASTER_PORT": _port(slurm["SLURM_JOB_ID"])}
    start = int(slurm.get("SLURM_RESTART_COUNT", "0")) + 1
    print(
        f"== job {slurm['SLURM_JOB_ID']}, start {start}, on {slurm['SLURM_JOB_NODELIST']}: {slurm['SLURM_NTASKS']} "
        f"ranks, meeting at {meeting['MASTER_ADDR']}:{meeting['MASTER_PORT']}: {shlex.join(arguments)}",
        flush=True,
    )
    tasks, cpus = slurm.get("SLURM_NTASKS_PER_NODE", "1"), slurm.get("SLURM_CPUS_PER_TASK", "1")
    command = ["srun", "--export=ALL", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cpus}", *SRUN_OPTIONS]
    command += ["--kill-on-bad-exit=0", "--label", "bash", "-c", 'trap "" USR1; exec "$@"', "rank"]
    command += [sys.executable, "-m", "slurm.rank", "task", module, *arguments]
    came = {signal.SIGUSR1: False, signal.SIGTERM: False}  # time limit near or preemption; scancel or a failed node
    for number in came:
        signal.signal(number, lambda number, _: came.update({number: True}))
    for attempt in (1, 2, 3):
        srun, signal_at = subprocess.Popen(command, env={**slurm, **meeting}), time.monotonic() + attempt
        while (code := srun.poll()) is None:
            if came[signal.SIGUSR1] and time.monotonic() > signal_at:  # ignored until the trainer has its handler
                srun.send_signal(signal.SIGUSR1)
                signal_at = time.monotonic() + SECONDS_BETWEEN_SIGNALS
            time.sleep(0.1)
        # USR1 came before the ranks could ignore it. They start again here, as only a run that is told when it listens
        # counts its starts without a step (probemb/runs/folder.py).
        if code not in (KILLED_BY_USR1, -signal.SIGUSR1) or not came[signal.SIGUSR1] or came[signal.SIGTERM]:
            break
    this = "_".join(slurm[f"SLURM_ARRAY_{name}_ID"] for name in ("JOB", "TASK") if f"SLURM_ARRAY_{name}_ID" in slurm)
    this = this or slurm["SLURM_JOB_ID"]  # a task of an array alone
    if came[signal.SIGTERM] and not (code == REQUEUE and "Reason=TimeLimit" in _show(this)):
        print("== ended by Slurm (scancel, time limit or a failed node)", flush=True)
    elif code == REQUEUE:
        print("== asked to stop: back into the queue", flush=True)
        if subprocess.run(["scontrol", "requeue", this]).returncode == 0:
            return 0
        print("error: Slurm does not requeue the job.\n       Submit it again: it resumes.", file=sys.stderr)
    return code


def _check_gpus(gpus: int, tasks: int) -> None:
    """Refuse forgotten GPUs: a run on CPUs may go unnoticed for a day."""
    if os.environ.get("PROBEMB_ALLOW_CPU") == "1":
        if not gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs of the node are not this job's
    elif gpus != tasks:
        raise UserError(
            f"The job has {gpus or 'no'} GPUs for {tasks} tasks on each node; every task needs one.",
            f"Give sbatch --gpus-per-node={max(gpus, tasks)} and --ntasks-per-node={max(gpus, tasks)}, or set "
            "PROBEMB_ALLOW_CPU=1 to compute on CPUs.",
        )


def _port(job_id: str) -> str:
    return str(10_000 + int(job_id) % 20_000)  # below the ephemeral ports; differs between jobs


def _show(job_id: str) -> str:
    return subprocess.run(["scontrol", "show", "job", job_id], capture_output=True, text=True).stdout


# --------------------------------------------------------------------------------------------------------------- a rank
def task(module: str, arguments: list[str]) -> int:
    """Run a stage as this task of srun. A failed rank ends the others, which would wait for it; one that has saved does
    not, as others may still be writing: srun's --kill-on-bad-exit cannot tell the two apart.
    """
    slurm = os.environ
    world, nodes = int(slurm["SLURM_NTASKS"]), int(slurm["SLURM_JOB_NUM_NODES"])
    about = {"RANK": slurm["SLURM_PROCID"], "WORLD_SIZE": str(world), "LOCAL_RANK": slurm["SLURM_LOCALID"]}
    about["LOCAL_WORLD_SIZE"] = str(world // nodes)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the stage gets it too
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(1))  # of a failed rank
    if module != "tools.download" and slurm.get("PROBEMB_ALLOW_CPU") != "1" and about["LOCAL_RANK"] == "0":
        require_gpus(world // nodes)
    stopped = []

    def stop(*_) -> None:  # a download is ended at once, and fetches unfinished shards again
        stopped.append(True)
        child.terminate()

    child = start_stage(module, arguments, about)
    if module == "tools.download":
        signal.signal(signal.SIGUSR1, stop)
    code = child.wait()
    code = 128 - code if code < 0 else code
    if stopped and code not in (0, 2):  # 2: the third start in a row that finished no shard
        return REQUEUE
    if code not in (0, REQUEUE):
        print(f"rank {about['RANK']} on {os.uname().nodename} ended with code {code}", file=sys.stderr, flush=True)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        subprocess.run(["scancel", "--signal=USR2", f"{slurm['SLURM_JOB_ID']}.{slurm['SLURM_STEP_ID']}"])
    return code


def start_stage(module: str, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen:
    """Start `python -m module`; it ignores SIGUSR2, and SIGUSR1 until it has a handler, and ends with this process."""

    def prepare() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    argv = [sys.executable, "-u", "-m", module, *arguments]
    return subprocess.Popen(argv, env={**os.environ, **environment}, preexec_fn=prepare)


def require_gpus(wanted: int) -> None:
    """Raise UserError if torch sees fewer GPUs than the job was given: the run would continue on CPUs."""
    check = "import sys, torch; sys.exit(torch.cuda.device_count() < int(sys.argv[1]))"
    if subprocess.run([sys.executable, "-c", check, str(wanted)]).returncode:
        node = os.uname().nodename
        raise UserError(
            f"torch does not see the job's {wanted} GPUs on {node}.",
            f"Look at nvidia-smi and the torch build there, or avoid it with --exclude={node}.",
        )


@dataclass
class Stage:
    """A rank under submitit: `python -m module arguments`. `gpus`: that torch must see on every node; 0 for CPUs."""

    module: str
    arguments: list[str]
    gpus: int = 0
    child: subprocess.Popen | None = field(default=None, init=False, repr=False)

    def __call__(self) -> int:
        """Run to the end; returns 0. Raises RuntimeError: the stage failed, or was ended by scancel."""
        import submitit

        job = submitit.JobEnvironment()
        about = {"RANK": str(job.global_rank), "WORLD_SIZE": str(job.num_tasks), "LOCAL_RANK": str(job.local_rank)}
        about |= {"LOCAL_WORLD_SIZE": str(job.num_tasks // job.num_nodes), "MASTER_PORT": _port(job.raw_job_id)}
        about["MASTER_ADDR"] = "127.0.0.1" if job.cluster == "local" else job.hostnames[0]
        if not self.gpus:
            about["CUDA_VISIBLE_DEVICES"] = ""  # GPUs of the node are not this job's
        elif about["LOCAL_RANK"] == "0":
            require_gpus(self.gpus)
        self.child = start_stage(self.module, self.arguments, about)
        while True:
            # A handler that runs inside poll() would wait for the lock that poll() holds.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
            code = self.child.poll()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
            if code is not None:
                break
            time.sleep(0.1)
        if code == REQUEUE and about["RANK"] != "0":
            sys.exit(0)  # no result: rank 0 has the job requeued
        if code:
            raise RuntimeError(f"{self.module} ended with code {code}; see its output above.")
        return 0

    def __getstate__(self) -> dict:
        return {**self.__dict__, "child": None}  # a process cannot be pickled


@dataclass
class ResumableStage(Stage):
    """A stage that saves on SIGUSR1, exits with 85, and resumes with the same arguments."""

    def checkpoint(self):
        """Make the run save; on SIGUSR2 submitit calls this on rank 0, and requeues the job with the returned value."""
        import submitit

        signal_at = 0.0
        while self.child and self.child.poll() is None:
            if time.monotonic() > signal_at:
                self.child.send_signal(signal.SIGUSR1)
                signal_at = time.monotonic() + SECONDS_BETWEEN_SIGNALS
            time.sleep(0.1)
        if self.child and self.child.returncode not in (0, REQUEUE):
            raise RuntimeError(f"{self.module} ended with code {self.child.returncode} when it was asked to save.")
        return submitit.helpers.DelayedSubmission(self)


def main() -> int:
    words = sys.argv[1:]
    return task(words[1], words[2:]) if words[0] == "task" else job(words[0], words[1:])


if __name__ == "__main__":
    run_command(main)
