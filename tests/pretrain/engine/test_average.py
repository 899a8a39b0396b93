"""The average of the weights on real engines against plain loops over whole weights; its checkpoints."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pretrain.config import Ema, Engine
from pretrain.engine.checkpoint import EngineState
from pretrain.schedules import step_weight
from tests.pretrain.engine.test_nonfinite import BATCH, CONFIG, batch
from tests.pretrain.test_trainer import tiny
from tests.ranks import run_ranks
from tests.steps import snapshot, trainer_of
from tests.steps import take_step as step_of

EMA = Ema(half_life_samples=3 * BATCH, rampup=0.5)
BAD, STEPS = 3, 5  # this step is NaN


def make_trainer(stage, parts=1, persistent=0, locked=False):
    config = replace(CONFIG, ema=EMA, engine=Engine(zero_stage=stage, accumulation=parts), on_nonfinite="skip")
    model = tiny()
    if locked:
        model.image_tower.requires_grad_(False)
    return trainer_of(config, model, persistent=persistent)


def take_step(fit, step, rank, world, poisoned=False):
    """At a position, from which its rate follows."""
    fit.step, fit.samples = step - 1, (step - 1) * BATCH
    images, tokens, keys = batch(step, rank, world)
    if poisoned and rank == world - 1:
        images[1, 0, 3, 3] = float("nan")
    return "loss" in step_of(fit, images, tokens, keys)


def numbers(tensors):
    return {name: t.numpy() for name, t in tensors.items()}


def follow(rank, world, stage, parts, persistent, locked):
    """The weights after every step, and the average."""
    fit, found = make_trainer(stage, parts, persistent, locked), []
    for step in range(1, STEPS + 1):
        stepped = take_step(fit, step, rank, world, poisoned=step == BAD)
        found.append((stepped, numbers(EngineState(fit.engine).weights()), numbers(fit.average.whole())))
    trained = {f"model.{name}" for name, p in fit.engine.module.model.named_parameters() if p.requires_grad}
    return trained, found


@pytest.mark.parametrize(
    ("world", "stage", "parts", "persistent", "locked"),
    [(2, 1, 2, 0, True), pytest.param(2, 3, 1, 10**5, False, marks=pytest.mark.slow)],
)
def test_the_average_is_that_of_a_plain_loop(world, stage, parts, persistent, locked):
    trained, steps = run_ranks(world, follow, stage, parts, persistent, locked)[0]
    assert [stepped for stepped, *_ in steps] == [step != BAD for step in range(1, STEPS + 1)]
    expected = None
    for step, (stepped, weights, found) in enumerate(steps, 1):
        assert found.keys() == trained
        if step == 1:
            expected = {name: weights[name].astype(np.float64) for name in trained}  # nothing of the random ones
        elif stepped:
            kept = 1 - step_weight(EMA, (step - 1) * BATCH, step * BATCH)
            expected = {name: kept * mean + (1 - kept) * weights[name] for name, mean in expected.items()}
        else:
            for name in trained:
                np.testing.assert_array_equal(found[name], steps[step - 2][2][name])
        for name in trained:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
    apart = max(np.abs(expected[name] - weights[name]).max() for name in trained)
    assert apart > 1e-3  # the weights have moved meanwhile


def evaluate_between(rank, world, stage, persistent):
    """Two steps, a look with the average in place, a step; and the same without looking."""
    out = []
    for look in (True, False):
        fit, seen = make_trainer(stage, persistent=persistent), None
        for step in (1, 2):
            take_step(fit, step, rank, world)
        if look:
            images, tokens, _ = batch(9, 0, 1)
            before = snapshot(fit.engine)
            with torch.no_grad():
                plain = fit.engine(images, tokens)[0].numpy()
                with fit.average.in_place():
                    seen = fit.engine(images, tokens)[0].numpy(), numbers(EngineState(fit.engine).weights())
                again = fit.engine(images, tokens)[0].numpy()
            after = snapshot(fit.engine)
            assert all(np.array_equal(before[name], after[name]) for name in before)
            assert np.array_equal(plain, again)
            assert np.abs(plain - seen[0]).max() > 1e-4
        means = numbers(fit.average.whole())
        take_step(fit, 3, rank, world)
        out.append((seen, means, snapshot(fit.engine), numbers(fit.average.whole())))
    return out


@pytest.mark.parametrize(("world", "stage", "persistent"), [(2, 1, 0), (2, 3, 10**5)])
def test_in_place_the_model_is_the_averaged_one_and_the_training_goes_on_as_without(world, stage, persistent):
    results = run_ranks(world, evaluate_between, stage, persistent)
    (_, weights), means, *_ = results[0][0]
    model = tiny()
    model.load_state_dict({name.removeprefix("model."): torch.from_numpy(value) for name, value in weights.items()})
    for name, mean in means.items():
        np.testing.assert_array_equal(weights[name], mean, err_msg=name)
    images, _tokens, _ = batch(9, 0, 1)
    with torch.no_grad():
        expected = model.encode_image(images).mean.numpy()
    for (seen, _, looked, averaged), (_, _, unlooked, other) in results:
        np.testing.assert_allclose(seen[0], expected, atol=1e-5)  # on every rank
        for name in unlooked:
            np.testing.assert_array_equal(looked[name], unlooked[name], err_msg=name)
        for name in other:
            np.testing.assert_array_equal(averaged[name], other[name], err_msg=name)
