"""Embeddings as sets: mixed inputs as intersections, erased ones as inclusions. Source: PCME §4.4, Fig. 8.

The product of two normal densities is where both allow a point: their intersection. One normal lies in another if the
other is wider around it. N items, D dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from probemb.compose import compose
from probemb.distances import elk, inclusion
from probemb.gaussian import Gaussian
from probemb.metrics import standard_error

ROWS = 8  # in a block of pairs of which only the diagonal is wanted
IMAGES = 4096  # in a block of images whose captions are counted
CENTRAL = 0.9  # mass of the central interval that `coverage` asks about


def geometric_sigma(g: Gaussian) -> Tensor:
    """Geometric mean of the standard deviations, (N,): PCME's scalar measure of uncertainty (§3.2.1)."""
    return (0.5 * g.log_var.double().mean(-1)).exp()


def coverage(inner: Gaussian, outer: Gaussian, central: float = CENTRAL) -> Tensor:
    """The share of `inner`'s mass that lies in the central interval of `outer`, a mean over the dimensions, (N,).

    Row i of one belongs to row i of the other. A normal covers `central` of itself.
    """
    inner_mean, inner_std, outer_mean, outer_std = (x.double() for x in (inner.mean, inner.std, outer.mean, outer.std))
    half = math.sqrt(2) * torch.erfinv(torch.tensor(central, dtype=torch.float64)) * outer_std
    normal = torch.distributions.Normal(inner_mean, inner_std)
    return (normal.cdf(outer_mean + half) - normal.cdf(outer_mean - half)).mean(-1)


def mixing(mixed: Gaussian, first: Gaussian, second: Gaussian) -> dict:
    """Does the embedding of a mixed input cover the intersection of the two that it was mixed from?

    Args:
        mixed, first, second: Gaussians (N, D), row by row, N of at least 4. Row i of second may be row i - 1 of first:
            pairs two rows apart have no input in common.

    Returns:
        "covers": `coverage` of the own intersection by the mixed input, "covers_other": of the pair two rows before;
        "own_is_closest": the share of mixed inputs whose own intersection, among all N, has the largest expected
        likelihood, "chance" 1/N of it; "between": the share whose mean is closer to the intersection's than to either
        original's; "wider": the share with a larger geometric mean of σ than both originals have on average. Each
        with its standard error, "…_se".
    """
    common = compose(Gaussian.stack([first, second])).gaussian
    other = Gaussian(common.mean.roll(2, 0), common.log_var.roll(2, 0))
    to = {name: (mixed.mean - g.mean).norm(dim=-1) for name, g in (("common", common), ("a", first), ("b", second))}
    closest = elk(mixed, common).argmin(1) == torch.arange(len(mixed))
    return _means(
        {
            "covers": coverage(common, mixed),
            "covers_other": coverage(other, mixed),
            "own_is_closest": closest,
            "between": (to["common"] < to["a"]) & (to["common"] < to["b"]),
            "wider": geometric_sigma(mixed) > (geometric_sigma(first) + geometric_sigma(second)) / 2,
        }
    ) | {"chance": 1 / len(mixed), "pairs": len(mixed)}


def erasing(whole: Gaussian, erased: Sequence[Gaussian], shares: Sequence[float]) -> list[dict]:
    """Does an input lie in the same input with a part erased?

    Args:
        whole: Gaussian (N, D); erased: one for each of the `shares`, row by row.

    Returns:
        for each share "sigma": mean of the geometric mean of σ (PCME Fig. 7); "wider": the share of items for which
        that is larger than of the whole; "lies_in": the share with a positive `distances.inclusion` of the whole in
        the erased; "covers" and "covered": `coverage` of the whole by the erased, and the reverse; "covers_other": of
        another item by the erased.
    """
    before = geometric_sigma(whole)
    other = Gaussian(whole.mean.roll(1, 0), whole.log_var.roll(1, 0))
    rows = []
    for share, g in zip(shares, erased, strict=True):
        after = geometric_sigma(g)
        found = {
            "sigma": after,
            "wider": after > before,
            "lies_in": own_inclusion(whole, g) > 0,
            "covers": coverage(whole, g),
            "covered": coverage(g, whole),
            "covers_other": coverage(other, g),
        }
        rows.append({"share": share, **_means(found)})
    return rows


def own_inclusion(inner: Gaussian, outer: Gaussian) -> Tensor:
    """`distances.inclusion` of every row in the same row of the other, (N,); computed in blocks of few pairs."""
    blocks = [slice(i, i + ROWS) for i in range(0, len(inner), ROWS)]
    return torch.cat([inclusion(inner[rows], outer[rows]).diagonal() for rows in blocks])


def nested_pairs(match_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Captions of which one is true of some of the other's images and of no other image, from (N, M) bool matches.

    Returns (P,) columns of the smaller sets, (P,) of the larger ones.
    """
    common = torch.zeros(match_NM.shape[1], match_NM.shape[1], device=match_NM.device)
    for images in match_NM.split(IMAGES):
        common += images.float().T @ images.float()  # whole numbers, exact below 2^24
    count = common.diagonal()
    inside = (common == count[:, None]) & (count[:, None] < count[None, :]) & (count[:, None] > 0)
    return inside.nonzero(as_tuple=True)


def _means(values: dict[str, Tensor]) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    for name, value in values.items():
        out |= {name: float(value.double().mean()), f"{name}_se": standard_error(value.double())}
    return out
