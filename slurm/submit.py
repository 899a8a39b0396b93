"""Submit a stage to Slurm through submitit, or run it here in the same way.

    python -m slurm.submit pretrain --nodes 4 --gpus-per-node 8 --time 24:00:00 -- --config pretrain/configs/x.yaml
    python -m slurm.submit pretrain --nodes 4 --gpus-per-node 8 --dry-run -- --config …    # prints the sbatch file
    python -m slurm.submit pretrain --local --cpu --tasks-per-node 2 -- --config …         # no Slurm needed
    python -m slurm.submit finetune --gpus-per-node 1 --methods pcmepp,vse -- --data.path … --out runs/coco
    python -m slurm.submit pretrain --nodes 4 --gpus-per-node 8 --sweep sweep.txt -- --config …
    python -m slurm.submit embed --gpus-per-node 1 --parts 16 -- --model runs/x --data data/cc12m --out embeddings/x
    python -m slurm.submit build-index --cpu --cpus-per-task 32 -- --embeddings embeddings/x --out indexes/x

Words after `--` go to the stage. Several methods, the lines of a sweep, or parts become a job array. A run saves
`margin` seconds before the time limit, is requeued and resumes.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from jsonargparse.typing import PositiveInt

from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config
from probemb.cli.machine import refuse_crowd
from probemb.cli.ranges import Folder
from probemb.errors import UserError, nearest
from slurm.sweep import argument_lists

PROG = "python -m slurm.submit"
STAGES = {
    "pretrain": "pretrain.run",
    "finetune": "finetune.run",
    "zeroshot": "zeroshot.imagenet",
    "retrieval": "zeroshot.retrieval",
    "localisation": "zeroshot.localisation",
    "analyses": "zeroshot.analyses",
    "composed": "zeroshot.composed",
    "embed": "tools.embed",
    "build-index": "tools.build_index",
}
ONE_PROCESS = ("zeroshot", "retrieval", "localisation", "analyses", "composed", "build-index")
TRAINERS = ("pretrain", "finetune")
SRUN_OPTIONS = ("--gpu-bind=none", "--kill-on-bad-exit=1", "--wait=600")
ROOT = Path(__file__).resolve().parents[1]
MAX_TIMEOUTS = 1000  # a run of weeks needs more requeues than submitit's default of three


@dataclass(frozen=True)
class Submission:
    """Resources and options of a job.

    Args:
        nodes: machines.
        gpus_per_node: GPUs of each, one rank for each GPU.
        cpu: run on CPUs, without GPUs.
        tasks_per_node: ranks on each node, with --cpu only.
        cpus_per_task: cores for each rank and its data workers.
        mem_gb: memory of each node in GB; empty for the cluster's default.
        time: limit of one start, as D-HH:MM:SS, HH:MM:SS, MM:SS or minutes.
        margin: seconds before the time limit at which the run is asked to save.
        partition: of the cluster.
        account: to charge.
        qos: quality of service.
        constraint: features that nodes must have.
        sbatch: further options of sbatch, as KEY=VALUE, --sbatch '["reservation=course", "exclusive"]'.
        methods: finetuning methods, separated by commas: a job array, each in the folder of its name in --out.
        sweep: a file with one line of arguments for each run, with an --out of its own: a job array.
        parts: jobs that share the shards of `embed`: a job array.
        parallel: runs of a job array at a time.
        name: of the job; the stage's if empty.
        folder: for sbatch files and logs, on a file system that all nodes share.
        dry_run: print the sbatch file and submit nothing.
        local: run here, without Slurm, and wait for the end.
    """

    nodes: PositiveInt = 1
    gpus_per_node: int | None = None
    cpu: bool = False
    tasks_per_node: PositiveInt | None = None
    cpus_per_task: PositiveInt = 8
    mem_gb: float | None = None
    time: str = "24:00:00"
    margin: PositiveInt = 300
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    sbatch: list[str] | str = field(default_factory=list)
    methods: str | None = None
    sweep: str | None = None
    parts: int | None = None
    parallel: PositiveInt = 256
    name: str | None = None
    folder: Folder = "runs/slurm"
    dry_run: bool = False
    local: bool = False

    @property
    def ranks_per_node(self) -> int:
        return (self.tasks_per_node or 1) if self.cpu else self.gpus_per_node


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; every check comes before anything is written."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    own, passed_on = words[:end], words[end + 1 :]
    stage = own.pop(0) if own and not own[0].startswith("-") else None
    if stage is not None and stage not in STAGES:
        raise UserError(f"There is no stage {stage}.{nearest(stage, STAGES)}", f"Choose one of {', '.join(STAGES)}.")
    description = f"Submit a stage to Slurm: {PROG} {{{','.join(STAGES)}}} OPTIONS -- ARGUMENTS OF THE STAGE."
    given = parse_config(Submission, PROG, description, own)
    if stage is None:
        raise UserError("No stage was named.", f"Write it first: {PROG} pretrain --nodes 4 --gpus-per-node 8 -- ….")
    runs = argument_lists(stage, passed_on, given.methods, given.sweep, given.parts)
    check(stage, given)
    os.environ.pop("SUBMITIT_PREEMPT_SIGNAL", None)  # slurm.rank listens to submitit's own signal, USR2
    if given.dry_run:
        print(sbatch_file(stage, given, len(runs)))
        return 0
    if given.local:
        return max(run_here(stage, given, one) for one in runs)
    submit(stage, given, runs)
    return 0


def seconds(text: str) -> int:
    """Seconds of a time in one of Slurm's forms. Raises UserError."""
    days, _, clock = str(text).rpartition("-")
    parts = clock.split(":")
    if not re.fullmatch(r"(\d+-\d+(:\d+){0,2})|(\d+(:\d+){0,2})", str(text)):
        raise UserError(f"--time {text} is not a time.", "Write it as 24:00:00, 2-00:00:00 or 90 (minutes).")
    numbers = [int(part) for part in parts]
    if days:  # D-HH, D-HH:MM, D-HH:MM:SS
        numbers = [*numbers, 0, 0][:3]
    elif len(numbers) == 1:  # MM
        numbers = [0, numbers[0], 0]
    else:  # MM:SS, HH:MM:SS
        numbers = [0, *numbers][-3:]
    hours, minutes, rest = numbers
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + rest


