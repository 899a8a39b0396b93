"""Ensemble: several models evaluated as one, by the mean of their similarities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from probemb.gaussian import Gaussian
from probemb.models.dual_encoder import DualEncoder


class Ensemble(nn.Module):
    """K models that embed as one, for evaluation: cosines, CSD and u are the means of the models' own.

    Means stand side by side, over the square root of K; so do log-variances, less log K. That makes the same of the
    squared 2-Wasserstein distance. Source: NCR, which averages the similarities of its two networks.
    They share whatever prepares images and texts.
    """

    attention = None  # tokens of several models are not compared
    trained_temperature = None  # they have no one temperature

    def __init__(self, models: Sequence[DualEncoder]):
        super().__init__()
        self.models = nn.ModuleList(models)
        self.training = models[0].training
        self.ranking, self.objective = models[0].ranking, models[0].objective
        self.n_embeddings = models[0].n_embeddings
        self.probabilistic = any(model.probabilistic for model in models)
        forms = {model.match_form for model in models}
        self.match_form = forms.pop() if len(forms) == 1 else "none"

    def encode_image(self, pixels: Tensor) -> Gaussian:
        return _side_by_side([model.encode_image(pixels) for model in self.models])

    def encode_text(self, tokens: Tensor) -> Gaussian:
        return _side_by_side([model.encode_text(tokens) for model in self.models])

    def normalized(self, images: Tensor) -> Tensor:
        """`DualEncoder.normalized`, the same of all."""
        return self.models[0].normalized(images)

    def cut_padding(self, tokens: Tensor) -> Tensor:
        return max((model.cut_padding(tokens) for model in self.models), key=lambda cut: cut.shape[1])

    predicts_matches = DualEncoder.predicts_matches
    match_probability = DualEncoder.match_probability

    def match_numbers(self) -> tuple[float, float]:
        a, b = zip(*(model.match_numbers() for model in self.models))
        return sum(a) / len(a), sum(b) / len(b)


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
