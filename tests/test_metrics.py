"""Metrics against their definitions written out query by query."""

import pytest
import torch

from probemb import metrics


def case(q=40, g=60, seed=0, ties=False):
    r = torch.Generator().manual_seed(seed)
    scores = torch.randn(q, g, generator=r)
    if ties:
        scores = scores.round()
    match = torch.rand(q, g, generator=r) < 0.08
    match[3] = False  # a query without any match is left out
    return scores, match


def naive(scores, match, k):
    recall, precision, average = [], [], []
    for s, m in zip(scores, match):
        if not m.any():
            continue
        order = sorted(range(len(s)), key=lambda j: (-s[j].item(), j))
        hit = [bool(m[j]) for j in order]
        r = int(m.sum())
        recall.append(any(hit[:k]))
        precision.append(sum(hit[:r]) / r)
        average.append(sum(sum(hit[: i + 1]) / (i + 1) for i in range(r) if hit[i]) / r)
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    return mean(recall), mean(precision), mean(average)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [1, 5, 10])
def test_equal_their_definitions(k, ties, monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK_ELEMENTS", 500)  # several chunks
    scores, match = case(ties=ties)
    recall, precision, average = naive(scores, match, k)
    assert metrics.recall_at_k(scores, match, k) == pytest.approx(recall, abs=1e-12)
    assert metrics.r_precision(scores, match) == pytest.approx(precision, abs=1e-12)
    assert metrics.map_at_r(scores, match) == pytest.approx(average, abs=1e-12)


def test_a_collapsed_model_gets_no_credit_for_ties():
    """All scores equal: the ranking is the gallery's order, whatever the match is."""
    match = torch.eye(50, dtype=torch.bool)
    assert metrics.recall_at_k(torch.zeros(50, 50), match, 1) == pytest.approx(1 / 50)
    assert metrics.recall_at_k(torch.zeros(50, 50), match, 5) == pytest.approx(5 / 50)


def test_rsum_of_perfect_retrieval():
    perfect = metrics.retrieval_metrics(torch.eye(20), torch.eye(20))
    assert metrics.rsum(perfect, perfect) == pytest.approx(600)


def test_scores_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="NaN"):
        metrics.recall_at_k(torch.full((2, 2), float("nan")), torch.eye(2), 1)
    with pytest.raises(ValueError, match="no query has a match"):
        metrics.r_precision(torch.zeros(2, 2), torch.zeros(2, 2))