def check(stage: str, given: Submission) -> None:
    """Refuse a submission that cannot run. Raises UserError."""
    if given.cpu and given.gpus_per_node:
        raise UserError("--cpu and --gpus-per-node exclude each other.", "Leave one of them out.")
    if not given.cpu and (given.gpus_per_node or 0) < 1:
        raise UserError("The job asks for no GPUs.", "Add --gpus-per-node N, or --cpu to run on CPUs.")
    if not given.cpu and given.tasks_per_node not in (None, given.gpus_per_node):
        raise UserError(
            f"{given.tasks_per_node} tasks are to share {given.gpus_per_node} GPUs of a node.",
            "Leave --tasks-per-node out: every GPU gets one.",
        )
    if seconds(given.time) <= given.margin:
        raise UserError(
            f"--time {given.time} is not longer than the {given.margin} s kept for the last checkpoint.",
            "Give a longer --time, or a shorter --margin if a step and a checkpoint fit into it.",
        )
    if stage in ONE_PROCESS and given.nodes * given.ranks_per_node != 1:
        raise UserError(f"The stage {stage} runs in one process.", "Ask for --nodes 1 and one GPU.")
    if given.local and given.nodes != 1:
        raise UserError(f"--local has one machine, not {given.nodes}.", "Leave --nodes out.")
    if given.local:
        refuse_crowd(given.ranks_per_node, "--tasks-per-node" if given.cpu else "--gpus-per-node")
    if not (given.local or given.dry_run) and not shutil.which("sbatch"):
        raise UserError("This machine has no sbatch.", "Submit from a login node of the cluster, or add --local.")


def make_stage(stage: str, given: Submission, arguments: list[str]):
    """Build the task of every rank of the job."""
    from slurm.rank import ResumableStage, Stage

    gpus = 0 if given.cpu else given.gpus_per_node
    if stage in TRAINERS:
        arguments = ["--resume", f"--engine.threads={given.cpus_per_task}", *arguments]
    kind = ResumableStage if stage in (*TRAINERS, "embed") else Stage  # embed always resumes
    return kind(STAGES[stage], arguments, gpus)


