"""Scores by blocks of rows against the distances."""

import pytest
import torch

from probemb import Gaussian
from probemb.cross_attention import CrossAttention
from probemb.distances import (
    bhattacharyya,
    csd,
    elk,
    inclusion,
    kl,
    match_probability_of_samples,
    mean_distance_of_samples,
    min_kl,
    symmetric_kl,
    wasserstein2,
)
from probemb.errors import UserError
from probemb.evaluation.kept_tokens import KeptTokens, TokenKeeper
from probemb.evaluation.rankings import fitting, make_ranker, ranking_names
from probemb.evaluation.scores import (
    SCORES,
    average_l2_scores,
    both_ways,
    match_probability_scores,
    multi_instance_scores,
    tolerance_scores,
)
from probemb.models import create_model


def pair(dtype=torch.float64):
    r = torch.Generator().manual_seed(0)
    draw = lambda n: Gaussian(*(torch.randn(n, 6, generator=r, dtype=torch.float64).to(dtype) for _ in range(2)))  # noqa: E731
    return draw(7), draw(11)


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("csd", lambda a, b: -csd(a, b)),
        ("wasserstein2", lambda a, b: -wasserstein2(a, b)),
        ("mean", lambda a, b: a.mean @ b.mean.T),
        ("tolerance", lambda a, b: -csd(a, b)),
        ("log-likelihood", lambda a, b: -elk(a, b)),
        ("inclusion", inclusion),
        ("symmetric-kl", lambda a, b: -symmetric_kl(a, b)),
        ("bhattacharyya", lambda a, b: -bhattacharyya(a, b)),
        ("kl", lambda a, b: -kl(a, b)),
        ("min-kl", lambda a, b: -min_kl(a, b)),
    ],
)
def test_equal_the_distances(name, truth, monkeypatch):
    monkeypatch.setattr("probemb.evaluation.scores.PAIR_ELEMENTS", 22)  # two rows at a time
    a, b = pair()
    scores, want = SCORES[name](a, b), truth(a, b)
    assert scores.shape == (7, 11)
    torch.testing.assert_close(scores(slice(2, 5)), want[2:5], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scores.transposed()(slice(0, 11)), want.T, rtol=1e-12, atol=1e-12)
    rows, columns = torch.tensor([3, 1]), torch.tensor([10, 0, 4])
    torch.testing.assert_close(scores.only(rows, columns)(slice(0, 2)), want[rows][:, columns], rtol=1e-12, atol=1e-12)
    assert SCORES[name](*pair(torch.bfloat16))(slice(0, 7)).dtype == torch.float32


def some_tokens(n: int, seed: int) -> KeptTokens:
    """Two to five tokens of each of n items, kept on disk."""
    draw, keeper = torch.Generator().manual_seed(seed), TokenKeeper()
    mask = torch.arange(5) < torch.randint(2, 6, (n, 1), generator=draw)
    keeper.add(torch.randn(n, 5, 4, generator=draw), mask)
    return keeper.kept()


