"""Ensemble: several models evaluated as one, by the mean of their similarities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from probemb.errors import UserError
from probemb.gaussian import Gaussian
from probemb.models.dual_encoder import DualEncoder
from probemb.models.pretrained import shortened


class Ensemble(nn.Module):
    """K models that embed as one, for evaluation: cosines, CSD and u are the means of the models' own.

    Means stand side by side, over the square root of K; so do log-variances, less log K. That makes the same of the
    squared 2-Wasserstein distance. Source: NCR, which averages the similarities of its two networks.

    Args:
        models: at least one; they share whatever prepares images and texts.

    Raises:
        UserError: they do not.
    """

    def __init__(self, models: Sequence[DualEncoder]):
        super().__init__()
        one, *others = map(_inputs, models)
        for other in others:
            for key in sorted({*one, *other}):
                if one.get(key) != other.get(key):
                    raise UserError(
                        f"The models do not read the same input: {key} is {shortened(one.get(key))} in one, "
                        f"{shortened(other.get(key))} in another.",
                        "Put models together that prepare images and texts alike, such as the networks of one run.",
                    )
        self.models = nn.ModuleList(models)
        self.training = models[0].training

    def encode_image(self, pixels: Tensor) -> Gaussian:
        """(B, 3, H, W) -> Gaussian (B, sum of all D)."""
        return _side_by_side([model.encode_image(pixels) for model in self.models])

    def normalized(self, images: Tensor) -> Tensor:
        """`DualEncoder.normalized`, the same of all."""
        return self.models[0].normalized(images)

    def encode_text(self, tokens: Tensor) -> Gaussian:
        """(B, L) int64 -> Gaussian (B, sum of all D)."""
        return _side_by_side([model.encode_text(tokens) for model in self.models])

    def cut_padding(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens without the columns that no model needs."""
        return max((model.cut_padding(tokens) for model in self.models), key=lambda cut: cut.shape[1])

    @property
    def probabilistic(self) -> bool:
        """True if any of them predicts log-variances."""
        return any(model.probabilistic for model in self.models)

    @property
    def ranking(self) -> str:
        """Ranking that the first model was trained for."""
        return self.models[0].ranking

    @property
    def attention(self) -> None:
        """Tokens of several models are not compared."""
        return None

    @property
    def trained_temperature(self) -> None:
        """Several models have no one temperature."""
        return None

    @property
    def n_embeddings(self) -> int:
        """K, the embeddings of every item."""
        return self.models[0].n_embeddings

    @property
    def objective(self) -> str | None:
        """That of the first model."""
        return self.models[0].objective

    @property
    def match_form(self) -> str:
        """That of all of them, or "none"."""
        forms = {model.match_form for model in self.models}
        return forms.pop() if len(forms) == 1 else "none"

    predicts_matches = DualEncoder.predicts_matches
    match_probability = DualEncoder.match_probability

    def match_numbers(self) -> tuple[float, float]:
        """The means of their a and of their b."""
        a, b = zip(*(model.match_numbers() for model in self.models))
        return sum(a) / len(a), sum(b) / len(b)


def as_one(models: Sequence[DualEncoder]) -> DualEncoder | Ensemble:
    """The model itself if there is one, else all of them as an `Ensemble`."""
    return models[0] if len(models) == 1 else Ensemble(models)


def networks_of(name: str | Path) -> list[str]:
    """Names for `load_model` of all networks of a model: itself, and the second one of a run that trained two."""
    run = Path(name)
    second = run / "model-second"
    return [str(name), *([str(second)] if (run / "model").is_dir() and second.is_dir() else [])]


def _side_by_side(parts: Sequence[Gaussian]) -> Gaussian:
    mean = torch.cat([part.mean for part in parts], -1) / math.sqrt(len(parts))
    return Gaussian(mean, torch.cat([part.log_var for part in parts], -1) - math.log(len(parts)))


def _inputs(model: DualEncoder) -> dict:
    """Settings of `create_transforms` and `create_tokenizer`, the shape of regions, and the number of embeddings."""
    config = model.config
    text = config["architecture"]["text_cfg"]
    keys = ("hf_tokenizer_name", "tokenizer_mode", "tokenizer_kwargs", "vocabulary")
    tokenizer = {key: text.get(key) for key in keys}
    shapes = {"regions": getattr(model.visual, "region_shape", None), "K": model.n_embeddings}
    return {**config["preprocess"], "context_length": model.context_length, **tokenizer, **shapes}
