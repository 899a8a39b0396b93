"""Calibration against scikit-learn and plain loops."""

import pytest
import torch

from probemb.metrics import fit_logistic, reliability


def items(n=2000, seed=0):
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(n, generator=g, dtype=torch.float64) ** 3
    return p, torch.binomial(torch.full((n,), 3.0, dtype=torch.float64), p, generator=g) / 3


def test_bins_in_a_plain_loop():
    p, share = items()
    p[0], p[1] = 0.0, 1.0
    found = reliability(p, share, n_bins=10)
    bins = [[] for _ in range(10)]
    for x, y in zip(p.tolist(), share.tolist()):
        bins[min(int(x * 10), 9)].append((x, y))
    means = [[sum(column) / len(rows) for column in zip(*rows)] for rows in bins if rows]
    assert found.predicted == pytest.approx([m[0] for m in means])
    assert found.observed == pytest.approx([m[1] for m in means])
    assert found.counts == [len(rows) for rows in bins if rows]
    error = sum(len(rows) * abs(m[0] - m[1]) for rows, m in zip([b for b in bins if b], means)) / len(p)
    assert found.ece == pytest.approx(error)
    assert found.ece < 0.03  # drawn with these probabilities
    assert reliability(p.sqrt(), share).ece > 0.1
    label = (share > 0.5).double()
    brier = pytest.importorskip("sklearn.metrics").brier_score_loss(label, p)
    assert reliability(p, label).brier == pytest.approx(brier)


def test_the_fit_has_the_least_cross_entropy():
    """Its gradient is zero, far from the origin too; and it finds the parameters of data drawn from it."""
    g = torch.Generator().manual_seed(0)
    x = 100 + 30 * torch.randn(4000, generator=g, dtype=torch.float64)
    share = torch.binomial(torch.full_like(x, 3), torch.sigmoid(0.05 * x - 7), generator=g) / 3
    a, b = fit_logistic(x, share)
    residual = torch.sigmoid(a * x + b) - share
    assert abs(float(residual.mean())) < 1e-5
    assert abs(float((residual * (x - x.mean()) / x.std()).mean())) < 1e-5
    assert (a, b) == pytest.approx((0.05, -7), rel=0.1)
