"""Rank correlations and gains of refusal with their standard errors, against scipy, plain loops and the bootstrap."""

import pytest
import torch

from probemb.metrics.prediction import Estimate, halves, rank_correlation, rejection_gain
from probemb.metrics.uncertainty import rejection_curve


def world(n_images=150, captions=5, effect=0.6, seed=0):
    """Scores, outcomes 0 or 1 that fall with them, and images whose captions share part of both."""
    r = torch.Generator().manual_seed(seed)
    image = torch.arange(n_images).repeat_interleave(captions)
    shared = torch.randn(n_images, generator=r)[image]
    score = shared + torch.randn(len(image), generator=r)
    luck = 0.7 * torch.randn(n_images, generator=r)[image] + torch.randn(len(image), generator=r)
    return score, (luck - effect * score > 0).double(), image


def resampled(measure, score, outcome, image, n=300):
    r = torch.Generator().manual_seed(1)
    rows = [(image == one).nonzero().flatten() for one in range(int(image.max()) + 1)]
    values = []
    for _ in range(n):
        drawn = torch.cat([rows[i] for i in torch.randint(len(rows), (len(rows),), generator=r).tolist()])
        values.append(measure(score[drawn], outcome[drawn]))
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("effect", [0.0, 0.6])
def test_standard_errors_are_those_of_images_drawn_again(effect):
    score, outcome, image = world(effect=effect)
    for measure in (rank_correlation, rejection_gain, lambda *data: halves(*data).difference):
        found = measure(score, outcome, image)
        spread = resampled(lambda s, o: measure(s, o).value, score, outcome, image).std().item()  # noqa: B023
        assert 0.85 < found.se / spread < (1.15 if effect == 0 else 1.4)  # an effect widens them
        alone = measure(score, outcome)
        assert alone.value == found.value
        assert alone.se < found.se  # captions of an image depend on each other


def test_values_are_scipys_and_those_of_the_definitions():
    stats = pytest.importorskip("scipy.stats")
    score, outcome, _ = world(20)
    score = score.round(decimals=1)  # with ties
    assert rank_correlation(score, outcome).value == pytest.approx(stats.spearmanr(score, outcome).statistic)
    curve = rejection_curve(score, outcome)
    gain = rejection_gain(score, outcome)
    assert gain.value == pytest.approx((curve.area - curve.random) / (curve.oracle - curve.random))
    parts = halves(score, outcome)
    middle = score.median()
    assert parts.certain > parts.rest
    assert parts.difference.value == pytest.approx(parts.certain - parts.rest)
    assert parts.certain == pytest.approx(float(outcome[score < middle].mean()), abs=0.1)
    assert rejection_gain(1 - outcome, outcome).value == pytest.approx(1)
    assert rejection_gain(outcome, outcome).value < 0


def test_what_is_unknown_or_constant_has_no_answer():
    known, nan = torch.arange(4.0), torch.tensor([1.0, torch.nan, 0.0, 1.0])
    assert rank_correlation(known, torch.ones(4)) is None
    assert rank_correlation(known[:2], known[:2]) is None
    assert rejection_gain(known, torch.ones(4)) is None
    assert rejection_gain(known, torch.full((4,), torch.nan)) is None
    assert halves(torch.ones(4), known) is None
    assert rank_correlation(known, nan).value == pytest.approx(rank_correlation(known[[0, 2, 3]], nan[[0, 2, 3]]).value)
    assert (Estimate(0.0, 0.0).z, Estimate(2.0, 0.5).z, Estimate(1.0, 0.0).z) == (0.0, 4.0, float("inf"))
