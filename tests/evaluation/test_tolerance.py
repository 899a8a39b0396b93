"""The choice of the variances' weights."""

import pytest
import torch

from probemb import Gaussian
from probemb.evaluation.embed_pairs import EmbeddedPairs
from probemb.evaluation.rankings import RankingOptions, both_directions, depth_for, make_ranker, rank_all
from probemb.evaluation.tolerance import GRID, Tolerance, choose_tolerance
from probemb.metrics import Positives

N, M, DIM = 30, 60, 16


def spread(n, u, generator):
    """Random directions with these uncertainties (n,)."""
    mean = torch.nn.functional.normalize(torch.randn(n, DIM, generator=generator, dtype=torch.float64), dim=1)
    return Gaussian(mean, (u / DIM).log()[:, None].expand(n, DIM).contiguous())


@pytest.fixture
def vague():
    """Captions that fit more images the larger their variance; images alike."""
    draw = torch.Generator().manual_seed(0)
    u = torch.rand(M, generator=draw, dtype=torch.float64) + 0.1
    match = torch.rand(N, M, generator=draw, dtype=torch.float64) < 0.6 * u
    images, texts = spread(N, torch.full((N,), 0.3, dtype=torch.float64), draw), spread(M, u, draw)
    pairs = EmbeddedPairs(images, texts, torch.arange(M) // 2, list(range(N)), [])
    return pairs, Positives.from_matrix(match)


def test_the_curve_is_that_of_the_ranking_under_every_weight(vague, monkeypatch):
    pairs, positives = vague
    whole = choose_tolerance(pairs, positives)
    monkeypatch.setattr("probemb.evaluation.tolerance.CHUNK_ELEMENTS", 7 * M)
    recall = choose_tolerance(pairs, positives, "recall")
    assert choose_tolerance(pairs, positives).curve == whole.curve  # by blocks of queries
    for place, weight in enumerate(GRID):
        options = RankingOptions(tolerance=Tolerance(weight, weight))
        ranked = rank_all(make_ranker("tolerance", pairs.images, pairs.texts, options), N, M, depth_for([positives]))
        found = both_directions(ranked, positives)
        for way in ("i2t", "t2i"):
            assert whole.curve[way][place] == pytest.approx(found[way]["map_at_r"], abs=1e-12)
            mean = sum(found[way][f"r@{k}"] for k in (1, 5, 10)) / 3
            assert recall.curve[way][place] == pytest.approx(mean, abs=1e-12)


def test_vague_captions_that_fit_more_images_want_a_tolerance(vague):
    pairs, positives = vague
    found = choose_tolerance(pairs, positives)
    assert found.i2t < 0
    assert found.t2i == 0  # images of one variance: all weights are equal, and 0 is the simplest
    at = dict(zip(found.curve["lambda"], found.curve["i2t"]))
    assert at[found.i2t] == max(at.values()) > at[0] > at[1]
    assert (found.chosen, found.metric) == ("oracle", "map_at_r")
    few = Positives.from_pairs(positives.keys // M, M - 1 - positives.keys % M, N, M)
    turned = pairs._replace(texts=pairs.texts[torch.arange(M - 1, -1, -1)])
    assert choose_tolerance(turned, few).curve["i2t"] == pytest.approx(found.curve["i2t"])
