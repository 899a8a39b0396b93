"""Scores against judgements: single pairs, halves, cross-fitted weights, calibration, and acceptance."""

import pytest
import torch

from probemb import Gaussian
from probemb.data.captions.judgements import Judgements
from probemb.distances import csd
from probemb.evaluation import judgements as module
from probemb.evaluation.embedding import EmbeddedPairs
from probemb.evaluation.judgements import (
    caption_acceptance,
    cross_fitted,
    evaluate_rankings_of_pairs,
    judged_metrics,
    judged_pairs,
    judged_scores,
    match_calibration,
)
from probemb.evaluation.rankings import RankingOptions, Tolerance, scores_of

sklearn = pytest.importorskip("sklearn.metrics")
N, PER, DIM = 60, 2, 6


def embedded(seed=0):
    g = torch.Generator().manual_seed(seed)
    images = Gaussian(torch.randn(N, DIM, generator=g), torch.randn(N, DIM, generator=g) - 1)
    texts = Gaussian(torch.randn(N * PER, DIM, generator=g), torch.randn(N * PER, DIM, generator=g) - 1)
    return EmbeddedPairs(images, texts, torch.arange(N).repeat_interleave(PER), list(range(N)), [])


def judgements(pairs, truth, n=1500, people=3, seed=1):
    """n random pairs, each judged by people who say yes with the probability `truth[image, caption]`."""
    g = torch.Generator().manual_seed(seed)
    place = torch.randperm(N * N * PER, generator=g)[:n]
    image, caption = place // (N * PER), place % (N * PER)
    yes = torch.binomial(torch.full((n,), float(people)), truth[image, caption].float(), generator=g).long()
    return Judgements(image, caption, pairs.owner[caption] == image, yes, people - yes, list(map(str, image.tolist())))


def probability(pairs, i2t=1.0, t2i=1.0, slope=0.5):
    u_i, u_c = pairs.images.uncertainty()[:, None], pairs.texts.uncertainty()
    distance = csd(pairs.images, pairs.texts) + (t2i - 1) * u_i + (i2t - 1) * u_c
    return torch.sigmoid(slope * (distance.quantile(0.1) - distance))


def by_means(pairs, judged):
    squared = (pairs.images.mean[judged.image] - pairs.texts.mean[judged.caption]).square().sum(1)
    return sklearn.roc_auc_score(judged.label, -squared)


@pytest.fixture(scope="module")
def world():
    pairs = embedded()
    return pairs, judged_pairs(judgements(pairs, probability(pairs)), 200)


def test_scores_are_those_of_the_matrix(world, monkeypatch):
    pairs, judged = world
    for elements in (module.SCORE_ELEMENTS, 300):
        monkeypatch.setattr(module, "SCORE_ELEMENTS", elements)
        for name in ("csd", "wasserstein2"):
            expected = scores_of(name, pairs.images, pairs.texts)(slice(None))[judged.image, judged.caption]
            found = judged_scores(pairs, judged, name, RankingOptions())
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rankings(world):
    pairs, judged = world
    names = ["csd", "mean", "faiss-csd", "tolerance", "match-probability"]
    found, scores = evaluate_rankings_of_pairs(pairs, judged, names, RankingOptions())
    rows = {row["ranking"]: row for row in found["rows"]}
    expected = ["csd", "mean", "tolerance", "match-probability", "tolerance-cross-fitted"]
    assert list(rows) == list(scores) == expected
    given = RankingOptions(tolerance=Tolerance(0.0, 0.0, chosen="chosen on val"))
    row = evaluate_rankings_of_pairs(pairs, judged, ["tolerance"], given)[0]["rows"][0]
    assert row["roc_auc"]["value"] == pytest.approx(float(by_means(pairs, judged)), abs=1e-4)
    assert found["reference"] == "mean"
    assert rows["csd"]["average_precision"]["value"] > rows["mean"]["average_precision"]["value"]  # the truth is CSD
    assert rows["csd"]["difference"]["roc_auc"]["low"] > 0
    assert rows["mean"]["difference"]["average_precision"] == {"value": 0, "low": 0, "high": 0}
    assert rows["tolerance"]["roc_auc"] == rows["csd"]["roc_auc"]  # weights of 1
    assert "average_precision" not in rows["tolerance-cross-fitted"]
    assert set(rows["tolerance-cross-fitted"]["difference"]) == {"average_precision_halves", "roc_auc_halves"}


