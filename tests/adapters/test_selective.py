"""Selective prediction: public codes' numbers and exact ties."""

import itertools
import math

import numpy as np
import pytest
import torch

from probemb.metrics.bootstrap import cluster_weights
from probemb.metrics.selective import (
    calibration_error,
    fit_temperature,
    free_confidences,
    nearest_is_of_class,
    rank_correlations,
    retrieval_levels,
    selective_metrics,
)
from probemb.metrics.uncertainty import reliability, spearman

pytestmark = pytest.mark.core


def measured(confidence, positive) -> dict[str, float]:
    return {name: x.item() for name, x in selective_metrics(confidence, positive).items()}


def tensors(arrays) -> dict:
    return {name: torch.from_numpy(value) if value.ndim else value.item() for name, value in arrays.items()}


@pytest.mark.parametrize("case", ["n200", "n60_ties"])
def test_public_codes_numbers(parity, case):
    v = tensors(parity("24_selective_and_mcm"))
    k, correct = v[f"{case}__confidence"], v[f"{case}__correct"].bool()
    found = measured(k, correct)
    best = v[f"{case}__own_aurc_optimal_discrete"]
    assert found["aurc"] == pytest.approx(v[f"{case}__own_aurc_ties_expected"], abs=1e-12)
    assert found["e_aurc"] == pytest.approx(found["aurc"] - best, abs=1e-12)
    assert found["auroc"] == pytest.approx(v[f"{case}__fdshifts_failauc"])
    assert found["fpr95"] == pytest.approx(v[f"{case}__fdshifts_fpr95"])
    drawn = torch.randint(len(k), (len(k),), generator=torch.Generator().manual_seed(0))
    weights = torch.bincount(drawn, minlength=len(k))[None]
    again = {name: x.item() for name, x in selective_metrics(k, correct, weights).items()}
    assert again == pytest.approx(measured(k[drawn], correct[drawn]))


def test_ties_count_in_expectation():
    k, correct = torch.tensor([2.0, 1, 1, 1, 0]), torch.tensor([True, False, True, True, False])
    means = []
    for middle in itertools.permutations([False, True, True]):
        errors = ~np.array([True, *middle, False])
        means.append((errors.cumsum() / np.arange(1, 6)).mean())
    assert measured(k, correct)["aurc"] == pytest.approx(np.mean(means))
    assert math.isnan(measured(k, torch.zeros(5).bool())["fpr95"])


def test_free_confidences(parity):
    v = tensors(parity("24_selective_and_mcm"))
    image, ood, text = (torch.nn.functional.normalize(v[f"mcm_{x}_features"], dim=1) for x in ("img", "ood", "txt"))
    for t, names in (
        (1, {"MCM": "MCM", "max_logit": "max cosine", "energy": "energy", "entropy": "entropy"}),
        (0.1, {"MCM": "max softmax", "energy": "energy", "entropy": "entropy"}),
    ):
        inside, outside = (free_confidences(x @ text.T, 1 / t) for x in (image, ood))
        for name, ours in names.items():
            expected = v[f"mcm_{name}_T{t}__in_f32"]
            torch.testing.assert_close(-inside[ours].float(), expected, rtol=1e-6, atol=1e-6)
            both = torch.cat([inside[ours], outside[ours]])
            known = torch.arange(len(both)) < len(image)
            assert measured(both, known)["auroc"] == pytest.approx(v[f"mcm_{name}_T{t}__auroc_aupr_fpr95"][0].item())


def test_levels_of_retrieval(parity):
    v = tensors(parity("23_asymvlm"))
    scores, u, image_of = v["levels_scores"], v["levels_txt_uncertainty"], v["levels_caption_image"]
    hit = scores.argmax(0) == image_of
    weights = torch.stack([torch.ones(len(u)), hit.float()])
    found = retrieval_levels(u, hit, weights, v["levels_n"])
    torch.testing.assert_close(found["r@1"], torch.stack([v["levels_t2i_acc"], torch.ones(5).double()]))
    expected = v["levels_own_t2i_spearman_r2_minusSR2"].tolist()
    assert [found[key][0].item() for key in ("spearman", "r2", "score")] == pytest.approx(expected)
    assert found["score"][1] == 0  # R@1 is the same everywhere


def test_nearest_neighbour_of_a_class_is_never_the_item_itself(parity):
    v = tensors(parity("26_url"))
    hit = nearest_is_of_class(v["features_f32"], v["targets"], block=50)
    assert torch.equal(hit.double(), v["r1_correct"])
    assert measured(-v["uncertainty_f32"], hit)["auroc"] == pytest.approx(v["r_auroc"], abs=1e-6)
    assert measured(-v["uncertainty_tied"], hit)["auroc"] == pytest.approx(v["r_auroc_tied"], abs=1e-6)
    twins = nearest_is_of_class(torch.ones(2, 3), torch.tensor([0, 1]))
    assert not twins.any()


def test_temperature_is_the_one_of_the_labels():
    logits = torch.randn(20000, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    labels = torch.distributions.Categorical(logits=logits / 2).sample()
    assert fit_temperature(logits, labels)[0] == pytest.approx(2, rel=0.1)
    u = torch.rand(20000, 1, generator=torch.Generator().manual_seed(1)) + 0.1
    assert fit_temperature(logits * u**0.5, labels, u[:, 0]) == pytest.approx((2, 0.5), rel=0.1)
    g = torch.Generator().manual_seed(5)  # uninformative logits and a nearly constant u: neither T nor k is extreme
    logits, u = torch.randn(30, 20, generator=g).double(), 0.1 + 1e-4 * torch.rand(30, generator=g).double()
    t, power = fit_temperature(logits, torch.randint(20, (30,), generator=g), u)
    assert 1 < t < 1e9
    assert abs(power) < 1


def test_resampled_measures_start_with_those_of_the_data():
    generator = torch.Generator().manual_seed(0)
    p, right = torch.rand(300, generator=generator), torch.rand(300, generator=generator) < 0.4
    weights = cluster_weights(300, 5)
    assert calibration_error(p, right, weights)[0].item() == pytest.approx(reliability(p, right.double())["ece"])
    drawn = weights[3].long()
    found = rank_correlations(p, right.double(), weights)
    assert found[0].item() == pytest.approx(spearman(p, right))
    again = spearman(p.repeat_interleave(drawn), right.repeat_interleave(drawn))
    assert found[3].item() == pytest.approx(again, abs=0.02)  # whose ranks are those of the resample
