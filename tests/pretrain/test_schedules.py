"""Schedules against open_clip's, and against their formulas at ends and corners."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from open_clip_train.scheduler import const_lr_cooldown, cosine_lr

from pretrain.config import Ema, Optimizer
from pretrain.schedules import check_schedule, learning_rate, step_weight
from probemb.errors import UserError

TOTAL, WARMUP, COOLDOWN = 1100, 100, 400
O = Optimizer(lr=2.0, warmup_samples=WARMUP)
COOLED = replace(O, cooldown_samples=COOLDOWN, end_lr=0.5)


@pytest.mark.parametrize("schedule", ["cosine", "constant", "constant-cooldown", "inverse-sqrt", "wsd"])
def test_all_warm_up_linearly_and_are_continuous(schedule):
    o = replace(COOLED, schedule=schedule)
    assert [learning_rate(o, s, TOTAL) for s in (0, 50, 100)] == [0.0, 1.0, 2.0]
    rates = [learning_rate(o, s, TOTAL) for s in range(TOTAL + 1)]
    steps = [b - a for a, b in pairwise(rates)]
    assert max(map(abs, steps)) < (1.5 / math.sqrt(COOLDOWN) + 1e-9 if schedule == "wsd" else 0.021)
    assert max(steps[WARMUP:]) <= 0


def test_cosine_and_cooldown_are_open_clips():
    group = SimpleNamespace(param_groups=[{}])
    theirs = {
        "cosine": (cosine_lr(group, 2.0, WARMUP, TOTAL), O),
        "constant-cooldown": (const_lr_cooldown(group, 2.0, WARMUP, TOTAL, COOLDOWN, 1.0, 0.5), COOLED),
    }
    curved = replace(COOLED, cooldown_power=2.5)
    theirs["curved"] = const_lr_cooldown(group, 2.0, WARMUP, TOTAL, COOLDOWN, 2.5, 0.5), curved
    for name, (rate, o) in theirs.items():
        o = replace(o, schedule="constant-cooldown" if name == "curved" else name)
        for step in range(TOTAL):  # of one sample; open_clip warms up by the steps done after this one
            seen = step + 1 if step < WARMUP else step
            assert learning_rate(o, seen, TOTAL) == pytest.approx(rate(step), abs=1e-12), (name, step)


def test_ends_and_corners():
    def rates(schedule, *samples, o=COOLED):
        return [learning_rate(replace(o, schedule=schedule), s, TOTAL) for s in samples]

    assert rates("cosine", 600, TOTAL, o=O) == pytest.approx([1.0, 0.0])
    assert rates("cosine", 600, TOTAL, 2 * TOTAL, o=replace(O, end_lr=0.5)) == pytest.approx([1.25, 0.5, 0.5])
    assert rates("constant", 101, TOTAL, o=O) == [2.0, 2.0]
    assert rates("constant-cooldown", 700, 900, TOTAL, 2 * TOTAL) == pytest.approx([2.0, 1.25, 0.5, 0.5])
    assert rates("wsd", 700, 800, TOTAL) == pytest.approx([2.0, 0.5 + 1.5 * 0.5, 0.5])
    assert rates("inverse-sqrt", 400, TOTAL, o=O) == pytest.approx([1.0, 2 / math.sqrt(11)])
    top = 2 / math.sqrt(7)
    assert rates("inverse-sqrt", 400, 700, 900, TOTAL) == pytest.approx([1.0, top, (top + 0.5) / 2, 0.5])
    assert rates("constant", 0, 1, o=replace(O, warmup_samples=0)) == [2.0, 2.0]


@pytest.mark.parametrize(("half_life", "rampup"), [(300, 0.0), (300, 0.5), (300, 1.0), (50, 0.05), (10**9, 0.05)])
def test_what_an_average_forgets_is_an_integral_over_the_samples(half_life, rampup):
    """The decay of a step by numeric integration; it does not depend on how the samples are cut into steps."""
    ema = Ema(half_life_samples=half_life, rampup=rampup)
    for before, after in ((100, 164), (500, 700), (900, 2000)):
        s = np.linspace(before, after, 200_001)
        half_lives = np.minimum(half_life, rampup * s) if rampup else np.full_like(s, half_life)
        kept = math.exp(-math.log(2) * float(np.trapezoid(1 / half_lives, s)))
        assert 1 - step_weight(ema, before, after) == pytest.approx(kept, rel=1e-6)
        middle = (before + after) // 2
        parts = (1 - step_weight(ema, before, middle)) * (1 - step_weight(ema, middle, after))
        assert parts == pytest.approx(kept, rel=1e-6)
    assert step_weight(ema, 0, 64) == (1 if rampup else pytest.approx(1 - 0.5 ** (64 / half_life)))


def test_a_warm_up_must_fit_into_the_run():
    check_schedule(O, WARMUP)
    with pytest.raises(UserError, match=r"A warm-up of 100 and a cooldown of 0 samples do not fit"):
        check_schedule(O, 1)


@pytest.mark.parametrize("name", ["cooldown_samples", "cooldown_power", "end_lr"])
def test_an_end_that_a_schedule_does_not_have_is_refused(name):
    with pytest.raises(UserError, match=f"The schedule constant does not use optimizer.{name}"):
        check_schedule(Optimizer(schedule="constant", **{name: 2}))
