"""Scores of infeasibility against plain loops and torch.distributions, and their ROC AUC with its standard error."""

import pytest
import torch
from torch.distributions import Normal
from torch.nn import functional as F

from probemb import Gaussian
from probemb.data.compositions import Part, Query
from probemb.evaluation.composed import ComposedQueries
from probemb.evaluation.feasibility import (
    SCORES,
    auc_estimate,
    infeasibility,
)
from probemb.models.composers import create_composer

Q, D = 6, 8


def queries(concepts, kinds):
    texts = {"images": (None, None), "mixed": ("word", None), "texts": ("word", "word")}
    rows = [(*pair, *texts[kind]) for pair, kind in zip(concepts, kinds)]
    return [Query((Part(a, text=x), Part(b, text=y)), (a, b)) for a, b, x, y in rows]


def drawn(composer, k=2, seed=0, asked=None):
    generator = torch.Generator().manual_seed(seed)
    mean, log_var = (torch.randn(Q, k, D, generator=generator) for _ in range(2))
    parts = Gaussian(F.normalize(mean, dim=-1), log_var)
    with torch.no_grad():
        return ComposedQueries(asked or [], composer(parts), parts)


@pytest.mark.parametrize("k", [2, 3])
def test_scores_equal_a_plain_loop(k):
    composer = create_composer("product", D)
    found = drawn(composer, k)
    scores = infeasibility(composer, found)
    assert list(scores) == list(SCORES)
    for q in range(Q):
        mean, var = found.parts.mean[q].double(), found.parts.log_var[q].double().exp()
        left, left_var, log_z, gaps = mean[0], var[0], 0.0, 0.0
        for i in range(1, k):
            density = Normal(left, (left_var + var[i]).sqrt()).log_prob(mean[i])
            log_z += float(density.sum())
            gaps += float(((mean[i] - left) ** 2 / (left_var + var[i])).sum())
            left = (left / left_var + mean[i] / var[i]) / (1 / left_var + 1 / var[i])
            left_var = 1 / (1 / left_var + 1 / var[i])
        cosines = [
            float(F.cosine_similarity(mean[i], mean[j], dim=0)) for i in range(k) for j in range(k) if i != j
        ]  # fmt: skip
        expected = {
            "normaliser": -log_z, "disagreement": gaps, "variance": float(left_var.sum()),
            "log-variance": float(left_var.log().mean()), "distance": 1 - sum(cosines) / len(cosines),
        }  # fmt: skip
        for name, value in expected.items():
            assert float(scores[name][q]) == pytest.approx(value, rel=1e-4, abs=1e-5), name


def looped(low, high):
    return sum((h > x) + 0.5 * (h == x) for x in low for h in high) / (len(low) * len(high))


def test_auc_and_its_error():
    """Of one stratum, and of two whose scores and sizes differ and which share their groups."""
    generator = torch.Generator().manual_seed(3)

    def sample(groups, shift):
        """Four scores a group, which share most of their noise; rounded, so that there are ties."""
        noise = torch.randn(groups, 1, generator=generator) + 0.3 * torch.randn(groups, 4, generator=generator)
        return (4 * (noise + shift)).round() / 4, torch.arange(groups)[:, None].expand(groups, 4)

    values, errors = [], []
    for trial in range(400):
        both = sample(30, 0.0), sample(20, 1.0)
        strata = [
            [tuple(x.flatten() for x in one) for one in both],
            [(3 - 0.5 * both[0][0][:, :1].flatten(), both[0][1][:, 0]), (3 + both[1][0][:, 3], both[1][1][:, 3])],
        ]
        found = [auc_estimate(strata[:1]), auc_estimate(strata)]
        if trial < 3:
            areas = [looped(low.tolist(), high.tolist()) for (low, _), (high, _) in strata]
            assert found[0]["value"] == pytest.approx(areas[0])
            assert found[1]["value"] == pytest.approx((80 * areas[0] + 20 * areas[1]) / 100)
        values.append([one["value"] for one in found])
        errors.append([one["se"] for one in found])
    spread = torch.tensor(values).std(0).tolist()
    assert torch.tensor(errors).mean(0).tolist() == pytest.approx(spread, rel=0.12)
