"""Inner products of chosen pairs of items' tokens, with a backward pass that copies no more than a few items at a time.

Letters: C items of context with c tokens, Q items of queries with q tokens, P pairs, D dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PAIRS = 32  # copied at a time: some megabytes of tokens


def pair_products(
    context_CcD: Tensor, query_QqD: Tensor, pairs: tuple[Tensor, Tensor], lengths: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Products of each pair's tokens (P, c, q), of context items' own (C, c, c), and queries' squared lengths (Q, q).

    Autograd would keep a copy of both items of every pair, and add up as many gradients of all items as there are
    uses of them; here they are written once. The gradient has no gradient of its own.

    Args:
        context_CcD, query_QqD: in the same precision.
        pairs: the numbers of each pair's context and query, (P,) int64.
        lengths: how many tokens each item has, (C,) and (Q,); of others, a pair's products may be 0.
    """
    return _PairProducts.apply(context_CcD, query_QqD, *pairs, *lengths)


class _PairProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, context_CcD, query_QqD, of_context_P, of_query_P, length_C, length_Q):
        ctx.save_for_backward(context_CcD, query_QqD)
        ctx.parts = _parts(of_context_P, of_query_P, length_C, length_Q)
        products_Pcq = context_CcD.new_zeros(len(of_query_P), context_CcD.shape[1], query_QqD.shape[1])
        for part, context, c, query, q in ctx.parts:
            of_part = _take(context_CcD, context, c) @ _take(query_QqD, query, q).transpose(1, 2)
            products_Pcq[:, :c, :q].index_copy_(0, part, of_part)
        squares_Qq = torch.linalg.vector_norm(query_QqD, dim=-1).square()
        return products_Pcq, context_CcD @ context_CcD.transpose(1, 2), squares_Qq

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_Pcq, grad_Ccc, grad_Qq):
        context_CcD, query_QqD = ctx.saved_tensors
        of_context_CcD = (grad_Ccc + grad_Ccc.transpose(1, 2)) @ context_CcD
        of_query_QqD = query_QqD * (2 * grad_Qq[..., None])
        for part, context, c, query, q in ctx.parts:
            grad = grad_Pcq[:, :c, :q].index_select(0, part)
            of_context_CcD[:, :c].index_add_(0, context, grad @ _take(query_QqD, query, q))
            of_query_QqD[:, :q].index_add_(0, query, grad.transpose(1, 2) @ _take(context_CcD, context, c))
        return of_context_CcD, of_query_QqD, None, None, None, None


def _take(values_BtD: Tensor, items: Tensor, tokens: int) -> Tensor:
    return values_BtD[:, :tokens].index_select(0, items)


def _parts(
    of_context_P: Tensor, of_query_P: Tensor, length_C: Tensor, length_Q: Tensor
) -> list[tuple[Tensor, Tensor, int, Tensor, int]]:
    """Pairs of similar length: their numbers, their context, its longest, their queries, the longest of these."""
    lengths_2P = torch.stack([length_C[of_context_P], length_Q[of_query_P]])
    parts = lengths_2P.sum(0).argsort().split(PAIRS)
    longest = torch.stack([lengths_2P[:, part].amax(1) for part in parts]).tolist()
    return [(part, of_context_P[part], c, of_query_P[part], q) for part, (c, q) in zip(parts, longest)]
