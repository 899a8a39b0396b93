"""Scores of images with captions by stacked cross attention, in blocks of both. Source: SCAN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from probemb.cross_attention import CrossAttention, attention_scores
from probemb.evaluation.kept_tokens import KeptTokens

IMAGES, TEXTS = 64, 512  # read from disk at a time


@dataclass(frozen=True, eq=False)
class AttentionScores:
    """(N, M), images in rows unless `flipped`; `scores(rows)` gives (rows, M)."""

    images: KeptTokens
    texts: KeptTokens
    how: CrossAttention
    device: str = "cpu"
    flipped: bool = False

    @torch.no_grad()
    def __call__(self, rows: slice) -> Tensor:
        items = slice(None), slice(None)
        of_images, of_texts = (items[0], rows) if self.flipped else (rows, items[1])
        n, m = len(self.images.starts[of_images]), len(self.texts.starts[of_texts])
        first_image, first_text = of_images.start or 0, of_texts.start or 0
        found = torch.empty(n, m, device=self.device)
        for text in range(0, m, TEXTS):
            some = slice(text, min(text + TEXTS, m))
            texts = self.texts.read(slice(first_text + some.start, first_text + some.stop), self.device)
            for image in range(0, n, IMAGES):
                part = slice(image, min(image + IMAGES, n))
                images = self.images.read(slice(first_image + part.start, first_image + part.stop), self.device)
                found[part, some] = attention_scores(images, texts, self.how)
        return found.T if self.flipped else found

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        sides = len(self.images), len(self.texts)
        return sides[::-1] if self.flipped else sides

    def only(self, rows: Tensor, columns: Tensor) -> AttentionScores:
        """The scores of these rows and columns alone."""
        images, texts = (columns, rows) if self.flipped else (rows, columns)
        return replace(self, images=self.images.take(images), texts=self.texts.take(texts))

    def transposed(self) -> AttentionScores:
        """(M, N)."""
        return replace(self, flipped=not self.flipped)
