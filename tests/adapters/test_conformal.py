"""Conformal sets: public code's numbers, exact ranks, and the promised coverage."""

import math

import pytest
import torch

from probemb import conformal

pytestmark = pytest.mark.core


@pytest.fixture
def v(parity):
    return {
        name: torch.from_numpy(value) if value.ndim else value.item() for name, value in parity("28_conformal").items()
    }


@pytest.mark.parametrize("name", ["lac", "aps", "raps", "aps_rand", "raps_rand", "saps"])
def test_public_codes_numbers(v, name):
    cal, test = v["cal_logits"].softmax(1), v["test_logits"].softmax(1)
    labels = v["test_labels"]
    score = conformal.Score(name.split("_")[0], v["raps_penalty"], v["raps_kreg"])
    if name == "saps":
        score = conformal.Score("saps", 0.2)
    u_cal = v[f"{name}__u_cal_f32"] if "rand" in name else None
    u_test = v[f"{name}__u_test_sorted_order_f32"] if "rand" in name else None
    found_cal, found = conformal.of_labels(score(cal, u_cal), v["cal_labels"]), score(test, u_test)
    if name != "saps":  # whose deterministic form in that code scores rank 1 differently in calibration
        torch.testing.assert_close(found_cal, v[f"{name}__cal_scores"])
    torch.testing.assert_close(found, v[f"{name}__test_scores"])
    if name == "saps":
        return
    for alpha in (0.1, 0.25):
        at = f"{name}__alpha{alpha}__"
        q = conformal.threshold(found_cal, alpha)
        assert q == pytest.approx(v[at + "q_hat"])
        sets = conformal.prediction_sets(found, q)
        assert torch.equal(sets, v[at + "sets"])
        told = conformal.describe_sets(sets, labels, alpha)
        assert (told["coverage"], told["size"]) == pytest.approx((v[at + "coverage"], v[at + "size"]))
        assert told["macro_coverage"] == pytest.approx(v[at + "coverage_macro"])
        assert 100 * told["class_gap"] == pytest.approx(v[at + "covgap_percent"])
        assert told["size_gap"] == pytest.approx(v[at + "sscv"], abs=1e-6)
        if name in ("lac", "aps"):
            own, stored = (
                conformal.class_thresholds(found_cal, v["cal_labels"], 6, alpha),
                v[at + "class_conditional_q_hat_inf_allowed_f32"],
            )
            torch.testing.assert_close(own.float(), stored)
            clear = (found - stored).abs() > 1e-6  # their sums were rounded in another order
            assert torch.equal(conformal.prediction_sets(found, own)[clear], v[at + "class_conditional_sets"][clear])


def test_thresholds_are_the_exact_ranks(v):
    for n, alpha, q in zip(
        v["quantile_n"].tolist(), v["quantile_alpha"].tolist(), v["quantile_q_hat_inf_allowed"].tolist()
    ):
        scores = v[f"quantile_scores_n{n}"].sort().values
        exact = -(-(n + 1) * round(100 * (1 - alpha)) // 100)
        assert conformal.threshold(scores, alpha) == (math.inf if exact > n else scores[exact - 1].item())
        assert conformal.threshold(scores, alpha) == q or alpha == 0.7


def test_transport(v):
    both, labels = torch.cat([v["cal_logits"], v["test_logits"]]), v["cal_labels"]
    torch.testing.assert_close(conformal.transported(both, labels), v["confot__codes_observed_marginal"])
    torch.testing.assert_close(conformal.transported(both), v["confot__codes_uniform"])


def test_a_group_counts_as_one_item():
    scores = torch.rand(30, generator=torch.Generator().manual_seed(0))
    for alpha in (0.05, 0.3):
        groups = torch.arange(30).repeat_interleave(3)
        assert conformal.threshold(scores.repeat_interleave(3), alpha, groups) == conformal.threshold(scores, alpha)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2])
def test_promised_coverage_lies_in_its_band(alpha):
    """Of items in groups of three that share a label and most of their logits."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(600, 8, generator=generator) * 2).repeat_interleave(3, 0)
    drawn = torch.multinomial((logits[::3] * 0.5).softmax(1), 1, generator=generator)
    labels = drawn[:, 0].repeat_interleave(3)
    logits, u = logits + 0.3 * torch.randn(logits.shape, generator=generator), torch.rand(1800, generator=generator)
    variants = {"means": conformal.Variant(logits), "by u": conformal.Variant(logits, u)}
    rows = conformal.evaluate_sets(variants, labels, torch.arange(600).repeat_interleave(3), alpha)
    skewed = {"means": conformal.Variant(logits + torch.linspace(0, 6, 8))}
    gaps = [
        conformal.evaluate_sets(skewed, labels, torch.arange(1800), alpha, 3, by_class=x)[0]["class_gap"]
        for x in (0, 1)
    ]
    assert gaps[1] < gaps[0]
    for row in rows:
        low, high = row["band"]
        assert low <= row["coverage"] <= (1 if row["score"] == "top k" else high)
        assert row["inside"] > 0.7 or row["score"] == "top k"
