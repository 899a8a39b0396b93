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

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from probemb.gaussian import at_least_float32

Direction = Literal["t2i", "i2t"]
Aggregation = Literal["lse", "mean", "sum", "max"]
Norm = Literal["clipped-l2norm", "l2norm", "clipped-l1norm", "l1norm", "softmax", "clipped", "none"]

BLOCK_ELEMENTS = 1 << 21  # products of tokens computed at a time: 8 MiB in float32, of which some ten copies exist
QUERY_ITEMS = 32  # of similar length, so that a block has little padding
SLOPE = 0.1  # of negative products where they are clipped (a leaky ReLU)
EPS, TINY = 1e-8, 1e-30
LARGEST_EXPONENT = 30.0  # exp of it, squared and summed, is far inside float32


@dataclass(frozen=True)
class CrossAttention:
    """How pairs are scored; the defaults are SCAN's "t-i LSE".

    Attributes:
        direction: "t2i", every word attends to the regions, or "i2t", every region to the words.
        aggregation: of a pair's cosines: "lse" (log Σ exp(lambda_lse · cos) / lambda_lse), "mean",
            "sum" or "max".
        norm: of the products over the queries; "clipped" lets a tenth of negative ones through first.
        lambda_softmax: inverse temperature of the attention.
        lambda_lse: of the aggregation "lse".
    """

    direction: Direction = "t2i"
    aggregation: Aggregation = "lse"
    norm: Norm = "clipped-l2norm"
    lambda_softmax: float = 9.0
    lambda_lse: float = 6.0


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

    Blocks are computed again in the backward pass, so memory beyond the result does not grow with N or M.

    Args:
        images, texts: tokens, as the caller has normalised them (`unit_tokens`).
        elements: products of tokens in a block.
    """
    context, queries = (images, texts) if how.direction == "t2i" else (texts, images)
    with torch.autocast(images.values.device.type, enabled=False):
        queries, query_order = _by_length(_full(queries), QUERY_ITEMS)
        widest = max(part.mask.numel() for part in queries)
        tokens = context.mask.shape[1]
        context, context_order = _by_length(_full(context), max(1, elements // (tokens * widest)))
        rows = [torch.cat([_block(part, query, how) for query in queries], 1) for part in context]
        scores_CQ = torch.cat(rows)
        if context_order is not None:
            scores_CQ = scores_CQ[context_order]
        if query_order is not None:
            scores_CQ = scores_CQ[:, query_order]
    return scores_CQ if how.direction == "t2i" else scores_CQ.T


def pair_scores(images: Tokens, texts: Tokens, how: CrossAttention, gram: Tensor | None = None) -> Tensor:
    """Scores of P images with a text each, (P,).

    Args:
        gram: `gram_matrices` of the context, the images in direction "t2i", where they are known already.
    """
    context, queries = (images, texts) if how.direction == "t2i" else (texts, images)
    with torch.autocast(images.values.device.type, enabled=False):
        context, queries = _full(context), _full(queries)
        products_Ccq1 = (context.values @ queries.values.transpose(1, 2))[..., None]
        length_Cq1 = _root(queries.values.square().sum(-1))[..., None]
        gram = gram_matrices(context) if gram is None else gram
        return _scores(products_Ccq1, context.mask, gram, length_Cq1, queries.mask[..., None], how)[:, 0]


def gram_matrices(tokens: Tokens) -> Tensor:
    """Products of every item's own tokens, (B, T, T)."""
    with torch.autocast(tokens.values.device.type, enabled=False):
        values = _full(tokens).values
        return values @ values.transpose(1, 2)


def _full(tokens: Tokens) -> Tokens:
    """In at least float32, with zeros for tokens that do not exist: these have no part in sums then."""
    values = at_least_float32(tokens.values)
    return Tokens(values if bool(tokens.mask.all()) else values * tokens.mask[..., None], tokens.mask)


def _by_length(tokens: Tokens, size: int) -> tuple[list[Tokens], Tensor | None]:
    """Parts of `size` items without common padding, and where each item stands in them; None: in their own order."""
    lengths, length = tokens.mask.shape[1] - tokens.mask.flip(1).int().argmax(1), tokens.mask.shape[1]
    if bool((lengths == length).all()):
        return [Tokens(*part) for part in zip(tokens.values.split(size), tokens.mask.split(size))], None
    lengths, order = lengths.sort(stable=True)
    parts = []
    for index, longest in zip(order.split(size), lengths.split(size)):
        end = int(longest[-1])
        parts.append(Tokens(tokens.values[index, :end], tokens.mask[index, :end]))
    return parts, order.argsort()


def _block(context: Tokens, queries: Tokens, how: CrossAttention) -> Tensor:
    """(C, Q); with gradient, its intermediate results are computed again when they are needed."""
    if torch.is_grad_enabled() and (context.values.requires_grad or queries.values.requires_grad):
        return checkpoint(_all_pairs, *context, *queries, how, use_reentrant=False, preserve_rng_state=False)
    return _all_pairs(*context, *queries, how)


def _all_pairs(
    context_CcD: Tensor, context_mask_Cc: Tensor, query_QqD: Tensor, query_mask_Qq: Tensor, how: CrossAttention
) -> Tensor:
    """(C, Q). Items stand behind tokens, (c, q, Q): all reductions over tokens then run along whole rows."""
    query_qQD = query_QqD.transpose(0, 1)
    products_CcqQ = (context_CcD.flatten(0, 1) @ query_qQD.flatten(0, 1).T).view(
        *context_CcD.shape[:2], *query_qQD.shape[:2]
    )
    length_1qQ = _root(query_qQD.square().sum(-1))[None]
    gram_Ccc = context_CcD @ context_CcD.transpose(1, 2)
    return _scores(products_CcqQ, context_mask_Cc, gram_Ccc, length_1qQ, query_mask_Qq.T[None], how)


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
    """Attention before the division by its sum, which the cosine does not see, (C, c, q, Q).

    Context that does not exist needs no zero here: its products and its Gram matrix are zero.
    """
    a_CcqQ = how.lambda_softmax * _normalised(products_CcqQ, mask_CqQ[:, None], how.norm)
    if how.norm in ("none", "clipped") or how.lambda_softmax > LARGEST_EXPONENT:  # else at most lambda_softmax
        missing = ~context_mask_Cc[:, :, None, None]
        largest = a_CcqQ.detach().masked_fill(missing, -torch.inf).amax(1, keepdim=True)
        a_CcqQ = (a_CcqQ - largest).masked_fill(missing, 0)  # these may lie above the largest that exists
    return a_CcqQ.exp()


def _normalised(x: Tensor, mask: Tensor, norm: Norm) -> Tensor:
    """x over the queries' tokens, dimension 2; products of tokens that do not exist are 0."""
    if norm.startswith("clipped"):
        x = F.leaky_relu(x, SLOPE)
    if norm.endswith("l2norm"):
        return x / (_root(x.square().sum(2, keepdim=True)) + EPS)
    if norm.endswith("l1norm"):
        return x / (x.abs().sum(2, keepdim=True) + EPS)
    if norm == "softmax":
        return x.masked_fill(~mask, -torch.inf).softmax(2)
    return x


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
