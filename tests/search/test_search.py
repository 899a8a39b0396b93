"""FAISS search under CSD."""

import pytest
import torch
from torch.nn import functional as F

from probemb import Gaussian
from probemb.distances import csd
from probemb.evaluation.rankings import tolerance_scores
from probemb.metrics.retrieval import ranking
from probemb.search import build_index, rerank, search, search_weighted


def gaussians(n, dim=16, seed=0):
    r = torch.Generator().manual_seed(seed)
    mean = F.normalize(torch.randn(n, dim, generator=r), dim=1)
    return Gaussian(mean, torch.randn(n, dim, generator=r) - 3 + torch.randn(n, 1, generator=r))


def assert_ranked(found, truth):
    """`found` are the closest under `truth`, in order, but for differences that float32 does not see."""
    best = truth.sort(dim=1).values[:, : found.shape[1]]
    torch.testing.assert_close(truth.gather(1, found), best, rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == len(row) for row in found.tolist())


def test_large_variances_leave_the_ranking_as_it_is():
    """In float32 the u of every variance near e^3, some 10,000, would swallow the differences of the means."""
    gallery, queries = gaussians(2000, dim=512), gaussians(50, dim=512, seed=1)
    r = torch.Generator().manual_seed(2)
    large = Gaussian(gallery.mean, 3 + 1e-4 * torch.randn(2000, 512, generator=r))
    distance, found = search(build_index(large), queries, 10)
    u = large.uncertainty()
    exact = (queries.mean.double()[:, None] - large.mean.double()).square().sum(-1) + u.double()
    closest = exact.argsort(dim=1)[:, :10]
    assert (found == closest).all(1).double().mean() > 0.9
    by_mean, other = build_index(large, form="mean"), build_index(large, tolerance=-1.0)
    certain = Gaussian(queries.mean, torch.full_like(queries.mean, 3.0))  # u is large on both sides
    reranked = rerank(by_mean, certain, 10, 2000)
    for measured, ranked in (
        reranked,
        search_weighted(by_mean, certain, 10, 1.0),
        search_weighted(other, certain, 10, 1.0),
    ):
        assert (ranked == closest).all(1).double().mean() > 0.9
        torch.testing.assert_close(
            measured.double(), exact.gather(1, ranked) + certain.uncertainty().double()[:, None], rtol=1e-6, atol=0
        )
    scores = tolerance_scores(certain, large)(slice(None))
    assert torch.equal(scores.argsort(dim=1, descending=True)[:, :10], closest)
    torch.testing.assert_close(
        distance.double(), exact.gather(1, found) + queries.uncertainty().double()[:, None], rtol=1e-6, atol=0
    )


def test_the_means_alone_and_re_ranking():
    gallery, queries = gaussians(300), gaussians(40, seed=1)
    index = build_index(gallery, form="mean")
    distance, found = search(index, queries, 20)
    squared = torch.cdist(queries.mean, gallery.mean).square()
    assert_ranked(found, squared)
    torch.testing.assert_close(distance, squared.gather(1, found), rtol=1e-4, atol=1e-5)
    truth = csd(queries, gallery)
    distance, whole = rerank(index, queries, 20, candidates=300)
    assert_ranked(whole, truth)
    torch.testing.assert_close(distance, truth.gather(1, whole), rtol=1e-5, atol=1e-5)
    _, few = rerank(index, queries, 20, candidates=20)
    assert torch.equal(few.sort(dim=1).values, found.sort(dim=1).values)  # it finds no others
    assert not torch.equal(few, whole)


@pytest.mark.parametrize("weight", [-2.0, -0.5, 0.0, 0.25, 1.0, 3.0])
def test_any_weight_of_the_variances_in_one_more_dimension(weight):
    """The lists are those of the score ranking, from an index of that weight and, exactly, from those of others."""
    gallery, queries = gaussians(60), gaussians(20, seed=1)  # few enough for no near ties
    scores = tolerance_scores(queries, gallery, i2t=weight, t2i=1.0)(slice(0, 20))
    want = ranking(scores, 60)
    distance, found = search(build_index(gallery, tolerance=weight), queries, 60)
    assert torch.equal(found, want)
    torch.testing.assert_close(distance, -scores.gather(1, found), rtol=1e-5, atol=1e-4)
    for form, own in (("csd", 1.0), ("mean", 1.0), ("csd", -0.5), ("csd", 2.0)):
        for k in (1, 7, 60):
            index = build_index(gallery, form=form, tolerance=own)
            distance, found = search_weighted(index, queries, k, weight)
            assert torch.equal(found, want[:, :k])
            torch.testing.assert_close(distance, -scores.gather(1, found), rtol=1e-5, atol=1e-4)


def test_an_index_that_finds_too_few_says_so():
    gallery, queries = gaussians(400), gaussians(5, seed=1)
    distance, found = search(build_index(gallery, "IVF40,Flat"), queries, 100)  # looks into one cell of forty
    assert (found == -1).any()
    assert torch.equal(distance.isinf(), found == -1)
    _, again = rerank(build_index(gallery, "IVF40,Flat", form="mean"), queries, 5, 100)
    assert (again[:, 0] >= 0).all()
