"""Bins, correlations, rejection, promised precision and calibration, against scipy, scikit-learn and plain loops."""

import numpy as np
import pytest
import torch

from probemb.metrics import uncertainty


def test_bins_are_of_equal_count_and_correlations_are_numpys_and_scipys():
    generator = torch.Generator().manual_seed(3)
    u = torch.rand(97, generator=generator).double().round(decimals=1)  # with ties
    score = (1 - u + 0.3 * torch.randn(97, generator=generator)).double()
    bins = uncertainty.uncertainty_bins(u, score)
    assert sum(bins["counts"]) == 97
    assert max(bins["counts"]) - min(bins["counts"]) <= 1
    assert bins["uncertainty"] == sorted(bins["uncertainty"])
    parts = np.array_split(score[u.argsort(stable=True)].numpy(), 10)
    assert bins["accuracy_se"] == pytest.approx([part.std(ddof=1) / len(part) ** 0.5 for part in parts])
    assert bins["pearson"] == pytest.approx(np.corrcoef(bins["uncertainty"], bins["accuracy"])[0, 1])
    stats = pytest.importorskip("scipy.stats")
    assert bins["spearman"] == pytest.approx(stats.spearmanr(u, score).statistic)
    assert uncertainty.rank_correlation(u, score)["value"] == pytest.approx(bins["spearman"])


def test_correlations_of_constants_are_undefined_and_nan_scores_are_left_out():
    assert uncertainty.pearson(torch.ones(3), torch.arange(3.0)) is None
    constant = torch.full((3,), 0.05, dtype=torch.float64)  # whose rounded mean is another number
    assert uncertainty.pearson(constant, constant) is None
    assert uncertainty.pearson(torch.arange(3.0).double(), constant) is None
    bins = uncertainty.uncertainty_bins(torch.arange(4.0), torch.tensor([1.0, torch.nan, 0.0, 1.0]))
    assert sum(bins["counts"]) == 3
    score = torch.tensor([1.0, torch.nan, torch.nan, torch.nan, 0.0, 1.0])
    bins = uncertainty.uncertainty_bins(torch.arange(6.0), score, 3, cut_over_all=True)
    assert (bins["counts"], bins["accuracy"]) == ([1, 2], [1.0, 0.5])  # the middle bin holds no score
    assert uncertainty.uncertainty_bins(torch.ones(1), torch.ones(1)) is None


def test_refusing_the_most_uncertain_equals_its_definition():
    u = torch.tensor([0.5, 0.1, 0.9, 0.3])
    score = torch.tensor([0.0, 1.0, 0.0, 1.0])
    curve = uncertainty.rejection_curve(u, score, refused=(0, 0.25, 0.5, 0.9))
    assert curve["score"] == pytest.approx([0.5, 2 / 3, 1, 1])
    assert curve["area"] == pytest.approx((1 + 1 + 2 / 3 + 0.5) / 4)
    assert curve["area"] == pytest.approx(curve["oracle"])
    assert curve["random"] == 0.5
    assert uncertainty.rejection_curve(-u, score)["area"] == pytest.approx((0 + 0 + 1 / 3 + 0.5) / 4)


def world(n_images=150, captions=5, effect=0.6, seed=0):
    """Scores, outcomes 0 or 1 that fall with them, and images whose captions share part of both."""
    r = torch.Generator().manual_seed(seed)
    image = torch.arange(n_images).repeat_interleave(captions)
    shared = torch.randn(n_images, generator=r)[image]
    score = shared + torch.randn(len(image), generator=r)
    luck = 0.7 * torch.randn(n_images, generator=r)[image] + torch.randn(len(image), generator=r)
    return score, (luck - effect * score > 0).double(), image


def resampled(measure, score, outcome, image, n=300):
    r = torch.Generator().manual_seed(1)
    rows = [(image == one).nonzero().flatten() for one in range(int(image.max()) + 1)]
    values = []
    for _ in range(n):
        drawn = torch.cat([rows[i] for i in torch.randint(len(rows), (len(rows),), generator=r).tolist()])
        values.append(measure(score[drawn], outcome[drawn]))
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("effect", [0.0, 0.6])
def test_standard_errors_are_those_of_images_drawn_again(effect):
    score, outcome, image = world(effect=effect)
    for measure in (uncertainty.rank_correlation, lambda *data: uncertainty.halves(*data)["difference"]):
        found = measure(score, outcome, image)
        spread = resampled(lambda s, o: measure(s, o)["value"], score, outcome, image).std().item()  # noqa: B023
        assert 0.85 < found["se"] / spread < (1.15 if effect == 0 else 1.4)  # an effect widens them
        alone = measure(score, outcome)
        assert alone["value"] == found["value"]
        assert alone["se"] < found["se"]  # captions of an image depend on each other


