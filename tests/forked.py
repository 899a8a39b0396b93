"""The pretraining command in processes forked from this one: `tests.jobs.Job` with all that it imports."""

from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

# DeepSpeed's first ZeRO engine imports torch's compiler, which takes seconds: here rather than in every process.
import torch

from pretrain.engine.engine import import_deepspeed

import_deepspeed()
torch.compile(len)
from tensorboard.compat.proto import event_pb2  # noqa: E402, F401

import pretrain.folder  # noqa: E402, F401
import tests.jobs  # noqa: E402
from pretrain.run import main  # noqa: E402


class Job(tests.jobs.Job):
    """`python -m pretrain.run` on `ranks` ranks; arguments as there."""

    def __init__(self, options: dict, *words: str, ranks: int, output: Path, prepare=lambda rank: None, errors=None):
        super().__init__(main, options, *words, ranks=ranks, output=output, prepare=prepare, errors=errors)


def finish(options: dict, *words: str, ranks: int) -> CompletedProcess:
    """Such a job to its end; the exit code is that of the first rank that did not end with 0."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        job = Job(options, *words, ranks=ranks, output=out, errors=err)
        code = next((code for code in job.wait(300) if code), 0)
        return CompletedProcess(words, code, out.read_text(), err.read_text())
