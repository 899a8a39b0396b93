"""Filters by a threshold, against plain loops."""

from itertools import pairwise

import pytest
import torch

from zeroshot.filtering.filters import FILTERS, FilterOptions
from zeroshot.filtering.thresholds import SETTINGS, candidates, keep_below


def uncertainties(n_classes=7, n_prompts=12):
    u = torch.rand(n_classes, n_prompts, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return u + torch.linspace(0, 1.5, n_classes, dtype=torch.float64)[:, None]


def loops(u, limits):
    rows = []
    for row, limit in zip(u.tolist(), limits):
        kept = [x <= limit for x in row]
        if not any(kept):
            kept = [p == row.index(min(row)) for p in range(len(row))]
        rows.append([k / sum(kept) for k in kept])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("c", [-3.0, -0.5, 0.0, 1.25, 9.0])
def test_class_deviation_keeps_what_lies_below_mean_plus_c_deviations(c):
    u = uncertainties()
    limits = [sum(r) / 12 + c * (sum((x - sum(r) / 12) ** 2 for x in r) / 12) ** 0.5 for r in u.tolist()]
    torch.testing.assert_close(FILTERS["class-deviation"](u, FilterOptions(deviations=c)), loops(u, limits))


@pytest.mark.parametrize("limit", [0.01, 0.7, 1.4, 5.0])
def test_one_threshold_for_all_leaves_each_class_a_prompt(limit):
    u = uncertainties()
    found = FILTERS["threshold"](u, FilterOptions(threshold=limit))
    torch.testing.assert_close(found, loops(u, [limit] * 7))
    assert ((found > 0).sum(1) >= 1).all()


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 1.0])
def test_a_quantile_keeps_its_share_of_all_prompts(share):
    u = uncertainties()
    ordered = sorted(u.flatten().tolist())
    found = FILTERS["quantile"](u, FilterOptions(quantile=share))
    torch.testing.assert_close(found, loops(u, [ordered[round(share * len(ordered)) - 1]] * 7))
    alone = sum(min(row) > ordered[round(share * len(ordered)) - 1] for row in u.tolist())  # classes above the limit
    assert (found > 0).sum() == round(share * u.numel()) + alone


def test_a_class_that_would_lose_all_keeps_the_first_of_its_most_certain():
    assert keep_below(torch.tensor([[2.0, 1.0, 1.0], [0.0, 3.0, 0.5]]), torch.tensor(0.6)).tolist() == [
        [0, 1, 0],
        [0.5, 0, 0.5],
    ]


@pytest.mark.parametrize("name", SETTINGS)
def test_candidates_keep_ever_more_prompts_and_at_last_nearly_all(name):
    u = uncertainties()
    kept = []
    for value in candidates(name, u):
        kept.append(FILTERS[name](u, FilterOptions(**{SETTINGS[name]: value})) > 0)
    assert all((more >= less).all() for less, more in pairwise(kept))
    assert kept[0].sum() < 0.3 * u.numel()
    assert kept[-1].double().mean() > 0.95
    if name != "class-deviation":
        assert kept[-1].all()


def test_prompts_that_are_equally_uncertain_are_all_kept():
    for value in torch.rand(50, generator=torch.Generator().manual_seed(0)).tolist():
        u = torch.full((1, 80), value)
        torch.testing.assert_close(
            FILTERS["class-deviation"](u, FilterOptions(deviations=0.0)), torch.full_like(u, 1 / 80)
        )
