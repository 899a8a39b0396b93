"""Scores by blocks of rows against the distances; the ranking by cross attention; which rankings fit a model."""

import sys

import pytest
import torch

from probemb import Gaussian, distances
from probemb.cli.configuration import docstring_texts
from probemb.cross_attention import CrossAttention, Tokens, attention_scores
from probemb.errors import UserError
from probemb.evaluation import rankings
from probemb.evaluation.embedding import KeptTokens
from probemb.models import create_model
from zeroshot.evaluations.filters import FILTERS
from zeroshot.imagenet import ImagenetConfig
from zeroshot.retrieval import RetrievalConfig

SCORED = [name for name, ranking in rankings.RANKINGS.items() if ranking.scores]


def pair(dtype=torch.float64):
    r = torch.Generator().manual_seed(0)
    draw = lambda n: Gaussian(*(torch.randn(n, 6, generator=r, dtype=torch.float64).to(dtype) for _ in range(2)))  # noqa: E731
    return draw(7), draw(11)


TRUTHS = {  # minus this distance
    "csd": distances.csd, "tolerance": distances.csd, "wasserstein2": distances.wasserstein2, "kl": distances.kl,
    "symmetric-kl": distances.symmetric_kl, "min-kl": distances.min_kl, "log-likelihood": distances.elk,
    "bhattacharyya": distances.bhattacharyya, "mean": lambda a, b: -a.mean @ b.mean.T,
    "inclusion": lambda a, b: -distances.inclusion(a, b),
}  # fmt: skip


@pytest.mark.parametrize("name", TRUTHS)
def test_equal_the_distances(name, monkeypatch):
    monkeypatch.setattr(rankings, "PAIR_ELEMENTS", 22)  # two rows at a time
    a, b = pair()
    scores, want = rankings.scores_of(name, a, b), -TRUTHS[name](a, b)
    assert scores.shape == (7, 11)
    torch.testing.assert_close(scores(slice(2, 5)), want[2:5], rtol=1e-12, atol=1e-12)
    rows, columns = torch.tensor([3, 1]), torch.tensor([10, 0, 4])
    torch.testing.assert_close(scores.only(rows, columns)(slice(0, 2)), want[rows][:, columns], rtol=1e-12, atol=1e-12)
    assert rankings.scores_of(name, *pair(torch.bfloat16))(slice(0, 7)).dtype == torch.float32