@pytest.mark.parametrize("name", list(SCORES))
def test_both_ways_are_the_same_whether_held_or_not(name):
    more = {"how": CrossAttention(), "tokens": (some_tokens(7, 0), some_tokens(11, 1))} if name == "attention" else {}
    scores = SCORES[name](*pair(), **more)
    forward, backward = both_ways(scores, most=77)
    assert forward.shape == backward.T.shape == (7, 11)
    again, transposed = both_ways(scores, most=76)
    assert callable(again)
    assert callable(transposed)
    torch.testing.assert_close(again(slice(2, 5)), forward[2:5], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(transposed(slice(3, 9)), backward[3:9], rtol=1e-6, atol=1e-6)


def test_the_average_distance_is_that_of_all_pairs_of_samples():
    a, b = pair()
    scores = average_l2_scores(a, b, n_samples=3)
    left, right = (torch.stack([scores._draw(side, j) for j in range(3)], 1) for side in (0, 1))
    want = torch.tensor([[-sum((x - y).norm() for x in p for y in q) / 9 for q in right] for p in left])
    torch.testing.assert_close(scores(slice(0, 7)), want.to(left.dtype), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mean_distance_of_samples(left, right), -scores(slice(0, 7)))
    torch.testing.assert_close(scores.transposed()(slice(0, 11)), scores(slice(0, 7)).T)


def test_one_set_of_samples_for_all_blocks(monkeypatch):
    monkeypatch.setattr("probemb.evaluation.scores.SAMPLE_ELEMENTS", 25)
    a, b = pair()
    scores = match_probability_scores(a, b, scale=0.5, shift=1.0, n_samples=4)
    left, right = (torch.stack([scores._draw(side, j) for j in range(4)], 1) for side in (0, 1))
    assert len(torch.cat([left, right]).unique()) == 18 * 4 * 6  # no two samples share their noise
    whole = match_probability_of_samples(left, right, 0.5, 1.0)
    torch.testing.assert_close(scores(slice(0, 7)), whole)
    torch.testing.assert_close(torch.cat([scores(slice(0, 3)), scores(slice(3, 7))]), whole)
    torch.testing.assert_close(scores.transposed()(slice(0, 11)), whole.T)
    assert torch.equal(match_probability_scores(a, b, 0.5, 1.0, 4)(slice(0, 7)), scores(slice(0, 7)))
    few = scores.only(torch.tensor([3, 1]), torch.arange(11))
    assert few(slice(0, 2)).shape == few.shape == (2, 11)


def test_tolerance_weighs_the_variances_of_each_side():
    a, b = pair()
    for i2t, t2i in ((-1.0, 0.5), (0.0, -2.0), (2.0, 1.0)):
        want = torch.empty(7, 11, dtype=torch.float64)
        for i in range(7):
            for c in range(11):
                distance = sum((x - y) ** 2 for x, y in zip(a.mean[i].tolist(), b.mean[c].tolist()))
                own = sum(v.exp().item() for v in a.log_var[i]), sum(v.exp().item() for v in b.log_var[c])
                want[i, c] = -(distance + t2i * own[0] + i2t * own[1])
        torch.testing.assert_close(tolerance_scores(a, b, i2t, t2i)(slice(0, 7)), want, rtol=1e-12, atol=1e-12)
    assert torch.equal(tolerance_scores(a, b)(slice(0, 7)), SCORES["csd"](a, b)(slice(0, 7)))
    means = -torch.cdist(a.mean, b.mean).square()
    torch.testing.assert_close(tolerance_scores(a, b, 0, 0)(slice(0, 7)), means, rtol=1e-9, atol=1e-9)


N, M, K, D = 13, 21, 3, 8


def gaussians(seed=0, shape=()):
    draw = torch.Generator().manual_seed(seed)
    return [
        Gaussian(torch.randn(n, *shape, D, generator=draw), torch.randn(n, *shape, D, generator=draw)) for n in (N, M)
    ]


def test_multi_instance_is_the_largest_of_all_pairs_of_embeddings(monkeypatch):
    a, b = gaussians(1, (K,))
    expected = torch.tensor(
        [[max(float(x @ y) for x in a.mean[i] for y in b.mean[j]) for j in range(M)] for i in range(N)]
    )
    torch.testing.assert_close(multi_instance_scores(a, b)(slice(None)), expected)
    monkeypatch.setattr("probemb.evaluation.scores.INSTANCE_ELEMENTS", 1)  # one row at a time
    found = multi_instance_scores(a, b)
    torch.testing.assert_close(found(slice(2, 9)), expected[2:9])
    torch.testing.assert_close(found.transposed()(slice(None)), expected.T)
    i2t, _ = make_ranker("multi-instance", a, b)(torch.arange(N), torch.arange(M), 4)
    assert torch.equal(i2t, expected.topk(4).indices)


def test_a_models_own_ranking_comes_first_and_others_must_fit():
    several = create_model("ViT-Micro-32", head="pie", n_embeddings=2, probabilistic=False, ranking="multi-instance")
    by_kl, point = (create_model("ViT-Micro-32", **one) for one in ({"ranking": "min-kl"}, {"probabilistic": False}))
    default = ranking_names(None)
    of_points = [name for name in default if name not in ("wasserstein2", "match-probability", "tolerance")]
    assert fitting(default, point, given=False) == of_points
    assert fitting(default, by_kl, given=False) == ["min-kl", *default]
    assert fitting(default, several, given=False) == ["multi-instance"]
    with pytest.raises(UserError, match="csd does not fit a model with 2 embeddings of an item"):
        fitting(["csd"], several, given=True)
