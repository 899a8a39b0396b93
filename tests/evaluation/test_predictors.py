"""Scores of queries against plain loops and torch.distributions, and the table of what they know."""

import math

import pytest
import torch

from probemb import Gaussian
from probemb.evaluation import predictors
from probemb.evaluation.predictors import assess, query_scores, runs_against_recall
from probemb.models import create_model
from probemb.models.match import MatchModel


def gaussians(n, seed, dim=6):
    r = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(n, dim, generator=r), dim=1)
    return Gaussian(mean, torch.randn(n, dim, generator=r) - 3)


def test_scores_equal_a_plain_loop_in_blocks_of_any_size(monkeypatch):
    queries, gallery, model = gaussians(9, 0), gaussians(14, 1), MatchModel(4.0, 3.0)
    want = {name: [] for name in predictors.TITLES}
    for mean, log_var in zip(queries.mean.double(), queries.log_var.double()):
        apart, probability, sampled = [], [], []
        for other, other_log_var in zip(gallery.mean.double(), gallery.log_var.double()):
            apart.append(sum((float(a) - float(b)) ** 2 for a, b in zip(mean, other)))
            sampled.append(apart[-1] + sum(math.exp(x) for x in (*log_var.tolist(), *other_log_var.tolist())))
            probability.append(1 / (1 + math.exp(4 * sampled[-1] - 3)))
        order = sorted(range(14), key=lambda j: sampled[j])[:10]
        nearest = gallery.mean[order].double()
        shares = torch.tensor(probability, dtype=torch.float64)
        first, second = sorted(apart)[:2]
        for name, value in {
            "u": float(log_var.exp().sum()), "expected-matches": sum(probability),
            "entropy": float(torch.distributions.Categorical(probs=shares).entropy()),
            "spread": float(torch.cdist(nearest, nearest).square().sum()) / 200,  # of all pairs: twice the variance
            "distance": first, "margin": first - second,
        }.items():  # fmt: skip
            want[name].append(value)
    for elements in (1, 30, 1 << 20):
        monkeypatch.setattr(predictors, "BLOCK_ELEMENTS", elements)
        found = query_scores(queries, gallery, model)
        assert list(found) == list(predictors.TITLES)
        for name, values in want.items():
            assert found[name].tolist() == pytest.approx(values, rel=1e-4, abs=1e-5), name


def test_a_point_model_has_neither_u_nor_match_probabilities():
    queries, gallery = gaussians(5, 0), gaussians(7, 1)
    points = [Gaussian(one.mean, torch.full_like(one.mean, -20.0)) for one in (queries, gallery)]
    model = MatchModel.of(create_model("ViT-Micro-32", probabilistic=False))
    assert model.temperature == pytest.approx(1 / 0.07)
    found = query_scores(*points, model)
    assert list(found) == ["entropy", "spread", "distance", "margin"]
    truth = torch.distributions.Categorical(logits=queries.mean @ gallery.mean.T / 0.07).entropy()
    torch.testing.assert_close(found["entropy"], truth, rtol=1e-3, atol=1e-4)
    assert "point model" in model.describe()
    assert MatchModel(5.0, -2.0).describe() == "sigmoid(-5 CSD - 2)"


def test_the_table_knows_the_right_from_the_reversed():
    r = torch.Generator().manual_seed(0)
    ambiguity = torch.rand(1000, generator=r)
    correct = (torch.rand(1000, generator=r) > ambiguity).double()
    accepted = torch.where(torch.rand(1000, generator=r) < 0.3, ambiguity, torch.nan)
    scores = {"u": -ambiguity, "entropy": ambiguity, "distance": torch.rand(1000, generator=r)}
    rows = {row["score"]: row for row in assess(scores, correct, torch.arange(1000) // 5, ambiguity, accepted)}
    assert {name: runs_against_recall(row) for name, row in rows.items()} == {
        "u": True, "entropy": False, "distance": False
    }  # fmt: skip
    right = rows["entropy"]
    assert right["ambiguity"]["value"] == right["accepted_share"]["value"] == pytest.approx(1)
    assert right["r@1"]["value"] < 0 < right["gain"]["value"]
    assert rows["u"]["halves"]["certain"] == pytest.approx(right["halves"]["rest"])
    assert abs(rows["distance"]["gain"]["value"]) < 3 * rows["distance"]["gain"]["se"]
    alone = assess(scores, correct)[0]
    assert alone["ambiguity"] is None
    assert alone["accepted_share"] is None
