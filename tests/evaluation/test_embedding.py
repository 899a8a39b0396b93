"""Embeddings in batches: texts once each, in order, and refusals."""

import pytest
import torch

from probemb.errors import UserError
from probemb.evaluation.embedding import encode_images, encode_texts
from probemb.gaussian import Gaussian


class CountingEncoder:
    """A causal stand-in for a text tower: depends on the tokens up to the end token only."""

    def __init__(self):
        self.encoded, self.columns = 0, 0

    def __call__(self, tokens):
        self.encoded += len(tokens)
        self.columns += tokens.numel()
        weights = torch.arange(1, tokens.shape[1] + 1, dtype=torch.float32)
        mean = torch.stack([(tokens * weights).sum(1), tokens.float().sum(1)], 1)
        return Gaussian(mean, -mean)


def test_texts_are_encoded_once_each_cut_behind_the_longest_and_come_back_in_order():
    tokens = torch.tensor([[1, 5, 9, 0, 0], [1, 9, 0, 0, 0], [1, 5, 9, 0, 0], [1, 2, 3, 9, 0]])
    encoder, told = CountingEncoder(), []
    found = encode_texts(
        encoder, tokens, batch_size=2, cut=lambda t: t[:, : int(t.count_nonzero(dim=1).max())], progress=told.append
    )
    expected = CountingEncoder()(tokens)
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.log_var, expected.log_var)
    assert encoder.encoded == 3
    assert encoder.columns == 2 * 3 + 4
    assert sum(told) == 4


def test_embeddings_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match="not finite"):
        encode_images(lambda x: Gaussian(x / 0, x), [torch.ones(2, 3)])
    with pytest.raises(UserError, match="not finite"):  # e^100 overflows float32
        encode_images(lambda x: Gaussian(x, 100 * x), [torch.ones(2, 3)])
    with pytest.raises(UserError, match="nothing to encode"):
        encode_images(lambda x: Gaussian(x, x), [])