@pytest.mark.parametrize("true", [(-1.0, 1.0), (2.0, -0.5)])
def test_weights_are_chosen_on_the_other_half(true):
    pairs = embedded(3)
    judged = judged_pairs(judgements(pairs, probability(pairs, *true, slope=4.0), n=6000), 20)
    scores, found = cross_fitted(pairs, judged, (-1.0, -0.5, 0.0, 1.0, 2.0))
    for one in found["chosen"]:
        assert (one["i2t"], one["t2i"]) == true
    by_csd = judged_metrics(judged_scores(pairs, judged, "csd", RankingOptions()), judged)["average_precision"][0]
    halves = [sklearn.average_precision_score(judged.label[r], scores[r]) for r in judged.halves]
    assert sum(halves) / 2 > float(by_csd) + 0.05
    # labels of one half turned round: its own weights stay, for they come from the other half
    turned = torch.where(judged.half == 0, ~judged.label, judged.label)
    again = cross_fitted(pairs, module.JudgedPairs(**{**vars(judged), "label": turned}), (-1.0, -0.5, 0.0, 1.0, 2.0))
    assert again[1]["chosen"][0] == found["chosen"][0]
    assert again[1]["chosen"][1] != found["chosen"][1]


def test_calibration_of_the_models_own_and_refitted_probability():
    """People say yes with sigmoid(b - a CSD): these a and b are calibrated, others are after the refit."""
    pairs = embedded(4)
    distance = csd(pairs.images, pairs.texts)
    a, b = 0.5, 0.5 * float(distance.quantile(0.2))
    judged = judged_pairs(judgements(pairs, torch.sigmoid(b - a * distance), n=6000, people=5), 5)
    right = match_calibration(pairs, judged, RankingOptions(scale=a, shift=b))
    wrong = match_calibration(pairs, judged, RankingOptions(scale=3 * a, shift=b))
    assert right["closed form"]["raw"]["ece"] < 0.02 < 0.1 < wrong["closed form"]["raw"]["ece"]
    assert wrong["closed form"]["refitted"]["ece"] < 0.02
    assert wrong["closed form"]["refitted"]["brier"] == pytest.approx(right["closed form"]["refitted"]["brier"])
    for one in wrong["closed form"]["parameters"]:
        assert one["slope"] == pytest.approx(1 / 3, rel=0.15)
        assert one["slope"] * b + one["intercept"] == pytest.approx(b, rel=0.15)
    assert right["closed form"]["raw"]["brier"] < right["constant"]["brier"]
    assert right["constant"]["share"] == pytest.approx(float(judged.share.mean()))
    sampled = judged_scores(pairs, judged, "match-probability", RankingOptions(scale=a, shift=1.0))
    both = match_calibration(pairs, judged, RankingOptions(scale=a, shift=b), sampled)
    assert set(both) == {"closed form", "sampled", "constant"}
    assert both["sampled"]["refitted"]["ece"] < both["sampled"]["raw"]["ece"]


def test_acceptance_of_captions():
    """Each caption is accepted with a probability that grows with its u."""
    pairs = embedded(6)
    u = pairs.texts.uncertainty()
    truth = (u.argsort().argsort() / len(u)).expand(N, -1)
    judged = judged_pairs(judgements(pairs, truth, n=5000, people=1), 100)
    found = caption_acceptance(pairs, judged)
    stats = pytest.importorskip("scipy.stats")
    shares, uncertainties = [], []
    for caption in judged.caption.unique().tolist():
        rows = judged.caption == caption
        if int(rows.sum()) >= 10:
            shares.append(float(judged.label[rows].double().mean()))
            uncertainties.append(float(u[caption]))
    assert found["captions"] == len(shares)
    assert found["spearman"]["value"] == pytest.approx(stats.spearmanr(uncertainties, shares).statistic)
    assert 0.7 < found["spearman"]["low"] < found["spearman"]["value"] < found["spearman"]["high"]
    few = judged_pairs(judgements(pairs, truth, n=1800, people=1), 100)  # of 15 images or so each: noisy shares
    found = caption_acceptance(pairs, few, least=5)["spearman"]
    assert found["low"] < found["value"] < found["high"]
    assert caption_acceptance(pairs, judged, least=1000) is None
