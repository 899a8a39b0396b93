"""P2RM: point-to-rectangle matching as a regulariser of the triplet loss (Wang et al., ACM Multimedia 2022).

There is no public code. The abstract and PCME++ (section 3.2 and Table 1) state: an item is extended from a point to a
rectangle, whose points stand for possible matches in the other modality; similarity is a distance between points and
rectangles; it regularises VSE's triplet loss with the hardest negative, without an additional head. The rest is
assumed:

- a rectangle is axis-aligned around the item's embedding (the unit mean that VSE ranks by);
- its half-sides h are one learned vector per modality;
- the distance from a point p to the rectangle around c is squared Euclidean, sum_k max(0, |p_k - c_k| - h_k)^2, 0
  inside; the similarity is minus a half of it, which is cosine - 1 for h = 0, so that margins keep their meaning;
- the regulariser is the triplet loss on point-to-rectangle similarities, the mean of both directions;
- its weight, the initial half-sides, and ranking by the cosine of the points.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from probemb.distances import sum_over_slices
from probemb.gaussian import Gaussian, at_least_float32
from probemb.losses.output import LossOutput
from probemb.losses.pairs import cosine_similarity, positive_pairs
from probemb.losses.triplets.triplet import triplet_loss


def point_to_rectangle(point_ND: Tensor, centre_MD: Tensor, half_side_D: Tensor) -> Tensor:
    """Squared Euclidean distance from points to axis-aligned rectangles, (N, M), 0 inside.

    Nothing of size N x M x D is held.
    """

    def outside(point: Tensor, centre: Tensor, half_side: Tensor) -> Tensor:
        return ((point - centre).abs() - half_side).clamp(min=0).square()

    return sum_over_slices(outside, (point_ND,), (centre_MD, half_side_D.expand_as(centre_MD)))


def rectangle_triplet(
    point_ND: Tensor, centre_ND: Tensor, half_side_D: Tensor, match_NN: Tensor | None, margin: float, hardest: bool
) -> Tensor:
    """`triplet_loss` of minus half of `point_to_rectangle`, points in rows.

    With the hardest negatives alone, all N x N distances only choose them, and N of each direction have a gradient.
    """
    if not hardest:
        return triplet_loss(-0.5 * point_to_rectangle(point_ND, centre_ND, half_side_D), match_NN, margin, False).loss
    with torch.no_grad():
        similarity = -0.5 * point_to_rectangle(point_ND, centre_ND, half_side_D)
        positive = positive_pairs(similarity, match_NN)
        negatives = similarity.masked_fill(positive, -torch.inf)
        centres, points = negatives.argmax(1), negatives.argmax(0)
        row_has, column_has = ~positive.all(1), ~positive.all(0)

    def of(points: Tensor, centres: Tensor) -> Tensor:
        return -0.5 * ((points - centres).abs() - half_side_D).clamp(min=0).square().sum(1)

    own = of(point_ND, centre_ND)
    row = (margin + of(point_ND, centre_ND[centres]) - own).clamp(min=0)
    column = (margin + of(point_ND[points], centre_ND) - own).clamp(min=0)
    return (row * row_has).sum() + (column * column_has).sum()


class P2RMLoss(nn.Module):
    """Triplet loss of the cosines of the means + weight * triplet loss of point-to-rectangle similarities.

    Args:
        dim: D of the embeddings.
        margin: of both, in units of the cosine.
        weight: of the regulariser.
        init_half_side: initial half-side in every dimension, times the square root of D.
    """

    def __init__(self, dim: int, margin: float = 0.2, weight: float = 1.0, init_half_side: float = 0.1):
        super().__init__()
        start = torch.full((dim,), math.log(init_half_side / math.sqrt(dim)))
        self.log_half_image = nn.Parameter(start.clone())
        self.log_half_text = nn.Parameter(start.clone())
        self.margin, self.weight = margin, weight

    def forward(
        self, image: Gaussian, text: Gaussian, match: Tensor | None = None, *, hardest: bool = True
    ) -> LossOutput:
        """N pairs, (N, D) each; `match` and `hardest` as in `triplet_loss`. Terms "triplet" and "rectangle"."""
        point_i, point_t = at_least_float32(image.mean), at_least_float32(text.mean)
        cosine = cosine_similarity(image, text)
        with torch.autocast(cosine.device.type, enabled=False):
            triplet = triplet_loss(cosine, match, self.margin, hardest).loss
            rectangle = 0.5 * (
                rectangle_triplet(point_i, point_t, self.log_half_text.exp(), match, self.margin, hardest)
                + rectangle_triplet(
                    point_t,
                    point_i,
                    self.log_half_image.exp(),
                    None if match is None else match.T,
                    self.margin,
                    hardest,
                )
            )
        loss = triplet + self.weight * rectangle
        return LossOutput(loss, {"triplet": triplet.detach(), "rectangle": rectangle.detach()})

    def extra_repr(self) -> str:
        return f"margin={self.margin}, weight={self.weight}"
