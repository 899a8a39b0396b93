"""A trunk's output before any head, and its layout as rows of numbers, so that a frozen one's can be kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Features(NamedTuple):
    """A trunk's output, before any head.

    Attributes:
        tokens: (B, T, W).
        pooled: (B, P), the tower's own summary of its tokens.
        mask: (B, T) bool, True for tokens that take part; None if all do.
    """

    tokens: Tensor
    pooled: Tensor
    mask: Tensor | None = None


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

    @staticmethod
    def of(mean: Features, unc: Features | None, with_tokens: bool) -> FeatureLayout:
        """The layout of a small batch of features; without tokens where no head reads them."""
        held = _named(mean, unc)
        if not with_tokens:
            held = {name: x for name, x in held.items() if "tokens" not in name}
        for name in ("tokens", "pooled"):
            if f"unc_{name}" in held and torch.equal(held[f"unc_{name}"], held[name]):
                del held[f"unc_{name}"]
        return FeatureLayout(tuple((name, tuple(x.shape[1:])) for name, x in held.items()), unc is not None)

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


def _named(mean: Features, unc: Features | None) -> dict[str, Tensor]:
    held = {"tokens": mean.tokens, "pooled": mean.pooled}
    return held if unc is None else {**held, "unc_tokens": unc.tokens, "unc_pooled": unc.pooled}
