"""NaN and Inf on one rank of real engines: all ranks notice in the same step, nothing is stepped, samples are named."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from pretrain import trainer
from pretrain.config import Config, Engine, Optimizer
from pretrain.engine.engine import make_engine, start_deepspeed
from pretrain.engine.nonfinite import Evidence, as_error
from pretrain.engine.state import EngineState, full_state_dict
from probemb import create_model
from probemb.errors import UserError
from tests.ranks import run_ranks

BATCH, CPU = 12, torch.device("cpu")
CONFIG = Config(batch_size=BATCH, optimizer=Optimizer(lr=1e-2, warmup_samples=8))


def make_trainer(stage, parts, on_nonfinite):
    config = replace(CONFIG, engine=Engine(zero_stage=stage, accumulation=parts), on_nonfinite=on_nonfinite)
    start_deepspeed()
    torch.manual_seed(0)
    model = create_model("ViT-Micro-32")
    engine = make_engine(model, config, "fp32", CPU, persistent_elements=0)
    return trainer.Trainer(engine, None, config, CPU, steps=10)


def batch(step, rank, world):
    """This rank's images, tokens and keys."""
    g = torch.Generator().manual_seed(step)
    images, tokens = torch.randn(BATCH, 3, 32, 32, generator=g), torch.randint(1, 1000, (BATCH, 16), generator=g)
    tokens[:, -1] = 49407
    n = BATCH // world
    mine = slice(rank * n, (rank + 1) * n)
    return images[mine], tokens[mine], [f"a.tar/{step}-{row}" for row in range(BATCH)][mine]


def snapshot(engine):
    held = EngineState(engine)
    tensors = {**full_state_dict(engine), **held.moments()}
    return {n: t.numpy() for n, t in tensors.items()} | {f"step.{n}": s for n, s in held.steps().items()}


def poison(fit, kind, images, step):
    """On one rank: a sample, or only the gradient of a weight. Returns what undoes it."""
    if kind == "sample":
        images[1, 0, 3, 3] = float("nan")
        return lambda: None
    weight = fit.engine.module.model.get_parameter(PARAMETER)
    handle = weight.register_hook(lambda g: g * float("inf"))
    return handle.remove


PARAMETER = "scale"


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
            for group in fit.engine.optimizer.param_groups:
                group["lr"] = 1e-2 / step
            results.append(fit.train_step(images, tokens, keys) is not None)
            undo()
        out.append((results, fit.skipped, snapshot(fit.engine)))
    return out


@pytest.mark.parametrize(
    ("world", "stage", "parts", "kind"),
    [
        (1, 0, 1, "sample"),
        (2, 0, 2, "sample"),
        (2, 1, 1, "sample"),
        (2, 1, 2, "gradient"),
        (2, 2, 2, "sample"),
        (2, 2, 1, "gradient"),
        (1, 3, 1, "sample"),
        (2, 3, 2, "sample"),
    ],
)
def test_a_skipped_step_leaves_nothing_behind_on_any_rank(world, stage, parts, kind):
    results = run_ranks(world, steps_with_poison, stage, parts, kind)
    for (with_bad, skipped, found), (without, none, expected) in results:
        assert (with_bad, skipped) == ([True, False, True], 1)
        assert (without, none) == ([True, True], 0)
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def queue_with_poison(rank, world, stage, kind, on_nonfinite):
    """The same steps, queued one after the other without a look at their outcome."""
    fit, error, undo = make_trainer(stage, 1, on_nonfinite), None, None
    states = []
    for step in (1, 2, 3):
        fit.step = step - 1
        images, tokens, keys = batch(step, rank, world)
        if step == 2 and rank == world - 1:
            undo = poison(fit, kind, images, step)
        for group in fit.engine.optimizer.param_groups:
            group["lr"] = 1e-2 / step
        try:
            fit.queue_step(images, tokens, keys)
        except UserError as stopped:
            error = stopped.what
        if undo:
            undo()
        states.append(snapshot(fit.engine))
    return error, fit.skipped, None if error else fit.read_outcome() is not None, states


@pytest.mark.parametrize(
    ("world", "stage", "kind"), [(1, 0, "gradient"), (2, 3, "sample"), (3, 1, "sample"), (4, 2, "gradient")]
)
def test_steps_that_are_queued_ahead_are_skipped_alike(world, stage, kind):
    expected = [without[2] for _, without in run_ranks(world, steps_with_poison, stage, 1, kind)]
    for rank, (error, skipped, last, states) in enumerate(run_ranks(world, queue_with_poison, stage, kind, "skip")):
        assert (error, skipped, last) == (None, 1, True)
        for name, value in expected[rank].items():
            np.testing.assert_array_equal(states[2][name], value, err_msg=name)
            np.testing.assert_array_equal(states[1][name], states[0][name], err_msg=name)  # nothing was stepped


@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 0), (3, 3), (4, 1)])
def test_a_run_stops_before_the_step_that_follows_a_bad_one(world, stage):
    results = run_ranks(world, queue_with_poison, stage, "sample", "stop")
    assert len({error for error, *_ in results}) == 1
    assert "At step 2 the embedding is NaN or Inf" in results[0][0]
    assert "nothing was stepped" in results[0][0]
    for _, _, _, states in results:
        for name in states[0]:
            np.testing.assert_array_equal(states[2][name], states[0][name], err_msg=name)


def stop_at_poison(rank, world, kind):
    fit = make_trainer(1, 1, "stop")
    fit.train_step(*batch(1, rank, world))
    fit.step = 1
    before = snapshot(fit.engine)
    images, tokens, keys = batch(2, rank, world)
    if rank == 1:
        poison(fit, kind, images, 2)
    with pytest.raises(UserError) as error:
        fit.train_step(images, tokens, keys)
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


def evidence(**changed):
    whole = {
        "loss": torch.tensor(1.0),
        "terms": {"loss": torch.tensor(1.0)},
        "embeddings": [torch.ones(3, 2) for _ in range(4)],
        "gradients": [torch.ones(3, 2) for _ in range(4)],
        "gradient_norm": torch.tensor(1.0),
    }
    return Evidence(**{**whole, **changed})


def test_the_first_stage_that_is_wrong_is_blamed():
    keys = ["a", "b", "c"]
    assert not evidence().nonfinite()
    bad = torch.ones(3, 2)
    bad[2, 1] = float("inf")
    nan = torch.tensor(float("nan"))
    ok = [torch.ones(3, 2)] * 3
    reports = [
        evidence(loss=nan).report(0, keys),
        evidence(loss=nan, embeddings=[*ok, bad]).report(1, keys),
        evidence(gradients=[*ok, bad], gradient_norm=nan).report(2, keys),
        evidence(gradient_norm=nan).report(3, keys),
        evidence().report(4, keys),
    ]
    assert [(r["stage"], r["keys"]) for r in reports] == [
        ("loss", keys),
        ("embedding", ["c"]),
        ("gradient of the embedding", ["c"]),
        ("gradient", keys),
        ("", []),
    ]
    assert "on rank 1 " in as_error(7, reports, "x").what
    assert "on rank 0 " in as_error(7, [reports[4], reports[0], reports[3]], "x").what
    assert json.dumps(reports)
    many = evidence(loss=nan, embeddings=[torch.ones(30, 2)] * 4).report(0, [f"k{i}" for i in range(30)])
    assert "k7 and 22 more" in as_error(7, [many], "x").what
