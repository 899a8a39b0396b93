"""Scores of composed queries against the similarities that the losses train."""

import torch
from torch.nn import functional as F

from probemb import Gaussian
from probemb.compose import compose
from probemb.data.compositions import Part, Query
from probemb.evaluation.composed import ComposedQueries, composed_scores, ranked_by
from probemb.evaluation.embedding import EmbeddedImages
from probemb.losses.mpc import expected_similarity
from probemb.metrics import closest_items


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
    assert torch.equal(closest_items(density, 5, 40, 10), expected.topk(10).indices)


def test_the_images_of_a_query_can_rank_last():
    parts, gallery = draw(2, 3, 16, seed=0), draw(4, 16, seed=1)
    images = EmbeddedImages(gallery, kept=[0, 2, 5, 7], bad=[])
    queries = [
        Query((Part(0, image=5), Part(1, text="word")), (0, 1)),
        Query((Part(0, image=5), Part(1, image=2)), (0, 1)),
        Query((Part(0, image=3), Part(1, image=7)), (0, 1)),  # 3 could not be read
    ]
    found = ComposedQueries(
        queries, compose(parts), Gaussian(parts.mean.transpose(0, 1), parts.log_var.transpose(0, 1))
    )
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
