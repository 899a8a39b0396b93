"""Embeddings in batches, and pairs of them."""

import pytest
import torch

from probemb import Gaussian
from probemb.errors import UserError
from probemb.evaluation.embedding import EmbeddedPairs, centres, encode_images, encode_texts


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


def pairs(*shape):
    g = torch.Generator().manual_seed(0)
    sides = (Gaussian(*(torch.randn(n, *shape, generator=g) for _ in range(2))) for n in (3, 4))
    return EmbeddedPairs(*sides, torch.tensor([0, 0, 1, 2]), [0, 1, 2], [])


def test_the_centre_of_several_embeddings_is_their_mean_direction_with_their_mean_length():
    found, several = centres(pairs(2, 5)), pairs(2, 5)
    for one, whole in ((found.images, several.images), (found.texts, several.texts)):
        for i, item in enumerate(whole.mean):
            middle = (item[0] + item[1]) / 2
            torch.testing.assert_close(one.mean[i], middle / middle.norm() * item.norm(dim=1).mean())
        torch.testing.assert_close(one.log_var.exp(), (whole.var[:, 0] + whole.var[:, 1]) / 2)
    assert torch.equal(found.owner, several.owner)
