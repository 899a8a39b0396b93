"""SCAN's triplet loss: hinges of stacked cross attention's scores. Source: SCAN (Lee et al., ECCV 2018) §3.3."""

from __future__ import annotations

import torch
from torch import Tensor

from probemb.cross_attention import CrossAttention, Tokens, attention_scores, pair_scores
from probemb.losses.output import LossOutput
from probemb.losses.triplets.triplet import hinges, triplet_loss

SCAN_T2I = CrossAttention()


def scan_loss(
    images: Tokens,
    texts: Tokens,
    match_NN: Tensor | None = None,
    how: CrossAttention = SCAN_T2I,
    margin: float = 0.2,
    hardest: bool = True,
) -> LossOutput:
    """`triplet_loss` of N images' and N texts' attention scores; memory does not grow with N beyond N x N scores.

    Of the hardest negatives' hinges only 3 N of the N x N scores have a gradient: the pairs' own, and the hardest ones
    of every row and column. So all scores are computed without one, and those again with it; the loss and its gradient
    are the same.

    Args:
        images, texts: N items' tokens, of unit length for SCAN (`unit_tokens`).
        match_NN: which pairs match; None is the identity. Other captions of the same image are neither negatives nor
            positives.
        margin: in units of the aggregated score.
        hardest: the largest hinge of every row and column rather than the sum.
    """
    if not hardest:
        return triplet_loss(attention_scores(images, texts, how), match_NN, margin, hardest=False)
    with torch.no_grad():
        row_NN, column_NN = hinges(attention_scores(images, texts, how), match_NN, margin)
        (row_N, text_N), (column_N, image_N) = row_NN.max(1), column_NN.max(0)
    every_N = torch.arange(len(text_N), device=text_N.device)
    pairs = torch.cat([every_N, every_N, image_N]), torch.cat([every_N, text_N, every_N])
    own_N, of_text_N, of_image_N = pair_scores(images, texts, how, pairs).chunk(3)
    i2t = (margin + of_text_N - own_N).clamp(min=0) * (row_N > 0)  # 0: there is no negative, or none within reach
    t2i = (margin + of_image_N - own_N).clamp(min=0) * (column_N > 0)
    loss = i2t.sum() + t2i.sum()
    return LossOutput(loss, {"triplet": loss.detach()})
