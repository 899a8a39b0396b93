"""The pretraining command in processes forked from this one: `tests.jobs.Job` with all that it imports."""

from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

import tests.jobs

OPTIONS = {  # of a small run
    "data.workers": 0,
    "model.name": "ViT-Micro-32",
    "batch-size": 16,
    "optimizer.warmup_samples": 64,
    "log-every": 1,
    "engine.threads": 1,
}


@cache
def pretraining():
    """The command, with everything that its processes would import: here, once, rather than in each of them."""
    import torch
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    import pretrain.engine.zero
    import pretrain.start  # noqa: F401
    from pretrain.run import main

    torch.compile(len)  # DeepSpeed's first ZeRO engine imports torch's compiler, which takes seconds
    return main


class Job(tests.jobs.Job):
    """`python -m pretrain.run` on `ranks` ranks; arguments as there."""

    def __init__(self, options: dict, *words: str, ranks: int, output: Path, prepare=lambda rank: None, errors=None):
        main = pretraining()
        super().__init__(main, options, *words, ranks=ranks, output=output, prepare=prepare, errors=errors)


def finish(options: dict, *words: str, ranks: int) -> CompletedProcess:
    """Such a job to its end; the exit code is that of the first rank that did not end with 0."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        job = Job(options, *words, ranks=ranks, output=out, errors=err)
        code = next((code for code in job.wait(300) if code), 0)
        return CompletedProcess(words, code, out.read_text(), err.read_text())
