"""Stacked cross attention: scores of images and texts from their tokens. Source: SCAN (Lee et al., ECCV 2018) §3.

One side's tokens are queries, the other's are the context that every query attends to. With v_c the context's tokens
and w_q the queries', in direction "t2i" regions and words, in "i2t" words and regions:

    s_cq = v_c · w_q                     a_cq = norm of s_cq over the queries
    x_q  = Σ_c softmax_c(λ a_cq) v_c     score = aggregation over q of cos(w_q, x_q)

The attended x_q is never made. Its product with w_q is Σ_c e_cq s_cq, its squared length e_q' G e_q with the context's
Gram matrix G, so besides the products s only numbers of a pair of tokens are computed, and those block by block.

Letters: N images, M texts, D dimensions; C items of context with c tokens, Q items of queries with q tokens, P pairs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from probemb.distances import recomputed
from probemb.gaussian import at_least_float32
from probemb.models.options import CrossAttention, Norm

BLOCK_ELEMENTS = 1 << 18, 1 << 21  # products of tokens in a block: a CPU's cache; 8 MiB of a GPU, in some ten copies
QUERY_ITEMS = 16  # of similar length in a block, which so have little padding
SLOPE = 0.1  # of negative products where they are clipped (a leaky ReLU)
EPS, TINY = 1e-8, 1e-30


class Tokens(NamedTuple):
    """Tokens of a batch of items, (B, T, D), and which of them exist, (B, T) bool; each item has one at least."""

    values: Tensor
    mask: Tensor


def unit_tokens(values: Tensor, mask: Tensor) -> Tokens:
    """Tokens of unit length in at least float32; those that do not exist become zero. An item without any keeps one."""
    values, first = at_least_float32(values), torch.arange(mask.shape[1], device=mask.device) == 0
    mask = mask | (first & ~mask.any(1, keepdim=True))
    return Tokens(values / (values.norm(dim=-1, keepdim=True) + EPS) * mask[..., None], mask)


def attention_scores(images: Tokens, texts: Tokens, how: CrossAttention, elements: int | None = None) -> Tensor:
    """Scores of all pairs, (N, M), larger is closer; in at least float32, also under autocast.

    Blocks of some `elements` products are computed again in the backward pass, so memory beyond the result does not
    grow with N or M. Tokens are as the caller has normalised them (`unit_tokens`).
    """
    context, queries = (images, texts) if how.direction == "t2i" else (texts, images)
    elements = elements or BLOCK_ELEMENTS[images.values.is_cuda]
    with torch.autocast(images.values.device.type, enabled=False):
        queries, query_order = _by_length(queries, QUERY_ITEMS)
        queries = list(queries)
        size = elements // (context.mask.shape[1] * max(part.mask.numel() for part in queries))
        context, context_order = _by_length(context, max(1, size))
        rows = []
        for part in context:
            gram_Ccc = part.values @ part.values.mT
            rows.append(torch.cat([recomputed(_all_pairs, *part, gram_Ccc, *query, how) for query in queries], 1))
        scores_CQ = torch.cat(rows)[context_order.argsort()][:, query_order.argsort()]
    return scores_CQ if how.direction == "t2i" else scores_CQ.T


def pair_scores(images: Tokens, texts: Tokens, how: CrossAttention, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Scores of P pairs, (P,), the numbers of their images and texts; holds the tokens of all pairs."""
    numbered = (images, pairs[0]), (texts, pairs[1])
    (context, of_context_P), (queries, of_query_P) = numbered if how.direction == "t2i" else numbered[::-1]
    with torch.autocast(images.values.device.type, enabled=False):
        context_PcD, context_mask = _chosen(context, of_context_P)
        query_PqD, query_mask = _chosen(queries, of_query_P)
        context_CcD, _ = _chosen(context, torch.arange(len(context.mask), device=context.mask.device))
        gram_Pcc = (context_CcD @ context_CcD.mT).index_select(0, of_context_P)
        products, length = context_PcD @ query_PqD.mT, _root(query_PqD.square().sum(-1))
        return _scores(products[..., None], context_mask, gram_Pcc, length[..., None], query_mask[..., None], how)[:, 0]


