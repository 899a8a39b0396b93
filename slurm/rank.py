"""Run one rank of a stage under submitit.

The stage is a child process, so that it has the trainer's signal handlers and this one submitit's: on USR2 submitit
has rank 0 call `checkpoint`, and requeues the job when that returns.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

from probemb.runs.preemption import REQUEUE

PR_SET_PDEATHSIG = 1
SECONDS_BETWEEN_SIGNALS = 5


@dataclass
class Stage:
    """`python -m module arguments` as the rank that submitit's environment describes.

    Args:
        gpus: that torch must see on every node; 0 for a run on CPUs.
    """

    module: str
    arguments: list[str]
    gpus: int = 0
    child: subprocess.Popen | None = field(default=None, init=False, repr=False)

    def __call__(self) -> int:
        """Run to the end; returns 0.

        Raises:
            RuntimeError: the stage failed, or was ended by scancel (then it has saved, and is not requeued).
            SystemExit: a rank other than 0 was asked to stop; rank 0 has the job requeued.
        """
        import submitit

        environment = rank_environment(submitit.JobEnvironment())
        if not self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # GPUs of the node are not this job's
        elif environment["LOCAL_RANK"] == "0":
            require_gpus(self.gpus)
        print(f"== start on {environment['MASTER_ADDR']}:{environment['MASTER_PORT']}, rank {environment['RANK']}")
        self.child = subprocess.Popen(
            [sys.executable, "-u", "-m", self.module, *self.arguments],
            env={**os.environ, **environment},
            preexec_fn=_prepare_child,
        )
        code = self._wait()
        if code == REQUEUE and environment["RANK"] != "0":
            sys.exit(0)  # no result: the job resumes after the requeue
        if code:
            raise RuntimeError(
                f"{self.module} was ended by Slurm, after it had saved."
                if code == REQUEUE
                else f"{self.module} ended with code {code}; see its output above."
            )
        return 0

    def _wait(self) -> int:
        while True:
            # A handler that runs inside poll() would wait for the lock that poll() holds.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
            code = self.child.poll()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
            if code is not None:
                return code
            time.sleep(0.1)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "child": None}  # a process cannot be pickled


@dataclass
class ResumableStage(Stage):
    """A stage that saves on USR1, exits with 85, and resumes with --resume."""

    def checkpoint(self):
        """Make the run save; submitit calls this on rank 0 and requeues the job with the returned value.

        Raises:
            RuntimeError: the run failed instead.
        """
        import submitit

        last = 0.0
        while self.child and (code := self.child.poll()) is None:
            if time.monotonic() > last + SECONDS_BETWEEN_SIGNALS:  # ignored until the trainer has its handler
                self.child.send_signal(signal.SIGUSR1)
                last = time.monotonic()
            time.sleep(0.1)
        if self.child and code not in (0, REQUEUE):
            raise RuntimeError(f"{self.module} ended with code {code} when it was asked to save.")
        return submitit.helpers.DelayedSubmission(self)


def rank_environment(job) -> dict[str, str]:
    """RANK, WORLD_SIZE, … from submitit's JobEnvironment; ranks meet at the job's first node."""
    here = job.cluster == "local"
    return {
        "RANK": str(job.global_rank),
        "WORLD_SIZE": str(job.num_tasks),
        "LOCAL_RANK": str(job.local_rank),
        "LOCAL_WORLD_SIZE": str(job.num_tasks // job.num_nodes),
        "MASTER_ADDR": "127.0.0.1" if here else job.hostnames[0],
        "MASTER_PORT": str(10_000 + int(job.raw_job_id) % 20_000),  # below the ephemeral ports
    }


def require_gpus(wanted: int) -> None:
    """Raise RuntimeError if torch sees fewer GPUs than the job was given: the run would continue on CPUs."""
    check = "import sys, torch; sys.exit(torch.cuda.device_count() < int(sys.argv[1]))"
    if subprocess.run([sys.executable, "-c", check, str(wanted)]).returncode:
        raise RuntimeError(
            f"torch does not see the job's {wanted} GPUs on {os.uname().nodename}: "
            "look at nvidia-smi and the torch build there."
        )


def _prepare_child() -> None:
    """Ignore USR2, which is submitit's, and USR1 until the trainer has its handler; end with the parent."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
