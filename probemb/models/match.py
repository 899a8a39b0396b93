"""The match probability of a model, and several models as one. Q queries, N items of a gallery, D dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from probemb.distances import SAMPLES, csd, match_log_odds_of_samples
from probemb.errors import UserError
from probemb.gaussian import Gaussian

if TYPE_CHECKING:
    from probemb.models.dual_encoder import DualEncoder

DRAWS = 256  # of a distance between spheres


@dataclass(frozen=True)
class MatchModel:
    """A model's rule that turns two normals into the probability that they match, with the prior of a training batch.

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

    @property
    def numbers(self) -> tuple[float, float]:
        return self.scale, self.shift

    @torch.no_grad()
    def probability(self, image: Gaussian, text: Gaussian, among: Literal["images", "texts"] | None = None) -> Tensor:
        """That each image and text match, (N, M): of the pair alone, with the prior of training, or `among` a gallery,
        of which exactly one item matches: each column ("images") or row ("texts") sums to 1. Raises UserError.
        """
        if not self.matches:
            why = "the loss trained no a and b" if self.probabilistic else "a point model"
            raise UserError(f"The model has no match probability ({why}).", "Rank by its distance instead.")
        log_odds = self.log_odds(image, text)
        return log_odds.sigmoid() if among is None else log_odds.softmax(0 if among == "images" else 1)

    def log_odds(self, a: Gaussian, b: Gaussian) -> Tensor:
        """Of a match of every pair, (N, M), from the same samples at every call."""
        if self.form == "csd":
            return self.shift - self.scale * csd(a, b)
        g = torch.Generator(a.mean.device).manual_seed(0)
        samples = a.float().sample(SAMPLES, g), b.float().sample(SAMPLES, g)
        return match_log_odds_of_samples(*samples, self.scale, self.shift)

    def log_odds_at(self, csd: Tensor, u: Tensor, dim: int) -> Tensor:
        """As `log_odds`, of CSD and the sum of both items' variances, (...), taken to be equal in all dimensions."""
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


# ----------------------------------------------------------------------------------------------------------- ensembles


class Ensemble(nn.Module):
    """K models of the same inputs that embed as one, for evaluation: cosines, CSD, squared 2-Wasserstein distances and
    u are the means of the models' own. Source: NCR, which averages the similarities of its two networks.
    """

    attention = None  # tokens of several models are not compared

    def __init__(self, models: Sequence[DualEncoder]):
        super().__init__()
        self.models = nn.ModuleList(models)
        self.training = models[0].training
        self.ranking, self.objective = models[0].ranking, models[0].objective
        self.n_embeddings = models[0].n_embeddings
        self.probabilistic = any(model.probabilistic for model in models)

    def encode_image(self, pixels: Tensor) -> Gaussian:
        return _side_by_side([model.encode_image(pixels) for model in self.models])

    def encode_text(self, tokens: Tensor) -> Gaussian:
        return _side_by_side([model.encode_text(tokens) for model in self.models])

    def normalized(self, images: Tensor) -> Tensor:
        return self.models[0].normalized(images)

    def cut_padding(self, tokens: Tensor) -> Tensor:
        return max((model.cut_padding(tokens) for model in self.models), key=lambda cut: cut.shape[1])

    @property
    def match_model(self) -> MatchModel:
        """With the means of a and b, if all have one form; they have no one temperature."""
        parts = [model.match_model for model in self.models]
        (a, b), forms = torch.tensor([x.numbers for x in parts], dtype=torch.float64).mean(0), {x.form for x in parts}
        form = forms.pop() if len(forms) == 1 else "none"
        return MatchModel(a.item(), b.item(), form, self.probabilistic)


def _side_by_side(parts: Sequence[Gaussian]) -> Gaussian:
    mean = torch.cat([part.mean for part in parts], -1) / math.sqrt(len(parts))
    return Gaussian(mean, torch.cat([part.log_var for part in parts], -1) - math.log(len(parts)))


def as_one(models: Sequence[DualEncoder]) -> DualEncoder | Ensemble:
    """The model itself if there is one, else all of them as an `Ensemble`."""
    return models[0] if len(models) == 1 else Ensemble(models)


def networks_of(name: str | Path) -> list[str]:
    """Names for `load_model` of all networks of a model: itself, and the second one of a run that trained two."""
    second = Path(name) / "model-second"
    return [str(name), *([str(second)] if (Path(name) / "model").is_dir() and second.is_dir() else [])]
