"""NaN and Inf on one rank of real engines: all ranks notice in the same step, nothing is stepped, samples are named."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pretrain.config import Config, Engine, Optimizer
from probemb import create_model
from probemb.errors import UserError
from tests.ranks import run_ranks
from tests.steps import random_pairs, snapshot, take_step, trainer_of

BATCH = 12
CONFIG = Config(batch_size=BATCH, optimizer=Optimizer(lr=1e-2, warmup_samples=8))


def make_trainer(stage, parts, on_nonfinite):
    config = replace(CONFIG, engine=Engine(zero_stage=stage, accumulation=parts), on_nonfinite=on_nonfinite)
    torch.manual_seed(0)
    return trainer_of(config, create_model("ViT-Micro-32"))


def batch(step, rank, world):
    """This rank's images, tokens and keys."""
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    keys = [f"a.tar/{step}-{row}" for row in range(BATCH)]
    return *(x[mine] for x in random_pairs(BATCH, step)), keys[mine]


def poison(fit, kind, images, step):
    """On one rank: a sample, or only the gradient of a weight. Returns what undoes it."""
    if kind == "sample":
        images[1, 0, 3, 3] = float("nan")
        return lambda: None
    handle = fit.engine.flat.flats[-1].register_hook(lambda g: g * float("inf"))
    return handle.remove


def steps_with_poison(rank, world, stage, parts, kind):
    """Steps 1, 2, 3 where the last rank's step 2 is poisoned and skipped; and steps 1 and 3 alone."""
    out = []
    for with_bad_step in (True, False):
        fit = make_trainer(stage, parts, "skip")
        results = []
        for step in (1, 2, 3):
            images, tokens, keys = batch(step, rank, world)
            if step == 2 and not with_bad_step:
                continue
            undo = poison(fit, kind, images, step) if step == 2 and rank == world - 1 else lambda: None
            fit.samples = step * BATCH  # the rate follows from it
            results.append("loss" in take_step(fit, images, tokens, keys))
            undo()
        out.append((results, fit.skipped, snapshot(fit.engine)))
    return out


@pytest.mark.parametrize(
    ("world", "stage", "parts", "kind"),
    [(2, 0, 2, "gradient"), (2, 3, 2, "sample"), pytest.param(2, 1, 1, "sample", marks=pytest.mark.slow)],
)
def test_a_skipped_step_leaves_nothing_behind_on_any_rank(world, stage, parts, kind):
    results = run_ranks(world, steps_with_poison, stage, parts, kind)
    for (with_bad, skipped, found), (without, none, expected) in results:
        assert (with_bad, skipped) == ([True, False, True], 1)
        assert (without, none) == ([True, True], 0)
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def stop_at_poison(rank, world, kind):
    fit = make_trainer(1, 1, "stop")
    take_step(fit, *batch(1, rank, world))
    before = snapshot(fit.engine)
    images, tokens, keys = batch(2, rank, world)
    if rank == 1:
        poison(fit, kind, images, 2)
    with pytest.raises(UserError) as error:
        take_step(fit, images, tokens, keys)
    after = snapshot(fit.engine)
    return error.value.what, all(np.array_equal(before[name], after[name]) for name in before)


def test_the_report_names_step_rank_terms_and_the_very_sample():
    (first, same), (second, also) = run_ranks(2, stop_at_poison, "sample")
    assert first == second
    assert same
    assert also
    assert "At step 2 the embedding is NaN or Inf on rank 1 (" in first
    assert "for the samples a.tar/2-7;" in first  # row 1 of rank 1's six
    assert "clip nan" in first
    (first, same), _ = run_ranks(2, stop_at_poison, "gradient")
    assert same
    assert "the gradient is NaN or Inf on rank" in first
    assert "clip nan" not in first
