"""Stacked cross attention: scores of images and texts from their tokens. Source: SCAN (Lee et al., ECCV 2018) §3.

One side's tokens are queries, the other's are the context that every query attends to. With v_c the context's tokens
and w_q the queries', in direction "t2i" regions and words, in "i2t" words and regions:

    s_cq = v_c · w_q                     a_cq = norm of s_cq over the queries
    x_q  = Σ_c softmax_c(λ a_cq) v_c     score = aggregation over q of cos(w_q, x_q)

The attended x_q is never made. Its product with w_q is Σ_c e_cq s_cq, its squared length e_q' G e_q with the context's
Gram matrix G, so besides the products s only numbers of a pair of tokens are computed, and those block by block.

Letters: N images, M texts, D dimensions; C items of context with c tokens, Q items of queries with q tokens, P pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from probemb.gaussian import at_least_float32
from probemb.models.options import CrossAttention, Norm

BLOCK_ELEMENTS = 1 << 21  # products of tokens computed at a time: 8 MiB in float32, of which some ten copies exist
CACHE_ELEMENTS = 1 << 18  # of these, worked on at a time by a CPU
QUERY_ITEMS, PARTS = 16, 8  # queries of similar length, so that these have little padding; as many in a block
SLOPE = 0.1  # of negative products where they are clipped (a leaky ReLU)
EPS, TINY = 1e-8, 1e-30
PAIRS = 32  # whose tokens are copied at a time: some megabytes
LARGEST_EXPONENT = 30.0  # exp of it, squared and summed, is far inside float32


class Tokens(NamedTuple):
    """Tokens of a batch of items, (B, T, D), and which of them exist, (B, T) bool; each item has one at least."""

    values: Tensor
    mask: Tensor


def unit_tokens(values: Tensor, mask: Tensor) -> Tokens:
    """Tokens of unit length in at least float32; those that do not exist become zero. An item without any keeps one."""
    values, first = at_least_float32(values), torch.arange(mask.shape[1], device=mask.device) == 0
    mask = mask | (first & ~mask.any(1, keepdim=True))
    return Tokens(values / (values.norm(dim=-1, keepdim=True) + EPS) * mask[..., None], mask)


def attention_scores(images: Tokens, texts: Tokens, how: CrossAttention, elements: int = BLOCK_ELEMENTS) -> Tensor:
    """Scores of all pairs, (N, M), larger is closer; in at least float32, also under autocast.

    Blocks of `elements` products are computed again in the backward pass, so memory beyond the result does not grow
    with N or M. Tokens are as the caller has normalised them (`unit_tokens`).
    """
    context, queries = (images, texts) if how.direction == "t2i" else (texts, images)
    with torch.autocast(images.values.device.type, enabled=False):
        parts, query_order = _by_length(_full(queries), QUERY_ITEMS)
        queries = [_query_rows(parts[i : i + PARTS]) for i in range(0, len(parts), PARTS)]
        widest = max(len(values) for values, _, _ in queries)
        context, context_order = _by_length(_full(context), max(1, elements // (context.mask.shape[1] * widest)))
        rows = []
        for part in context:
            gram_Ccc = part.values @ part.values.transpose(1, 2)
            rows.append(torch.cat([_block(*part, gram_Ccc, *query, how) for query in queries], 1))
        scores_CQ = torch.cat(rows)
        if context_order is not None:
            scores_CQ = scores_CQ[context_order]
        if query_order is not None:
            scores_CQ = scores_CQ[:, query_order]
    return scores_CQ if how.direction == "t2i" else scores_CQ.T


def pair_scores(
    images: Tokens, texts: Tokens, how: CrossAttention, pairs: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Scores of P pairs, (P,), the numbers of their images and texts; None pairs every image with its own text."""
    first, second = (images, texts) if how.direction == "t2i" else (texts, images)
    if pairs is None:
        pairs = (torch.arange(len(images.mask), device=images.mask.device),) * 2
    of_context_P, of_query_P = pairs if how.direction == "t2i" else pairs[::-1]
    with torch.autocast(images.values.device.type, enabled=False):
        values, lengths = zip(*((at_least_float32(side.values), _lengths(side.mask)) for side in (first, second)))
        products_Pcq, gram_Ccc, squares_Qq = pair_products(*values, (of_context_P, of_query_P), lengths)
        context_mask_Pc, query_mask_Pq = first.mask[of_context_P], second.mask[of_query_P]
        products_Pcq = products_Pcq * (context_mask_Pc[:, :, None] & query_mask_Pq[:, None])
        gram_Pcc = (gram_Ccc * (first.mask[:, :, None] & first.mask[:, None])).index_select(0, of_context_P)
        length_Pq1 = _root(squares_Qq).index_select(0, of_query_P)[..., None]
        products_Pcq1, mask_Pq1 = products_Pcq[..., None], query_mask_Pq[..., None]
        return _scores(products_Pcq1, context_mask_Pc, gram_Pcc, length_Pq1, mask_Pq1, how)[:, 0]


def _full(tokens: Tokens) -> Tokens:
    """In at least float32, with zeros for tokens that do not exist."""
    values = at_least_float32(tokens.values)
    return Tokens(values if bool(tokens.mask.all()) else values * tokens.mask[..., None], tokens.mask)


def _lengths(mask: Tensor) -> Tensor:
    """The place after each item's last token, (B,)."""
    return mask.shape[1] - mask.flip(1).int().argmax(1)


