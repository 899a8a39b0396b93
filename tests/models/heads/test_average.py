"""The average of tokens."""

import torch

from probemb.models.features import Features
from probemb.models.heads import HeadConfig
from probemb.models.heads.average import AverageHead

MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_is_the_mean_of_the_tokens_that_exist():
    tokens = torch.randn(2, 3, 4)
    head = AverageHead.for_mean(HeadConfig("average", 4), 4, 9)
    assert not list(head.parameters())
    found = head(Features(tokens, tokens[:, 0], MASK))
    torch.testing.assert_close(found, torch.stack([tokens[0, :2].mean(0), tokens[1, 0]]))
    torch.testing.assert_close(head(Features(tokens, tokens[:, 0])), tokens.mean(1))
    assert torch.equal(head.embed_tokens(tokens), tokens)


def test_another_width_is_mapped_and_the_log_variance_always_is():
    tokens = torch.randn(2, 3, 4)
    head = AverageHead.for_mean(HeadConfig("average", 6), 4, 9)
    mapped = head.embed_tokens(tokens)
    torch.testing.assert_close(mapped, tokens @ head.linear.weight.T + head.linear.bias)
    torch.testing.assert_close(head(Features(tokens, tokens[:, 0], MASK))[1], mapped[1, 0])
    log_var = AverageHead.for_log_var(HeadConfig("average", 4), 4, 9)
    assert len(list(log_var.parameters())) == 2
