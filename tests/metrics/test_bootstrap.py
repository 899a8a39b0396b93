"""Bootstrap against plain loops over the same draws and scikit-learn, and the distribution that it should have."""

import pytest
import torch

from probemb.metrics import bootstrap
from probemb.metrics.bootstrap import cluster_weights, interval, pair_metrics, resample_accuracy

sklearn = pytest.importorskip("sklearn.metrics")


def answers(n=60, n_classes=4, q=3):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(n_classes - 1, (n,), generator=generator)  # the last class has no images
    chance = torch.tensor([0.3, 0.6, 0.9])[:q] + 0.05 * labels[:, None]
    return torch.rand(n, q, generator=generator) < chance, labels


def test_every_resample_is_that_of_plain_loops(monkeypatch):
    right, labels = answers()
    monkeypatch.setattr(bootstrap, "COUNT_ELEMENTS", 60 * 7)  # several blocks
    found = resample_accuracy(right, labels, 4, resamples=20, seed=5)
    generator = torch.Generator().manual_seed(5)
    drawn = torch.cat([torch.randint(60, (rows, 60), generator=generator) for rows in (7, 7, 6)])
    for r in range(20):
        for q in range(3):
            mine = [(bool(right[i, q]), int(labels[i])) for i in drawn[r].tolist()]
            assert found.accuracy[r, q] == pytest.approx(sum(hit for hit, _ in mine) / 60)
            shares = []
            for c in {c for _, c in mine}:
                own = [hit for hit, label in mine if label == c]
                shares.append(sum(own) / len(own))
            assert found.per_class[r, q] == pytest.approx(sum(shares) / len(shares))


def test_intervals_are_as_wide_as_the_binomial_ones_and_differences_are_paired():
    n = 2000
    right, labels = answers(n, q=2)
    right = torch.cat([right, right[:, :1]], 1)
    found = resample_accuracy(right, labels, 4, resamples=4000).accuracy
    for q in range(2):
        share = right[:, q].double().mean()
        low, high = interval(found[:, q])
        half = 1.96 * float(share * (1 - share) / n) ** 0.5
        assert low == pytest.approx(float(share) - half, abs=0.1 * half)
        assert high == pytest.approx(float(share) + half, abs=0.1 * half)
    assert interval(found[:, 0] - found[:, 2]) == (0, 0)  # equal answers do not differ on any resample


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
    assert weights.sum(1).tolist() == [30] * 21
    found = pair_metrics(scores, label, (cluster, weights))
    for r, row in enumerate(weights):
        each = row[cluster]
        precision = sklearn.average_precision_score(label, scores, sample_weight=each)
        area = sklearn.roc_auc_score(label, scores, sample_weight=each)
        assert float(found.average_precision[r]) == pytest.approx(precision, abs=1e-12), r
        assert float(found.roc_auc[r]) == pytest.approx(area, abs=1e-12), r


def test_two_ways_resample_both_images_and_captions(monkeypatch):
    monkeypatch.setattr("probemb.metrics.bootstrap.WEIGHT_ELEMENTS", 1000)
    scores, label, caption = pairs()
    image = torch.randint(20, (400,), generator=torch.Generator().manual_seed(9))
    ways = (image, cluster_weights(20, 30, 0)), (caption, cluster_weights(30, 30, 1))
    found = pair_metrics(scores, label, *ways)
    for r in range(31):
        counts = [int(ways[0][1][r, i] * ways[1][1][r, c]) for i, c in zip(image, caption)]
        rows = torch.arange(400).repeat_interleave(torch.tensor(counts))
        area = sklearn.roc_auc_score(label[rows], scores[rows])
        assert float(found.roc_auc[r]) == pytest.approx(area, abs=1e-12), r
