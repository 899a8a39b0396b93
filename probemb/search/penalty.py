"""The last dimension of an index: the gallery's uncertainties as a part of squared distances, with any weight.

sqrt(lambda (u_j - min u)) in the gallery's vectors and 0 in the query's add lambda u_j and a constant, -lambda min u.
Below 0 sqrt(-lambda (max u - u_j)) adds lambda u_j and -lambda max u. So only differences of u are added in float32,
which tells items apart however large all variances are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from probemb.errors import UserError

FORMS = ("csd", "mean", "tolerance")


@dataclass(frozen=True)
class Penalty:
    """The last dimension's share of a distance: `weight` times an item's u, and a constant if the weight is negative.

    Attributes:
        weight: lambda; 1 is CSD.
        most: largest u of the gallery, for a negative weight; least: the smallest one, for a positive weight.
    """

    weight: float = 1.0
    most: float = 0.0
    least: float = 0.0

    def column(self, u: np.ndarray) -> np.ndarray:
        """The last dimension of items with uncertainties (N,)."""
        away = u - np.float32(self.least) if self.weight >= 0 else np.float32(self.most) - u
        return np.sqrt(abs(self.weight) * away)

    @property
    def constant(self) -> float:
        """To be taken off every squared distance."""
        return -self.weight * (self.least if self.weight >= 0 else self.most)


CSD = Penalty()


def penalty_of(form: str, tolerance: float | None, most: float, least: float = 0.0) -> Penalty:
    """The penalty of a form of search; `most` and `least` u of the gallery. Raises UserError: lambda is not finite."""
    if form == "mean":
        return CSD
    if form == "csd":
        return Penalty(least=least)
    if tolerance is None or not math.isfinite(tolerance):
        raise UserError(f"The weight of the variances is {tolerance}.", "Give a finite number, such as -1.")
    return Penalty(tolerance, most if tolerance < 0 else 0.0, least if tolerance > 0 else 0.0)
