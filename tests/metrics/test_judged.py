"""Average precision and ROC AUC of judged pairs against scikit-learn, and their bootstrap."""

import pytest
import torch

from probemb.metrics import cluster_weights, pair_metrics

sklearn = pytest.importorskip("sklearn.metrics")


def pairs(n=400, n_clusters=30, seed=0, decimals=None):
    g = torch.Generator().manual_seed(seed)
    label = torch.rand(n, generator=g) < 0.2
    scores = torch.randn(n, generator=g) + label
    cluster = torch.randint(n_clusters, (n,), generator=g)
    return (scores if decimals is None else scores.round(decimals=decimals)), label, cluster


@pytest.mark.parametrize("decimals", [None, 0])  # with few and many ties
def test_every_resample_is_scikit_learns(decimals):
    scores, label, cluster = pairs(decimals=decimals)
    weights = cluster_weights(30, 20)
    assert weights.shape == (21, 30)
    assert (weights.sum(1) == 30).all()
    assert (weights[0] == 1).all()
    found = pair_metrics(scores, label, (cluster, weights))
    for r, row in enumerate(weights):
        each = row[cluster]
        precision = sklearn.average_precision_score(label, scores, sample_weight=each)
        area = sklearn.roc_auc_score(label, scores, sample_weight=each)
        assert float(found.average_precision[r]) == pytest.approx(precision, abs=1e-12), r
        assert float(found.roc_auc[r]) == pytest.approx(area, abs=1e-12), r
        if r:  # a resample is the data with whole clusters repeated
            rows = [i for i, c in enumerate(cluster.tolist()) for _ in range(int(row[c]))]
            assert sklearn.roc_auc_score(label[rows], scores[rows]) == pytest.approx(area)


def test_two_ways_resample_both_images_and_captions(monkeypatch):
    monkeypatch.setattr("probemb.metrics.judged.BLOCK_ELEMENTS", 1000)
    scores, label, caption = pairs()
    image = torch.randint(20, (400,), generator=torch.Generator().manual_seed(9))
    ways = (image, cluster_weights(20, 30, 0)), (caption, cluster_weights(30, 30, 1))
    found = pair_metrics(scores, label, *ways)
    for r in range(31):
        counts = [int(ways[0][1][r, i] * ways[1][1][r, c]) for i, c in zip(image, caption)]
        rows = torch.arange(400).repeat_interleave(torch.tensor(counts))
        area = sklearn.roc_auc_score(label[rows], scores[rows])
        assert float(found.roc_auc[r]) == pytest.approx(area, abs=1e-12), r
