"""The pretraining command in processes forked from this one: `tests.jobs.Job` with all that it imports."""

from pathlib import Path

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

    def __init__(self, options: dict, *words: str, ranks: int, output: Path, prepare=lambda rank: None):
        super().__init__(main, options, *words, ranks=ranks, output=output, prepare=prepare)
