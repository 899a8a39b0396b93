"""Submit a stage to Slurm through submitit.

    python -m slurm.submit pretrain --nodes 4 --gpus-per-node 8 --time 24:00:00 -- --config pretrain/configs/x.yaml
    python -m slurm.submit pretrain --nodes 4 --gpus-per-node 8 --dry-run -- --config …    # prints the sbatch file
    python -m slurm.submit finetune --gpus-per-node 1 --methods pcmepp,vse -- --data.path … --out runs/coco
    python -m slurm.submit pretrain --nodes 4 --gpus-per-node 8 --sweep sweep.txt -- --config …
    python -m slurm.submit embed --gpus-per-node 1 --parts 16 -- --model runs/x --data data/cc12m --out embeddings/x
    python -m slurm.submit build-index --cpu --cpus-per-task 32 -- --embeddings embeddings/x --out indexes/x

Words after `--` go to the stage. Several methods, the lines of a sweep, or parts become a job array. A run saves
`margin` seconds before the time limit, is requeued and resumes.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jsonargparse.typing import PositiveInt

from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config
from probemb.cli.ranges import Folder
from probemb.errors import UserError, nearest
from slurm.rank import GPU_BINDING, TRAINERS, ResumableStage, Stage, argument_lists

PROG = "python -m slurm.submit"
RESUMABLE = {"pretrain": "pretrain.run", "finetune": "finetune.run", "embed": "tools.embed"}  # on any number of ranks
STAGES = {**RESUMABLE, "zeroshot": "zeroshot.imagenet", "build-index": "tools.build_index"}
STAGES |= {name: f"zeroshot.{name}" for name in ("retrieval", "uncertainty", "localisation", "analyses", "composed")}
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
        time: limit of one start, as D-HH:MM:SS, HH:MM:SS, MM:SS or minutes.
        margin: seconds before the time limit at which the run is asked to save.
        partition: of the cluster.
        account: to charge.
        sbatch: further options of sbatch, as KEY=VALUE, --sbatch qos=long mem=64GB exclusive.
        methods: finetuning methods, separated by commas: a job array, each in the folder of its name in --out.
        sweep: a file with one line of arguments for each run, with an --out of its own: a job array.
        parts: jobs that share the shards of `embed`: a job array.
        parallel: runs of a job array at a time.
        folder: for sbatch files and logs, on a file system that all nodes share.
        dry_run: print the sbatch file and submit nothing.
    """

    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt | None = None
    cpu: bool = False
    tasks_per_node: PositiveInt | None = None
    cpus_per_task: PositiveInt = 8
    time: str = "24:00:00"
    margin: PositiveInt = 300
    partition: str | None = None
    account: str | None = None
    sbatch: list[str] | str = field(default_factory=list)
    methods: str | None = None
    sweep: str | None = None
    parts: PositiveInt | None = None
    parallel: PositiveInt = 256
    folder: Folder = "runs/slurm"
    dry_run: bool = False

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or self.tasks_per_node or 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; every check comes before anything is written."""
    words = [*(sys.argv[1:] if argv is None else argv), "--"]
    end = words.index("--")
    own, arguments = words[:end], words[end + 1 : -1]
    stage = own.pop(0) if own and not own[0].startswith("-") else ""
    description = f"Submit a stage to Slurm: {PROG} {{{','.join(STAGES)}}} OPTIONS -- ARGUMENTS OF THE STAGE."
    given = parse_config(Submission, PROG, description, own)
    check(stage, given)
    if given.parts:
        runs = [[*arguments, "--part", f"{i}/{given.parts}"] for i in range(1, given.parts + 1)]
    else:
        runs = argument_lists(arguments, given.methods, given.sweep)
    if STAGES[stage] in TRAINERS:
        runs = [["--resume", f"--engine.threads={given.cpus_per_task}", *run] for run in runs]
    os.environ.pop("SUBMITIT_PREEMPT_SIGNAL", None)  # slurm.rank listens to submitit's own signal, USR2
    submit(stage, given, runs)
    return 0


def check(stage: str, given: Submission) -> None:
    """Refuse a submission that cannot run. Raises UserError."""
    if stage not in STAGES:
        raise UserError(f"There is no stage '{stage}'.{nearest(stage, STAGES)}", f"Choose from {', '.join(STAGES)}.")
    if given.cpu == bool(given.gpus_per_node) or (given.gpus_per_node and given.tasks_per_node):
        remedy = "Give --gpus-per-node N, or --cpu and perhaps --tasks-per-node N."
        raise UserError("A job runs on GPUs, with a task for each, or on CPUs.", remedy)
    if stage not in RESUMABLE and given.nodes * given.ranks_per_node != 1:
        raise UserError(f"The stage {stage} runs in one process.", "Ask for --nodes 1 and one GPU.")
    if sum(map(bool, (given.methods, given.sweep, given.parts))) > 1:
        raise UserError("--methods, --sweep and --parts exclude each other.", "Give one of them.")


def parameters(stage: str, given: Submission) -> dict:
    """Parameters of submitit's Slurm executor."""
    threads = given.cpus_per_task if stage == "build-index" else "${OMP_NUM_THREADS:-1}"  # FAISS' threads
    more = [given.sbatch] if isinstance(given.sbatch, str) else given.sbatch
    pairs = [option.lstrip("-").partition("=") for option in more]
    wanted = {
        "job_name": stage,
        "nodes": given.nodes,
        "ntasks_per_node": given.ranks_per_node,
        "gpus_per_node": given.gpus_per_node,
        "cpus_per_task": given.cpus_per_task,
        "signal_delay_s": given.margin,
        "partition": given.partition,
        "account": given.account,
        "array_parallelism": given.parallel,
        "stderr_to_stdout": True,
        "additional_parameters": {"requeue": True, "time": given.time} | {k: value or True for k, _, value in pairs},
        "setup": [
            f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
            f"export OMP_NUM_THREADS={threads} NCCL_DEBUG=${{NCCL_DEBUG:-WARN}}",
            f"unset SUBMITIT_PREEMPT_SIGNAL; export PROBEMB_ALLOW_CPU={int(given.cpu)}",
        ],
        # srun does not inherit --cpus-per-task from sbatch.
        "srun_args": [f"--cpus-per-task={given.cpus_per_task}", "--kill-on-bad-exit=1", GPU_BINDING],
    }
    return {key: value for key, value in wanted.items() if value is not None}