def parameters(stage: str, given: Submission) -> dict:
    """Parameters of submitit's Slurm executor."""
    threads = given.cpus_per_task if stage == "build-index" else "${OMP_NUM_THREADS:-1}"  # FAISS' threads
    more = [given.sbatch] if isinstance(given.sbatch, str) else given.sbatch
    pairs = [option.lstrip("-").partition("=") for option in more]
    wanted = {
        "job_name": given.name or stage,
        "nodes": given.nodes,
        "ntasks_per_node": given.ranks_per_node,
        "gpus_per_node": None if given.cpu else given.gpus_per_node,
        "cpus_per_task": given.cpus_per_task,
        "mem": None if given.mem_gb is None else f"{given.mem_gb:g}GB",
        "time": -(-seconds(given.time) // 60),
        "signal_delay_s": given.margin,
        "partition": given.partition,
        "account": given.account,
        "qos": given.qos,
        "array_parallelism": given.parallel,
        "constraint": given.constraint,
        "stderr_to_stdout": True,
        "additional_parameters": {"requeue": True} | {key: value or True for key, _, value in pairs},
        "setup": [
            f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
            f"export OMP_NUM_THREADS={threads} NCCL_DEBUG=${{NCCL_DEBUG:-WARN}}",
            "unset SUBMITIT_PREEMPT_SIGNAL",
        ],
        # srun does not inherit --cpus-per-task from sbatch; with NCCL all ranks of a node must see all of its GPUs.
        "srun_args": [f"--cpus-per-task={given.cpus_per_task}", *SRUN_OPTIONS],
    }
    return {key: value for key, value in wanted.items() if value is not None}


def sbatch_file(stage: str, given: Submission, runs: int = 1) -> str:
    """The file that submitit would hand to sbatch."""
    from submitit.slurm.slurm import _make_sbatch_string

    folder = Path(given.folder).absolute()
    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    array = {"map_count": runs} if runs > 1 else {}
    return _make_sbatch_string(command=command, folder=folder, **parameters(stage, given), **array)


def submit(stage: str, given: Submission, runs: list[list[str]]) -> None:
    """Submit the job, an array for several runs, and print where its log is."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    folder = Path(given.folder).absolute()
    executor = SlurmExecutor(folder, max_num_timeout=MAX_TIMEOUTS)
    executor.update_parameters(**parameters(stage, given))
    try:
        with leaving_nothing(folder, FailedJobError):
            jobs = executor.submit_array([make_stage(stage, given, arguments) for arguments in runs])
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        reason = " ".join(str(error).split())[-300:].rstrip(".")
        raise UserError(f"Slurm refused the job: {reason}.", f"Inspect it with {PROG} {stage} … --dry-run.") from error
    ranks = given.nodes * given.ranks_per_node
    size = f"{given.nodes} nodes, {ranks} ranks on {'CPUs' if given.cpu else 'GPUs'}"
    for job, arguments in zip(jobs, runs):
        print(f"job {job.job_id}: {stage}, {size}{f' ({shlex.join(arguments)})' if len(runs) > 1 else ''}")
        print(f"log {job.paths.stdout} (rank 0)")
    number = jobs[0].job_id.split("_")[0]
    print(f"see squeue --job {number}; end it with scancel {number}")


@contextmanager
def leaving_nothing(folder: Path, refusal: type[Exception]) -> Iterator[None]:
    """If sbatch refuses the job, remove the files that submitit has written into `folder` by then, and what it made of
    the folder. Submissions into one folder take turns, so that no other one's files are removed.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        before = set(folder.iterdir())
        try:
            yield
        except refusal:
            for path in set(folder.iterdir()) - before:
                if re.fullmatch(r"[0-9a-f]{32}\.pkl|\.submission_file_[0-9a-f]{32}\.sh", path.name):
                    path.unlink(missing_ok=True)
            for path in made:
                with suppress(OSError):  # somebody uses it by now
                    path.rmdir()
            raise
    finally:
        os.close(handle)


def run_here(stage: str, given: Submission, arguments: list[str]) -> int:
    """Run the job on this machine and show rank 0's log; returns 0 or 1."""
    from submitit.local.local import LocalExecutor

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("OMP_NUM_THREADS", str(given.cpus_per_task) if stage == "build-index" else "1")
    executor = LocalExecutor(Path(given.folder).absolute(), max_num_timeout=MAX_TIMEOUTS)
    executor.update_parameters(
        timeout_min=seconds(given.time) / 60,
        signal_delay_s=given.margin,
        gpus_per_node=given.gpus_per_node or 0,
        tasks_per_node=given.ranks_per_node,
        stderr_to_stdout=True,
    )
    job = executor.submit(make_stage(stage, given, arguments))
    log, shown = job.paths.stdout, 0
    print(f"log {log}", flush=True)
    try:
        while True:
            done = job.done()
            if log.is_file():
                with log.open(errors="replace") as file:
                    file.seek(shown)
                    print(file.read(), end="", flush=True)
                    shown = file.tell()
            if done:
                break
            time.sleep(0.3)
    except KeyboardInterrupt:
        job.cancel()
        raise
    ranks = [task.paths.result_pickle.is_file() and task.exception() is None for task in job._sub_jobs or [job]]
    if all(ranks):
        return 0
    failed = ", ".join(str(rank) for rank, fine in enumerate(ranks) if not fine)
    print(f"error: rank {failed} failed.\n       Read the logs in {log.parent}.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    run_command(main)
