"""The ranking by cross attention: kept tokens, blocks, both directions, and models that were not trained for it."""

import pytest
import torch

from probemb.cross_attention import CrossAttention, Tokens, attention_scores
from probemb.evaluation import attention
from probemb.evaluation.attention import AttentionScores
from probemb.evaluation.kept_tokens import TokenKeeper
from probemb.evaluation.rankings import RankingOptions, make_ranker
from probemb.gaussian import Gaussian


def batch(n, length, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (n,), generator=g)
    return torch.randn(n, length, 8, generator=g), torch.arange(length) < lengths[:, None]


def kept(sizes, length, seed):
    keeper, parts = TokenKeeper(), [batch(n, length - i, seed + i) for i, n in enumerate(sizes)]
    for part in parts:
        keeper.add(*part)
    return keeper, parts


def whole(parts, length):
    values = torch.cat([torch.nn.functional.pad(v, (0, 0, 0, length - v.shape[1])) for v, _ in parts])
    mask = torch.cat([torch.nn.functional.pad(m, (0, length - m.shape[1])) for _, m in parts])
    return Tokens(torch.nn.functional.normalize(values, dim=-1) * mask[..., None], mask)


@pytest.fixture
def sides():
    images, texts = kept((4, 3), 5, 0), kept((6, 7, 2), 6, 9)
    return images[0].kept(), texts[0].kept(), whole(images[1], 5), whole(texts[1], 6)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_scores_are_those_of_the_tokens(sides, direction, monkeypatch):
    monkeypatch.setattr(attention, "IMAGES", 3)
    monkeypatch.setattr(attention, "TEXTS", 4)
    how = CrossAttention(direction)
    expected = attention_scores(*sides[2:], how)
    scores = AttentionScores(*sides[:2], how)
    close = {"rtol": 0, "atol": 2e-3}  # float16
    assert scores.shape == (7, 15)
    torch.testing.assert_close(scores(slice(2, 6)), expected[2:6], **close)
    torch.testing.assert_close(scores.transposed()(slice(3, 11)), expected.T[3:11], **close)
    rows, columns = torch.tensor([5, 0]), torch.tensor([14, 3, 3])
    part = scores.only(rows, columns)
    torch.testing.assert_close(part(slice(0, 2)), expected[rows][:, columns], **close)
    torch.testing.assert_close(
        part.transposed().only(torch.tensor([2]), torch.tensor([1]))(slice(None)), expected[[0]][:, [3]], **close
    )
    lists = make_ranker(
        "attention",
        Gaussian(torch.zeros(7, 2), torch.zeros(7, 2)),
        Gaussian(torch.zeros(15, 2), torch.zeros(15, 2)),
        RankingOptions(attention=how, tokens=sides[:2]),
    )(torch.arange(7), torch.arange(15), 3)
    again = scores(slice(None))
    assert torch.equal(lists[0], again.topk(3, dim=1).indices)
    assert torch.equal(lists[1], again.T.topk(3, dim=1).indices)