def submit(stage: str, given: Submission, runs: list[list[str]]) -> None:
    """Submit the job, an array for several runs, and print where its log is, or for a dry run only the sbatch file."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

    folder, kind = Path(given.folder).absolute(), ResumableStage if stage in RESUMABLE else Stage
    if given.dry_run:
        command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
        array = {"map_count": len(runs)} if len(runs) > 1 else {}
        print(_make_sbatch_string(command=command, folder=folder, **parameters(stage, given), **array))
        return
    try:
        executor = SlurmExecutor(folder, max_num_timeout=MAX_TIMEOUTS)
        executor.update_parameters(**parameters(stage, given))
        jobs = executor.submit_array([kind(STAGES[stage], run) for run in runs])
    except (FailedJobError, FailedSubmissionError, OSError, RuntimeError) as error:
        reason = str(error).strip().rpartition("\n")[2][-300:].rstrip(".")  # sbatch has said the rest
        remedy = f"Submit from a login node; {PROG} {stage} … --dry-run shows the job."
        raise UserError(f"Slurm refused the job: {reason}.", remedy) from error
    ranks = given.nodes * given.ranks_per_node
    size = f"{given.nodes} nodes, {ranks} ranks on {'CPUs' if given.cpu else 'GPUs'}"
    for job, arguments in zip(jobs, runs):
        print(f"job {job.job_id}: {stage}, {size}{f' ({shlex.join(arguments)})' if len(runs) > 1 else ''}")
        print(f"log {job.paths.stdout} (rank 0)")
    number = jobs[0].job_id.split("_")[0]
    print(f"see squeue --job {number}; end it with scancel {number}")


if __name__ == "__main__":
    run_command(main)