def _by_length(tokens: Tokens, size: int) -> tuple[list[Tokens], Tensor | None]:
    """Parts of `size` items without common padding, and where each item stands in them; None: in their own order."""
    lengths, length = _lengths(tokens.mask), tokens.mask.shape[1]
    if bool((lengths == length).all()):
        return [Tokens(*part) for part in zip(tokens.values.split(size), tokens.mask.split(size))], None
    lengths, order = lengths.sort(stable=True)
    parts = []
    for index, longest in zip(order.split(size), lengths.split(size)):
        end = int(longest[-1])
        parts.append(Tokens(tokens.values[index, :end], tokens.mask[index, :end]))
    return parts, order.argsort()


def _query_rows(parts: list[Tokens]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Tokens (R, D) of several parts of queries for one matrix product, their lengths (R,), and masks (1, q, Q).

    In each part items stand behind tokens, (q * Q, D), so that all reductions over tokens run along whole rows.
    """
    values = torch.cat([part.values.transpose(0, 1).flatten(0, 1) for part in parts])
    return values, _root(values.square().sum(-1)), [part.mask.T[None] for part in parts]


def _block(context: Tensor, context_mask: Tensor, gram: Tensor, query: Tensor, *others) -> Tensor:
    """`_all_pairs`; with gradient, its intermediate results are computed again when they are needed."""
    given = context, context_mask, gram, query, *others
    if torch.is_grad_enabled() and (context.requires_grad or query.requires_grad):
        return checkpoint(_all_pairs, *given, use_reentrant=False, preserve_rng_state=False)
    return _all_pairs(*given)


def _all_pairs(
    context_CcD: Tensor, context_mask_Cc: Tensor, gram_Ccc: Tensor,
    query_RD: Tensor, length_R: Tensor, masks: list[Tensor], how: CrossAttention,
) -> Tensor:  # fmt: skip
    """(C, Q), from one matrix product; what follows it on a CPU is done for as many items as its cache holds."""
    products_CcR = (context_CcD.flatten(0, 1) @ query_RD.T).view(*context_mask_Cc.shape, -1)
    rows, columns = [mask.numel() for mask in masks], []
    for products, length, mask in zip(products_CcR.split(rows, -1), length_R.split(rows), masks):
        products_CcqQ, length = products.unflatten(2, mask.shape[1:]), length.view(mask.shape)
        on_cpu = products.device.type == "cpu"
        at_once = max(1, CACHE_ELEMENTS // products[0].numel()) if on_cpu else len(products)
        parts = zip(products_CcqQ.split(at_once), context_mask_Cc.split(at_once), gram_Ccc.split(at_once))
        columns.append(torch.cat([_scores(*part, length, mask, how) for part in parts]))
    return torch.cat(columns, 1)


def _scores(
    products_CcqQ: Tensor, context_mask_Cc: Tensor, gram_Ccc: Tensor, length_CqQ: Tensor, mask_CqQ: Tensor,
    how: CrossAttention,
) -> Tensor:  # fmt: skip
    """(C, Q) from the products of tokens and the queries' lengths and mask, (C or 1, q, Q)."""
    weights = _weights(products_CcqQ, context_mask_Cc, mask_CqQ, how)
    along_CqQ = (weights * products_CcqQ).sum(1)
    flat = weights.flatten(2)
    attended_CqQ = _root((flat * (gram_Ccc @ flat)).sum(1)).view_as(along_CqQ)
    cosine_CqQ = along_CqQ / (attended_CqQ * length_CqQ).clamp(min=EPS)
    return _aggregate(cosine_CqQ, mask_CqQ, how)


def _weights(products_CcqQ: Tensor, context_mask_Cc: Tensor, mask_CqQ: Tensor, how: CrossAttention) -> Tensor:
    """Attention before the division by its sum, which the cosine does not see, (C, c, q, Q); not zero for context that
    does not exist, as its products and its Gram matrix are.
    """
    a_CcqQ = _normalised(products_CcqQ, mask_CqQ[:, None], how.norm, how.lambda_softmax)
    if how.norm in ("none", "clipped") or how.lambda_softmax > LARGEST_EXPONENT:  # else at most lambda_softmax
        missing = ~context_mask_Cc[:, :, None, None]
        largest = a_CcqQ.detach().masked_fill(missing, -torch.inf).amax(1, keepdim=True)
        a_CcqQ = (a_CcqQ - largest).masked_fill(missing, 0)  # these may lie above the largest that exists
    return a_CcqQ.exp()


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


# ------------------------------------------------------------------------------------ inner products of chosen pairs


def pair_products(
    context_CcD: Tensor, query_QqD: Tensor, pairs: tuple[Tensor, Tensor], lengths: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Products of each pair's tokens (P, c, q), of context items' own (C, c, c), and queries' squared lengths (Q, q).

    `pairs`: the numbers of each pair's context and query, (P,); `lengths`: the number of tokens of each item, beyond
    which products may be 0, (C,) and (Q,). Autograd would keep a copy of both items of every pair, and add up as many
    gradients of all items as there are uses of them; here they are written once. There is no second derivative.
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


def _parts(of_context_P: Tensor, of_query_P: Tensor, length_C: Tensor, length_Q: Tensor) -> list[tuple]:
    """Pairs of similar length: their numbers, their context, its longest, their queries, the longest of these."""
    lengths_2P = torch.stack([length_C[of_context_P], length_Q[of_query_P]])
    parts = lengths_2P.sum(0).argsort().split(PAIRS)
    longest = torch.stack([lengths_2P[:, part].amax(1) for part in parts]).tolist()
    return [(part, of_context_P[part], c, of_query_P[part], q) for part, (c, q) in zip(parts, longest)]