@pytest.mark.parametrize("name", SCORED)
def test_both_ways_are_the_same_whether_held_or_not(name):
    tokens = kept((7,), 5, 0)[0], kept((11,), 5, 1)[0]
    scores = rankings.scores_of(name, *pair(), rankings.RankingOptions(attention=CrossAttention(), tokens=tokens))
    forward, backward = scores.both_ways(most=77)
    whole = forward(slice(None))
    assert whole.shape == (7, 11)
    for there, back in ((forward, backward), scores.both_ways(most=76)):
        torch.testing.assert_close(there(slice(2, 5)), whole[2:5], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(back(slice(3, 9)), whole.T[3:9], rtol=1e-6, atol=1e-6)


def samples_of(scores, n):
    return (torch.stack([side.draw(j) for j in range(n)], 1) for side in (scores.left, scores.right))


def test_the_average_distance_is_that_of_all_pairs_of_samples():
    a, b = pair()
    scores = rankings.scores_of("average-l2", a, b, rankings.RankingOptions(samples=3))
    left, right = samples_of(scores, 3)
    want = torch.tensor([[-sum((x - y).norm() for x in p for y in q) / 9 for q in right] for p in left])
    torch.testing.assert_close(scores(slice(0, 7)), want.to(left.dtype), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(distances.mean_distance_of_samples(left, right), -scores(slice(0, 7)))


def test_one_set_of_samples_for_all_blocks(monkeypatch):
    monkeypatch.setattr(rankings, "SAMPLE_ELEMENTS", 25)
    a, b = pair()
    scores = rankings.match_probability_scores(a, b, scale=0.5, shift=1.0, n_samples=4)
    left, right = samples_of(scores, 4)
    assert len(torch.cat([left, right]).unique()) == 18 * 4 * 6  # no two samples share their noise
    whole = distances.match_probability_of_samples(left, right, 0.5, 1.0)
    torch.testing.assert_close(scores(slice(0, 7)), whole)
    torch.testing.assert_close(torch.cat([scores(slice(0, 3)), scores(slice(3, 7))]), whole)
    assert torch.equal(rankings.match_probability_scores(a, b, 0.5, 1.0, 4)(slice(0, 7)), scores(slice(0, 7)))
    few = scores.only(torch.tensor([3, 1]), torch.arange(11))
    assert few(slice(0, 2)).shape == few.shape == (2, 11)


def test_tolerance_weighs_the_variances_of_each_side():
    a, b = pair()
    apart, u_a, u_b = torch.cdist(a.mean, b.mean).square(), a.var.sum(1)[:, None], b.var.sum(1)
    for i2t, t2i in ((-1.0, 0.5), (0.0, -2.0), (2.0, 1.0), (0.0, 0.0)):
        want = -(apart + t2i * u_a + i2t * u_b)
        torch.testing.assert_close(rankings.tolerance_scores(a, b, i2t, t2i)(slice(0, 7)), want, rtol=1e-9, atol=1e-9)
    assert torch.equal(rankings.tolerance_scores(a, b)(slice(0, 7)), rankings.scores_of("csd", a, b)(slice(0, 7)))


N, M, K, D = 13, 21, 3, 8


def gaussians(seed=0, shape=()):
    draw = torch.Generator().manual_seed(seed)
    return [
        Gaussian(torch.randn(n, *shape, D, generator=draw), torch.randn(n, *shape, D, generator=draw)) for n in (N, M)
    ]


def test_multi_instance_is_the_largest_of_all_pairs_of_embeddings(monkeypatch):
    a, b = gaussians(1, (K,))
    expected = [[max(float(x @ y) for x in a.mean[i] for y in b.mean[j]) for j in range(M)] for i in range(N)]
    expected = torch.tensor(expected)
    torch.testing.assert_close(rankings.scores_of("multi-instance", a, b)(slice(None)), expected)
    monkeypatch.setattr(rankings, "INSTANCE_ELEMENTS", 1)  # one row at a time
    found = rankings.scores_of("multi-instance", a, b)
    torch.testing.assert_close(found(slice(2, 9)), expected[2:9])
    assert torch.equal(rankings.Ranker("multi-instance", a, b)((4, 4)).i2t, expected.topk(4).indices)


def test_help_names_every_ranking_and_filter():
    for config, option, table in (
        (RetrievalConfig, "rankings", rankings.RANKINGS),
        (ImagenetConfig, "filter", FILTERS),
    ):
        assert docstring_texts(config)[option].startswith(f"{', '.join(table)}, ")


def test_without_faiss_the_usual_rankings_need_none(monkeypatch):
    usual = rankings.ranking_names(None)
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert rankings.ranking_names(None) == [name for name in usual if "faiss" not in name] != usual


def test_a_models_own_ranking_comes_first_and_others_must_fit():
    several = create_model("ViT-Micro-32", head="pie", n_embeddings=2, probabilistic=False, ranking="multi-instance")
    by_kl, point = (create_model("ViT-Micro-32", **one) for one in ({"ranking": "min-kl"}, {"probabilistic": False}))
    default = rankings.ranking_names(None)
    of_points = [name for name in default if name not in ("wasserstein2", "match-probability", "tolerance")]
    assert rankings.fitting(default, point, given=False) == of_points
    assert rankings.fitting(default, by_kl, given=False) == ["min-kl", *default]
    assert rankings.fitting(default, several, given=False) == ["multi-instance"]
    with pytest.raises(UserError, match="csd does not fit a model with 2 embeddings of an item"):
        rankings.fitting(["csd"], several, given=True)


def batch(n, length, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (n,), generator=g)
    return torch.randn(n, length, 8, generator=g), torch.arange(length) < lengths[:, None]


def kept(sizes, length, seed):
    tokens, parts = KeptTokens(), [batch(n, length - i, seed + i) for i, n in enumerate(sizes)]
    for part in parts:
        tokens.add(*part)
    return tokens, parts


def whole(parts, length):
    values = torch.cat([torch.nn.functional.pad(v, (0, 0, 0, length - v.shape[1])) for v, _ in parts])
    mask = torch.cat([torch.nn.functional.pad(m, (0, length - m.shape[1])) for _, m in parts])
    return Tokens(torch.nn.functional.normalize(values, dim=-1) * mask[..., None], mask)


@pytest.fixture
def sides():
    images, texts = kept((4, 3), 5, 0), kept((6, 7, 2), 6, 9)
    return images[0], texts[0], whole(images[1], 5), whole(texts[1], 6)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_scores_are_those_of_the_tokens(sides, direction, monkeypatch):
    monkeypatch.setattr(rankings, "IMAGES", 3)
    monkeypatch.setattr(rankings, "TEXTS", 4)
    how = CrossAttention(direction)
    expected = attention_scores(*sides[2:], how)
    items = [Gaussian(*torch.zeros(2, n, 2)) for n in (7, 15)]
    options = rankings.RankingOptions(attention=how, tokens=sides[:2])
    scores = rankings.scores_of("attention", *items, options)
    close = {"rtol": 0, "atol": 2e-3}  # float16
    assert scores.shape == (7, 15)
    torch.testing.assert_close(scores(slice(2, 6)), expected[2:6], **close)
    rows, columns = torch.tensor([5, 0]), torch.tensor([14, 3, 3])
    torch.testing.assert_close(scores.only(rows, columns)(slice(0, 2)), expected[rows][:, columns], **close)
    lists, again = rankings.Ranker("attention", *items, options)((3, 3)), scores(slice(None))
    assert torch.equal(lists.i2t, again.topk(3, dim=1).indices)
    assert torch.equal(lists.t2i, again.T.topk(3, dim=1).indices)
