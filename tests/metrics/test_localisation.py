"""Recall of localisation against plain loops, guessing against drawing, standard errors against the bootstrap."""

import itertools

import pytest
import torch

from probemb.metrics.localisation import KS, chance_at, recall_at, summarise
from probemb.metrics.prediction import cluster_standard_error


def test_recall_is_the_best_of_the_first():
    r = torch.Generator().manual_seed(0)
    overlaps = torch.rand(40, 10, generator=r)
    overlaps[:7, 4:] = -1  # images with four proposals
    for k in KS:
        expected = [max(row[:k]) >= 0.8 for row in overlaps.tolist()]
        assert recall_at(overlaps, k, 0.8).tolist() == expected


@pytest.mark.parametrize(("good", "total"), [(0, 6), (1, 6), (3, 7), (5, 6), (6, 6)])
def test_guessing_is_counted_over_all_draws(good, total):
    for k in range(1, total + 1):
        draws = list(itertools.combinations(range(total), k))
        share = sum(any(one < good for one in draw) for draw in draws) / len(draws)
        assert chance_at(good, total, k) == pytest.approx(share, abs=1e-12)


def test_summaries_of_all_and_of_some():
    hit, image = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 2])
    found = summarise({"r@1": hit}, image)["r@1"]
    assert found["value"] == 0.75
    assert found["se"] == pytest.approx(cluster_standard_error(hit, image))
    some = summarise({"r@1": hit.bool()}, image, torch.tensor([True, True, False, False]))["r@1"]
    assert some == {"value": 0.5, "se": 0.0}  # one image alone: its phrases' errors cancel
