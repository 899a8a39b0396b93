"""The triplet loss of VSE++ and VSE infinity, with the hardest negative or the sum over all negatives."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from probemb.gaussian import Gaussian
from probemb.losses.output import LossOutput
from probemb.losses.pairs import cosine_similarity, positive_pairs

Reduce = Literal["sum", "mean"]


def triplet_loss(
    similarity_NN: Tensor,
    match_NN: Tensor | None = None,
    margin: float = 0.2,
    hardest: bool = True,
    reduce: Reduce = "sum",
) -> LossOutput:
    """Both directions' hinges max(0, margin + s(negative) - s(pair)) of N pairs. Source: VSE++, PVSE (reduce "mean").

    A pair's own similarity is on the diagonal. Other pairs with a match above 0 (another caption of the same image)
    are neither negatives nor positives. Labels above 0 everywhere, such as smoothed ones, leave no negatives.

    Args:
        similarity_NN: larger is closer, images in rows.
        match_NN: which pairs match; None is the identity.
        margin: in the units of the similarity.
        hardest: the largest hinge of every row and column (VSE++) rather than the sum (VSE0; VSE infinity's warm-up).
        reduce: "sum" over the pairs, or PVSE's "mean": over N hardest hinges of a direction, or over all N x N, in
            which positives count as 0.
    """
    row_NN, column_NN = hinges(similarity_NN, match_NN, margin)
    if hardest:
        i2t, t2i = row_NN.max(1).values.sum(), column_NN.max(0).values.sum()
    else:
        i2t, t2i = row_NN.sum(), column_NN.sum()
    loss = i2t + t2i
    if reduce == "mean":
        loss = loss / (len(row_NN) if hardest else row_NN.numel())
    return LossOutput(loss, {"triplet": loss.detach()})


def hinges(
    similarity_NN: Tensor,
    match_NN: Tensor | None = None,
    margin: Tensor | float = 0.2,
    column_margin: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """Hinges against the row's own pair (image to text) and against the column's (text to image), (N, N) each.

    They are 0 for positives. The margins are numbers or broadcast to (N, N); by default both are the same.
    """
    column_margin = margin if column_margin is None else column_margin
    positive = positive_pairs(similarity_NN, match_NN)
    own_N = similarity_NN.diagonal()
    row = (similarity_NN + margin - own_N[:, None]).clamp(min=0).masked_fill(positive, 0)
    column = (similarity_NN + column_margin - own_N[None, :]).clamp(min=0).masked_fill(positive, 0)
    return row, column


class TripletLoss(nn.Module):
    """`triplet_loss` of the cosines of the means."""

    def __init__(self, margin: float = 0.2):
        super().__init__()
        self.margin = margin

    def forward(
        self, image: Gaussian, text: Gaussian, match: Tensor | None = None, *, hardest: bool = True
    ) -> LossOutput:
        """N pairs, (N, D) each. VSE infinity passes `hardest=False` in its first epoch."""
        similarity = cosine_similarity(image, text)
        with torch.autocast(similarity.device.type, enabled=False):
            return triplet_loss(similarity, match, self.margin, hardest)

    def extra_repr(self) -> str:
        return f"margin={self.margin}"
