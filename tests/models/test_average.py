"""The average of tokens."""

import torch

from probemb.models.features import Features
from probemb.models.heads import AverageHead, HeadConfig

MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_is_the_mean_of_the_tokens_that_exist():
    tokens = torch.randn(2, 3, 4)
    head = AverageHead.for_mean(HeadConfig("average", 4), 4, 9)
    assert not list(head.parameters())
    found = head(Features(tokens, tokens[:, 0], MASK))
    torch.testing.assert_close(found, torch.stack([tokens[0, :2].mean(0), tokens[1, 0]]))
    torch.testing.assert_close(head(Features(tokens, tokens[:, 0])), tokens.mean(1))
    assert torch.equal(head.embed_tokens(tokens), tokens)
