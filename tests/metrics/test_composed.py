"""Metrics of composed retrieval against plain loops."""

import math

import pytest
import torch

from probemb.metrics import Positives, composed, composed_metrics, mean_metrics, roc_auc


def world(q=9, g=40, seed=0, ties=False):
    """Scores (Q, G) and true targets; query 3 has none, query 4 one, query 5 nearly all."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(q, g, generator=generator)
    match = torch.rand(q, g, generator=generator) < torch.rand(q, 1, generator=generator) * 0.5
    match[3], match[4], match[5] = False, False, True
    match[4, 7], match[5, 0] = True, False
    return ((3 * scores).round() if ties else scores), match


def looped(scores, match, k):
    """R@K and R-Precision of one query."""
    order = sorted(range(len(scores)), key=lambda j: (-float(scores[j]), j))
    n_match = int(match.sum())
    if not n_match:
        return math.nan, math.nan
    found = sum(bool(match[j]) for j in order[:n_match])
    return float(any(bool(match[j]) for j in order[:k])), found / n_match


@pytest.mark.parametrize(("ties", "elements"), [(False, 1 << 20), (True, 100)])
def test_metrics_equal_the_loop(monkeypatch, ties, elements):
    monkeypatch.setattr(composed, "BLOCK_ELEMENTS", elements)
    scores, match = world(ties=ties)
    found = composed_metrics(lambda rows: scores[rows], Positives.from_matrix(match), ks=(1, 5, 10))
    for k in (1, 5, 10):
        for query in range(len(scores)):
            recall, precision = looped(scores[query], match[query], k)
            assert found[f"r@{k}"][query].item() == pytest.approx(recall, nan_ok=True)
            assert found["r_precision"][query].item() == pytest.approx(precision, nan_ok=True)
    assert 0 < mean_metrics(found)["r@5"] <= 1


@pytest.mark.parametrize("levels", [5, 1000])
def test_roc_auc_equals_the_loop(levels):
    g = torch.Generator().manual_seed(levels)
    label = torch.rand(60, generator=g) < 0.3
    score = ((torch.rand(60, generator=g) + 0.3 * label) * levels).round()
    pairs = [(float(a), float(b)) for a in score[label] for b in score[~label]]
    expected = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
    assert roc_auc(score, label) == pytest.approx(expected, abs=1e-12)
    assert roc_auc(-score, label) == pytest.approx(1 - expected, abs=1e-12)
