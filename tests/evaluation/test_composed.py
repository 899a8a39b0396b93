"""Scores of composed queries against the similarities that the losses train; feasibility against plain loops."""

import pytest
import torch
from torch.distributions import Normal
from torch.nn import functional as F

from probemb import Gaussian
from probemb.compose import COMPOSERS, compose
from probemb.data.compositions.dataset import Part, Query
from probemb.evaluation.composed import SCORES, ComposedQueries, auc_estimate, composed_scores, infeasibility, ranked_by
from probemb.evaluation.embedding import EmbeddedImages
from probemb.losses.mpc import expected_similarity
from probemb.metrics.retrieval import ranking


def draw(*shape, seed):
    g = torch.Generator().manual_seed(seed)
    return Gaussian(torch.randn(*shape, generator=g), 0.5 * torch.randn(*shape, generator=g))


def test_scores_and_their_rankings():
    query, gallery = compose(draw(3, 5, 16, seed=0)), draw(40, 16, seed=1)
    density, cosine = (composed_scores(query, gallery, by) for by in ("density", "cosine"))
    assert density.shape == cosine.shape == (5, 40)
    expected = expected_similarity(query, gallery)
    torch.testing.assert_close(density(slice(1, 4)), expected[1:4], rtol=1e-5, atol=1e-4)
    every = F.cosine_similarity(query.gaussian.mean[:, None], gallery.mean[None], dim=-1)
    torch.testing.assert_close(cosine(slice(0, 5)), every)
    assert torch.equal(ranking(density(slice(None)), 10), expected.topk(10).indices)


def test_the_images_of_a_query_can_rank_last():
    parts, gallery = draw(2, 3, 16, seed=0), draw(4, 16, seed=1)
    images = EmbeddedImages(gallery, kept=[0, 2, 5, 7], bad=[])
    queries = [
        Query((Part(0, image=5), Part(1, text="word")), (0, 1)),
        Query((Part(0, image=5), Part(1, image=2)), (0, 1)),
        Query((Part(0, image=3), Part(1, image=7)), (0, 1)),  # 3 could not be read
    ]
    by_query = Gaussian(parts.mean.transpose(0, 1), parts.log_var.transpose(0, 1))
    found = ComposedQueries(queries, compose(parts), by_query)
    plain = composed_scores(found.composed, gallery)(slice(0, 3))
    for rows in (slice(0, 3), slice(1, 3)):
        scores = ranked_by(images, found, without_own=True)(rows)
        for row, own in zip(scores, [{2}, {1, 2}, {3}][rows]):
            assert set(row.argsort()[: len(own)].tolist()) == own
        others = torch.ones(3, 4, dtype=torch.bool)
        others[0, 2] = others[1, 1] = others[1, 2] = others[2, 3] = False
        assert torch.equal(scores[others[rows]], plain[rows][others[rows]])
    assert torch.equal(ranked_by(images, found)(slice(0, 3)), plain)
    some = found.only(torch.tensor([2, 0]))
    assert some.queries == [queries[2], queries[0]]
    assert torch.equal(some.parts.mean[0], found.parts.mean[2])
    assert torch.equal(some.composed.log_normaliser, found.composed.log_normaliser[[2, 0]])


Q, D = 6, 8


def drawn(composer, k):
    generator = torch.Generator().manual_seed(0)
    mean, log_var = (torch.randn(Q, k, D, generator=generator) for _ in range(2))
    parts = Gaussian(F.normalize(mean, dim=-1), log_var)
    with torch.no_grad():
        return ComposedQueries([], composer(parts), parts)


@pytest.mark.parametrize("k", [2, 3])
def test_scores_equal_a_plain_loop(k):
    composer = COMPOSERS["product"](D)
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
