"""Pairs with several embeddings of an item, for what compares single ones."""

import torch

from probemb import Gaussian
from probemb.evaluation.embed_pairs import EmbeddedPairs, centres


def pairs(*shape):
    g = torch.Generator().manual_seed(0)
    sides = (Gaussian(*(torch.randn(n, *shape, generator=g) for _ in range(2))) for n in (3, 4))
    return EmbeddedPairs(*sides, torch.tensor([0, 0, 1, 2]), [0, 1, 2], [])


def test_the_centre_of_several_embeddings_is_their_mean_on_the_sphere():
    found, several = centres(pairs(2, 5)), pairs(2, 5)
    for one, whole in ((found.images, several.images), (found.texts, several.texts)):
        for i, item in enumerate(whole.mean):
            middle = (item[0] + item[1]) / 2
            torch.testing.assert_close(one.mean[i], middle / middle.norm())
        torch.testing.assert_close(one.log_var.exp(), (whole.var[:, 0] + whole.var[:, 1]) / 2)
    assert torch.equal(found.owner, several.owner)
