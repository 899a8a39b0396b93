"""Products of pairs of tokens: their gradient by differences, and any number of pairs at a time."""

import pytest
import torch

from probemb import cross_attention
from probemb.cross_attention import pair_products


@pytest.mark.parametrize("at_a_time", [1, 32])
def test_products_and_their_gradient(at_a_time, monkeypatch):
    monkeypatch.setattr(cross_attention, "PAIRS", at_a_time)
    g = torch.Generator().manual_seed(0)
    context, query = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((4, 3, 5), (3, 2, 5)))
    pairs = torch.tensor([0, 3, 3, 1, 3]), torch.tensor([2, 0, 0, 2, 1])  # the same twice, and items without a pair
    lengths = torch.tensor([3, 1, 3, 2]), torch.tensor([2, 1, 2])
    exists = [torch.arange(n) < of[:, None] for n, of in zip((3, 2), lengths)]
    mask = exists[0][pairs[0]][:, :, None] & exists[1][pairs[1]][:, None]
    products, gram, squares = pair_products(context, query, pairs, lengths)
    expected = torch.einsum("pcd,pqd->pcq", context[pairs[0]], query[pairs[1]])
    torch.testing.assert_close(products * mask, expected * mask)
    torch.testing.assert_close(gram, torch.einsum("ncd,nqd->ncq", context, context))
    torch.testing.assert_close(squares, query.square().sum(-1))
    leaves = context.requires_grad_(), query.requires_grad_()

    def of_tokens(c, q):
        found, *others = pair_products(c, q, pairs, lengths)
        return found * mask, *others

    assert torch.autograd.gradcheck(of_tokens, leaves)
