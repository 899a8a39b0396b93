"""Scores by KL and over several embeddings, against `probemb.distances` and loops."""

import pytest
import torch

from probemb import Gaussian
from probemb.errors import UserError
from probemb.evaluation.rankings import fitting, make_ranker, ranking_names
from probemb.evaluation.scores import multi_instance_scores
from probemb.models import create_model

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
