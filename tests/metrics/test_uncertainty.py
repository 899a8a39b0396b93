"""Bins, correlations and rejection curves."""

import numpy as np
import pytest
import torch

from probemb.metrics import average_ranks, pearson, rejection_curve, uncertainty_bins


def test_bins_are_of_equal_count_and_correlations_are_numpys_and_scipys():
    generator = torch.Generator().manual_seed(3)
    u = torch.rand(97, generator=generator).double().round(decimals=1)  # with ties
    score = (1 - u + 0.3 * torch.randn(97, generator=generator)).double()
    bins = uncertainty_bins(u, score)
    assert sum(bins.counts) == 97
    assert max(bins.counts) - min(bins.counts) <= 1
    assert bins.uncertainty == sorted(bins.uncertainty)
    parts = np.array_split(score[u.argsort(stable=True)].numpy(), 10)
    assert bins.accuracy_se == pytest.approx([part.std(ddof=1) / len(part) ** 0.5 for part in parts])
    assert bins.pearson == pytest.approx(np.corrcoef(bins.uncertainty, bins.accuracy)[0, 1])
    stats = pytest.importorskip("scipy.stats")
    assert bins.spearman == pytest.approx(stats.spearmanr(u, score).statistic)
    assert average_ranks(torch.tensor([3.0, 1.0, 3.0])).tolist() == [1.5, 0.0, 1.5]


def test_correlations_of_constants_are_undefined_and_nan_scores_are_left_out():
    assert pearson(torch.ones(3), torch.arange(3.0)) is None
    constant = torch.full((3,), 0.05, dtype=torch.float64)  # whose rounded mean is another number
    assert pearson(constant, constant) is None
    assert pearson(torch.arange(3.0).double(), constant) is None
    bins = uncertainty_bins(torch.arange(4.0), torch.tensor([1.0, torch.nan, 0.0, 1.0]))
    assert sum(bins.counts) == 3
    assert uncertainty_bins(torch.ones(1), torch.ones(1)) is None


def test_bins_may_be_cut_over_items_without_a_score():
    u, score = torch.arange(6.0), torch.tensor([1.0, torch.nan, torch.nan, torch.nan, 0.0, 1.0])
    assert uncertainty_bins(u, score, 3).counts == [1, 1, 1]
    assert uncertainty_bins(u, score, 3).accuracy_se == [None] * 3
    bins = uncertainty_bins(u, score, 3, cut_over_all=True)
    assert (bins.counts, bins.accuracy) == ([1, 2], [1.0, 0.5])  # the middle bin holds no score


def test_refusing_the_most_uncertain_equals_its_definition():
    u = torch.tensor([0.5, 0.1, 0.9, 0.3])
    score = torch.tensor([0.0, 1.0, 0.0, 1.0])
    curve = rejection_curve(u, score, refused=(0, 0.25, 0.5, 0.9))
    assert curve.score == pytest.approx([0.5, 2 / 3, 1, 1])
    assert curve.area == pytest.approx((1 + 1 + 2 / 3 + 0.5) / 4)
    assert curve.area == pytest.approx(curve.oracle)
    assert curve.random == 0.5
    assert rejection_curve(-u, score).area == pytest.approx((0 + 0 + 1 / 3 + 0.5) / 4)