def test_halves_are_of_the_scores_below_and_above_the_median():
    score, outcome, _ = world(20)
    score = score.round(decimals=1)  # with ties
    middle, parts = score.median(), uncertainty.halves(score, outcome)
    assert parts["certain"] == pytest.approx(float(outcome[score < middle].mean()), abs=0.02)
    assert parts["rest"] == pytest.approx(float(outcome[score > middle].mean()), abs=0.02)  # with ties at the median


def test_what_is_unknown_or_constant_has_no_answer():
    known, nan = torch.arange(4.0), torch.tensor([1.0, torch.nan, 0.0, 1.0])
    assert uncertainty.rank_correlation(known, torch.ones(4)) is None
    assert uncertainty.rank_correlation(known[:2], known[:2]) is None
    assert uncertainty.halves(torch.ones(4), known) is None
    assert uncertainty.rank_correlation(known, nan) == pytest.approx(
        uncertainty.rank_correlation(known[[0, 2, 3]], nan[[0, 2, 3]])
    )


def test_curve_counts():
    u = torch.tensor([0.4, 0.1, 0.3, 0.2])
    curve = uncertainty.precision_curve(u, torch.tensor([False, True, False, True]), points=4)
    assert curve.threshold == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert curve.coverage == [0.25, 0.5, 0.75, 1]
    assert curve.precision == pytest.approx([1, 1, 2 / 3, 0.5])
    stats = pytest.importorskip("scipy.stats")
    for low, hits, n in zip(curve.at_least, (1, 2, 2, 2), (1, 2, 3, 4)):  # for all points at once
        assert stats.binom.sf(hits - 1, n, low) == pytest.approx(0.05 / 4)
    assert curve.queries == 4
    fitting = [u for u, low in zip(curve.threshold, curve.at_least) if low >= 0.1]
    assert uncertainty.highest_threshold(curve, 0.1) == max(fitting)
    assert uncertainty.highest_threshold(curve, 0.999) is None


def test_bins_in_a_plain_loop():
    g = torch.Generator().manual_seed(0)
    p = torch.rand(500, generator=g, dtype=torch.float64) ** 3
    label = (torch.rand(500, generator=g) < p).double()
    p[0], p[1] = 0.0, 1.0
    found, rows = uncertainty.reliability(p, label, n_bins=10), [(p * 10).long().clamp_max(9) == i for i in range(10)]
    assert found["predicted"] == pytest.approx([float(p[row].mean()) for row in rows])
    assert found["observed"] == pytest.approx([float(label[row].mean()) for row in rows])
    gaps = [abs(a - b) * int(row.sum()) for a, b, row in zip(found["predicted"], found["observed"], rows)]
    assert (found["counts"], found["ece"]) == ([int(row.sum()) for row in rows], pytest.approx(sum(gaps) / 500))
    assert found["brier"] == pytest.approx(pytest.importorskip("sklearn.metrics").brier_score_loss(label, p))


def test_the_fit_has_the_least_cross_entropy():
    """Its gradient is zero, far from the origin too; and it finds the parameters of data drawn from it."""
    g = torch.Generator().manual_seed(0)
    x = 100 + 30 * torch.randn(4000, generator=g, dtype=torch.float64)
    share = torch.binomial(torch.full_like(x, 3), torch.sigmoid(0.05 * x - 7), generator=g) / 3
    a, b = uncertainty.fit_logistic(x, share)
    residual = torch.sigmoid(a * x + b) - share
    assert abs(float(residual.mean())) < 1e-5
    assert abs(float((residual * (x - x.mean()) / x.std()).mean())) < 1e-5
    assert (a, b) == pytest.approx((0.05, -7), rel=0.1)


def test_summaries_of_all_and_of_some():
    hit, image = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 2])
    found = uncertainty.mean_estimates({"r@1": hit}, image)["r@1"]
    assert found == {"value": 0.75, "se": pytest.approx(uncertainty.cluster_standard_error(hit, image))}
    some = uncertainty.mean_estimates({"r@1": hit.bool()}, image, torch.tensor([True, True, False, False]))["r@1"]
    assert some == {"value": 0.5, "se": 0.0}  # one image alone: its phrases' errors cancel
