"""Refusing uncertain queries: bounds against scipy, and that the promised precision is kept on new queries."""

import pytest
import torch

from probemb.metrics import highest_threshold, precision_curve
from probemb.metrics.selective import lower_bound


def queries(n, seed):
    """Queries that are right with the probability 1 - u."""
    g = torch.Generator().manual_seed(seed)
    u = torch.rand(n, generator=g)
    return u, torch.rand(n, generator=g) > u


@pytest.mark.parametrize(("hits", "n"), [(0, 5), (1, 5), (5, 5), (40, 50), (2_000, 2_500)])
@pytest.mark.parametrize("alpha", [0.05, 0.0025])
def test_bound_is_clopper_and_pearsons(hits, n, alpha):
    stats = pytest.importorskip("scipy.stats")
    truth = stats.beta.ppf(alpha, hits, n - hits + 1) if hits else 0
    assert lower_bound(hits, n, alpha) == pytest.approx(truth, abs=1e-9)


def test_curve_counts():
    u = torch.tensor([0.4, 0.1, 0.3, 0.2])
    curve = precision_curve(u, torch.tensor([False, True, False, True]), points=4)
    assert curve.threshold == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert curve.coverage == [0.25, 0.5, 0.75, 1]
    assert curve.precision == pytest.approx([1, 1, 2 / 3, 0.5])
    assert all(low < p for low, p in zip(curve.at_least, curve.precision))
    assert curve.queries == 4


def test_wanted_precision_is_kept_on_new_queries():
    new_u, new_correct = queries(100_000, seed=10_000)
    found = [highest_threshold(precision_curve(*queries(4_000, seed)), 0.6) for seed in range(12)]
    thresholds = [threshold for threshold in found if threshold is not None]
    assert len(thresholds) >= 10
    assert sum(bool(new_correct[new_u <= u].float().mean() < 0.6) for u in thresholds) <= 1
    ideal = 2 * (1 - 0.6)  # up to u the precision is 1 - u / 2
    assert sum(thresholds) / len(thresholds) > 0.5 * ideal


def test_out_of_reach():
    u, correct = queries(200, seed=0)
    assert highest_threshold(precision_curve(u, correct), 0.999) is None
    assert highest_threshold(precision_curve(u, torch.zeros(200, dtype=torch.bool)), 0.01) is None
    with pytest.raises(ValueError, match="give"):
        precision_curve(u, correct[:5])
    with pytest.raises(ValueError, match="give"):
        precision_curve(u[:0], correct[:0])
