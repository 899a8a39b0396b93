"""The match probability of a model: its form, with its numbers. Q queries, N items of a gallery, D dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from probemb.distances import SAMPLES, csd, match_log_odds_of_samples
from probemb.errors import UserError
from probemb.gaussian import Gaussian

DRAWS = 256  # of a distance between spheres
OF_DISTANCE = {"csd": "distance", "match-probability": "samples"}  # "match" of a model whose a and b it trained


@dataclass(frozen=True)
class MatchModel:
    """A model's rule that turns two normals into the probability that they match.

    It was trained with one match in a batch: a probability as it stands has that prior, and `in_gallery` has the
    gallery's.

    Attributes:
        scale, shift: a and b.
        form: "csd" is sigmoid(b - a CSD) (PCME++, ProLIP, SigLIP); "samples" the mean of sigmoid(2 (b - a |z - z'|))
            over samples of both (PCME); "none": the loss had no a and b, or it is a point model, but for SigLIP's.
        probabilistic: False for a point model, which has no u.
        temperature: for a model without match probability, the factor of its cosines in the softmax; None for none.
    """

    scale: float = 1.0
    shift: float = 0.0
    form: Literal["csd", "samples", "none"] = "csd"
    probabilistic: bool = True
    temperature: float | None = None

    @property
    def matches(self) -> bool:
        return self.form != "none"

    @classmethod
    def of(cls, model) -> MatchModel:
        """That of a `DualEncoder` or an `Ensemble`."""
        return cls(*model.match_numbers(), model.match_form, model.probabilistic, model.trained_temperature)

    @torch.no_grad()
    def probability(self, image: Gaussian, text: Gaussian, among: Literal["images", "texts"] | None = None) -> Tensor:
        """The probability that each image and text match, (N, M): of the pair alone, with the prior of training, or
        `among` a gallery, of which exactly one item is taken to match: each column ("images") or row ("texts") sums to
        1. Raises UserError: the model has no match probability.
        """
        if not self.matches:
            raise UserError(f"The model has no match probability ({self.describe()}).", "Rank by its distance instead.")
        log_odds = self.log_odds(image, text)
        if among is None:
            return log_odds.sigmoid()
        return in_gallery(log_odds) if among == "texts" else in_gallery(log_odds.T).T

    def log_odds(self, a: Gaussian, b: Gaussian) -> Tensor:
        """Of a match of every pair, (N, M), from the same samples at every call."""
        if self.form == "csd":
            return self.shift - self.scale * csd(a, b)
        g = torch.Generator(a.mean.device).manual_seed(0)
        samples = a.float().sample(SAMPLES, g), b.float().sample(SAMPLES, g)
        return match_log_odds_of_samples(*samples, self.scale, self.shift)

    def log_odds_at(self, csd: Tensor, u: Tensor, dim: int) -> Tensor:
        """Of pairs of which no more is known than CSD and the sum of both items' variances, (...), which count as equal
        in all D dimensions; that makes a difference to "samples" alone.
        """
        if self.form == "csd":
            return self.shift - self.scale * csd
        g = torch.Generator().manual_seed(0)
        along = torch.randn(DRAWS, generator=g).to(csd)
        across = torch.randn(DRAWS, dim - 1, generator=g).square().sum(1).to(csd)
        std = (u / dim).sqrt()[..., None]
        apart = (csd - u).clamp_min(0).sqrt()[..., None]
        distance = ((apart + std * along).square() + std.square() * across).sqrt()
        logit = 2 * (self.shift - self.scale * distance)
        return logsigmoid(logit).logsumexp(-1) - logsigmoid(-logit).logsumexp(-1)

    def describe(self) -> str:
        """The formula with its numbers."""
        a, b = f"{self.scale:.4g}", f"{'+' if self.shift >= 0 else '-'} {abs(self.shift):.4g}"
        if self.form == "csd":
            return f"sigmoid(-{a} CSD {b})"
        if self.form == "samples":
            return f"mean over {SAMPLES} x {SAMPLES} samples of sigmoid(2 (-{a} |z - z'| {b}))"
        why = "none: " + ("the loss trained no a and b" if self.probabilistic else "a point model")
        softmax = f"; its entropy is that of the softmax of {self.temperature or 0:.4g} times the cosine"
        return why if self.temperature is None else why + softmax


def in_gallery(log_odds_QN: Tensor) -> Tensor:
    """The probability that each item is a query's match if exactly one item of the gallery is, (Q, N).

    The odds of independent pairs, divided by their sum: the prior of one match in a training batch, a factor of all
    odds, cancels, and the gallery's of one in N takes its place.
    """
    return log_odds_QN.softmax(1)
