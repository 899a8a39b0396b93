"""Every check of the GPU in its reduced form on the CPU, and in its whole form where there is a GPU."""

import time

import pytest
import torch

from pretrain.engine.engine import import_deepspeed
from tests.ranks import run_ranks
from tools.bench.gpu.checks import AT_ONCE, CHECKS, longest
from tools.bench.gpu.notes import Notes, Place
from tools.bench.gpu.running import run_checks

import_deepspeed()
torch.compile(len)  # what DeepSpeed's first engine imports: here rather than in every rank
for check in CHECKS.values():
    check.load()
SLOW = ("devices", "resume", "finetune", "faiss", "memory", "speed-B-32", "speed-L-14")


def check_here(rank: int, world: int, name: str) -> Notes:
    notes = Notes()
    CHECKS[name].load()(Place(True, time.monotonic() + 600), notes)
    return notes


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CHECKS])
def test_the_reduced_form_passes_on_a_cpu(name):
    if torch.cuda.is_available():
        pytest.skip("the whole form runs here")
    # Its data workers are children, which a rank of `run_ranks` may not have.
    notes = check_here(0, 1, name) if name in ("loader", "decoding") else run_ranks(1, check_here, name)[0]
    assert [sentence for sentence, held in notes.claims if not held] == []
    assert notes.claims
    assert notes.values
    assert "" not in notes.skipped


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", [name for name, check in CHECKS.items() if not check.alone])
def test_the_whole_form_passes_on_a_gpu(name):
    (outcome,) = run_checks({name: CHECKS[name]}, small=False, factor=2.0, at_once=1, tell=print)
    assert outcome.fine, outcome


def test_all_checks_together_take_nine_minutes_at_most():
    assert longest(CHECKS, AT_ONCE) <= 9 * 60