def _chosen(tokens: Tokens, index: Tensor, end: int | None = None) -> Tokens:
    """The first tokens of some items, in at least float32, with zeros for those that do not exist."""
    values, mask = (x[:, :end].index_select(0, index) for x in tokens)
    return Tokens(at_least_float32(values) * mask[..., None], mask)


def _by_length(tokens: Tokens, size: int) -> tuple[Iterator[Tokens], Tensor]:
    """Parts of `size` items of similar length, without common padding, and the order of the items in them."""
    last = tokens.mask.flip(1).int().argmax(1)  # places behind an item's last token
    order = last.argsort(descending=True, stable=True)
    ends = (tokens.mask.shape[1] - last[order]).split(size)
    return (_chosen(tokens, index, int(end[-1])) for index, end in zip(order.split(size), ends)), order


def _all_pairs(
    context_CcD: Tensor, context_mask_Cc: Tensor, gram_Ccc: Tensor, query_QqD: Tensor, query_mask_Qq: Tensor,
    how: CrossAttention,
) -> Tensor:  # fmt: skip
    """(C, Q), from one matrix product in which items stand behind tokens: sums over tokens run along whole rows."""
    query_qQD, mask_qQ = query_QqD.transpose(0, 1), query_mask_Qq.T
    products_CcR = context_CcD.flatten(0, 1) @ query_qQD.flatten(0, 1).T
    length_qQ = _root(query_qQD.square().sum(-1))
    products_CcqQ = products_CcR.view(*context_mask_Cc.shape, *mask_qQ.shape)
    return _scores(products_CcqQ, context_mask_Cc, gram_Ccc, length_qQ[None], mask_qQ[None], how)


def _scores(
    products_CcqQ: Tensor, context_mask_Cc: Tensor, gram_Ccc: Tensor, length_CqQ: Tensor, mask_CqQ: Tensor,
    how: CrossAttention,
) -> Tensor:  # fmt: skip
    """(C, Q) from the products of tokens and the queries' lengths and mask, (C or 1, q, Q)."""
    attention_CcqQ = _normalised(products_CcqQ, mask_CqQ[:, None], how.norm, how.lambda_softmax)
    weights = attention_CcqQ.masked_fill(~context_mask_Cc[:, :, None, None], -torch.inf).softmax(1)
    along_CqQ = (weights * products_CcqQ).sum(1)
    flat = weights.flatten(2)
    attended_CqQ = _root((flat * (gram_Ccc @ flat)).sum(1)).view_as(along_CqQ)
    cosine_CqQ = along_CqQ / (attended_CqQ * length_CqQ).clamp(min=EPS)
    return _aggregate(cosine_CqQ, mask_CqQ, how)


def _normalised(x: Tensor, mask: Tensor, norm: Norm, scale: float) -> Tensor:
    """`scale` times x over the queries' tokens, dimension 2; products of tokens that do not exist are 0."""
    if norm.startswith("clipped"):
        x = F.leaky_relu(x, SLOPE)
    if norm.endswith("l2norm"):
        return x * (scale / (_root(x.square().sum(2, keepdim=True)) + EPS))
    if norm.endswith("l1norm"):
        return x * (scale / (x.abs().sum(2, keepdim=True) + EPS))
    if norm == "softmax":
        x = x.masked_fill(~mask, -torch.inf).softmax(2)
    return scale * x


def _aggregate(cosine_CqQ: Tensor, mask_CqQ: Tensor, how: CrossAttention) -> Tensor:
    """(C, Q), over the queries' tokens that exist."""
    if how.aggregation == "lse":
        return (how.lambda_lse * cosine_CqQ).masked_fill(~mask_CqQ, -torch.inf).logsumexp(1) / how.lambda_lse
    if how.aggregation == "max":
        return cosine_CqQ.masked_fill(~mask_CqQ, -torch.inf).amax(1)
    total = (cosine_CqQ * mask_CqQ).sum(1)
    return total / mask_CqQ.sum(1) if how.aggregation == "mean" else total


def _root(x: Tensor) -> Tensor:
    """Square root with a gradient of 0 at 0, and for what rounding has put below."""
    return x.clamp(min=TINY).sqrt()
