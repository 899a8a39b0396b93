"""Every check of the GPU in its reduced form on the CPU, and in its whole form where there is a GPU."""

import time

import pytest
import torch

from tests.ranks import run_ranks
from tools.bench.gpu.checks import AT_ONCE, CHECKS, longest
from tools.bench.gpu.notes import Notes, Place
from tools.bench.gpu.running import run_checks

COMMANDS = ("devices", "resume", "finetune", "faiss")  # start processes of their own


def check_here(rank: int, world: int, name: str) -> Notes:
    notes = Notes()
    CHECKS[name].load()(Place(True, time.monotonic() + 600), notes)
    return notes


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in COMMANDS)) for name in CHECKS])
def test_the_reduced_form_passes_on_a_cpu(name):
    if torch.cuda.is_available():
        pytest.skip("the whole form runs here")
    (notes,) = run_ranks(1, check_here, name)
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
