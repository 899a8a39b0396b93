"""FeatureLayout: a frozen trunk's features as rows of numbers, so that they can be computed once and kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from probemb.errors import UserError
from probemb.models.encoder import Encoder, Features


@dataclass(frozen=True)
class FeatureLayout:
    """The parts of a row, in their order, and their shapes without the batch.

    Attributes:
        parts: ("tokens", (T, W)), ("pooled", (P,)), and of the log-variance's features "unc_tokens" and "unc_pooled"
            where they differ from the mean's. Tokens are left out where the heads read the pooled features alone.
        probabilistic: whether there are features of the log-variance at all.
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    probabilistic: bool

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return sum(math.prod(shape) for _, shape in self.parts)

    def pack(self, mean: Features, unc: Features | None) -> Tensor:
        """A batch's features as rows, (B, width)."""
        held = _named(mean, unc)
        return torch.cat([held[name].flatten(1) for name, _ in self.parts], 1)

    def unpack(self, rows: Tensor) -> tuple[Features, Features | None]:
        """The inverse of `pack`, in at least float32."""
        flat = rows.float().split([math.prod(shape) for _, shape in self.parts], 1)
        held = {name: x.view(-1, *shape) for (name, shape), x in zip(self.parts, flat)}
        tokens = held.get("tokens", rows.new_empty(len(rows), 0, 0))
        mean = Features(tokens, held["pooled"])
        if not self.probabilistic:
            return mean, None
        return mean, Features(held.get("unc_tokens", tokens), held.get("unc_pooled", mean.pooled))


def feature_layout(tower: Encoder, inputs: Tensor) -> FeatureLayout:
    """The layout of a tower's features, found with one small batch of inputs.

    Raises:
        UserError: the tower has an uncertainty branch with blocks of its own, which would have to be trained.
    """
    if any(tower.place(name).part == "branch" for name, _ in tower.named_parameters()):
        raise UserError(
            "The image tower's uncertainty branch has blocks of its own, so its features change while it trains.",
            "Set model.n_unc_layers to 0, or to two numbers such as [0, 1], or leave data.cache_features out.",
        )
    with torch.no_grad():
        mean, unc = tower.features(inputs)
    held = _named(mean, unc)
    if not getattr(tower.mean_head, "reads_tokens", False):
        held = {name: x for name, x in held.items() if "tokens" not in name}
    for name in ("tokens", "pooled"):
        if f"unc_{name}" in held and torch.equal(held[f"unc_{name}"], held[name]):
            del held[f"unc_{name}"]
    return FeatureLayout(tuple((name, tuple(x.shape[1:])) for name, x in held.items()), unc is not None)


def _named(mean: Features, unc: Features | None) -> dict[str, Tensor]:
    held = {"tokens": mean.tokens, "pooled": mean.pooled}
    return held if unc is None else {**held, "unc_tokens": unc.tokens, "unc_pooled": unc.pooled}
