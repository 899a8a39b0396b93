"""Semantic continuity: do neighbours among the codes, and what lies between two codes, mean something similar?

Likeness of two images is the cosine of their captions' tf-idf, which no model has seen as such; on the synthetic scenes
it is the share of an image's captions that are true of the other. N images, S steps. Source: jWAE, Fig. 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from probemb.data.captions.dataset import CaptionDataset
from probemb.evaluation.embed_pairs import EmbeddedPairs, exact_match
from probemb.losses.noisy import caption_tfidf


class Walk(NamedTuple):
    """From one image to another, S steps with both ends.

    Attributes:
        start, end: rows of the images; images, captions: (S,) rows of the nearest ones to each step's code.
        cosines: (S,) of that image's code.
    """

    start: int
    end: int
    images: list[int]
    captions: list[int]
    cosines: list[float]


def likeness_of(captions: CaptionDataset, kept: Sequence[int]) -> Tensor:
    """Similarity of the meanings of images, by their captions alone, (N, N) in [0, 1]."""
    if captions.scenes is not None:
        true_NM = exact_match(captions, kept).float()
        owner = torch.tensor([row for row, i in enumerate(kept) for _ in captions.captions[i]])
        counts = torch.bincount(owner, minlength=len(kept))
        return torch.zeros(len(kept), len(kept)).index_add_(1, owner, true_NM).div_(counts).T.contiguous()
    together = [" ".join(captions.captions[i]) for i in kept]
    rows = torch.from_numpy(caption_tfidf(together).toarray())
    return (F.normalize(rows, dim=1) @ F.normalize(rows, dim=1).T).clamp(0, 1)


def nearest_images(codes_ND: Tensor, k: int) -> Tensor:
    """The k nearest others of every code by the cosine, (N, k)."""
    unit = F.normalize(codes_ND.float(), dim=1)
    return (unit @ unit.T).fill_diagonal_(-2).topk(k, 1).indices


def walk(pairs: EmbeddedPairs, start: int, end: int, steps: int) -> Walk:
    """Even steps on the straight line between two images' codes; what is nearest by the cosine.

    In between neither of both ends counts, nor its captions: half-way they are equally near, so that rounding would
    choose.
    """
    images, texts = (F.normalize(x.mean.float(), dim=1) for x in (pairs.images, pairs.texts))
    share = torch.linspace(0, 1, steps)[:, None]
    codes = F.normalize((1 - share) * images[start] + share * images[end], dim=1)
    to_images, to_texts = codes @ images.T, codes @ texts.T
    to_images[1:-1, [start, end]] = -2
    to_texts[1:-1, (pairs.owner == start) | (pairs.owner == end)] = -2
    best, of_texts = to_images.max(1), to_texts.argmax(1)
    return Walk(start, end, best.indices.tolist(), of_texts.tolist(), best.values.tolist())


def of_neighbours(likeness: Tensor, near: Tensor) -> dict:
    """Mean likeness of an image to its neighbours (N, k), beside all other images and the k most similar ones."""
    n, k = near.shape
    others = likeness.clone().fill_diagonal_(-1)
    return {
        "k": k,
        "likeness": likeness.gather(1, near).mean().item(),
        "random": (likeness.sum() - likeness.diagonal().sum()).item() / (n * (n - 1)),
        "most": others.topk(k, 1).values.mean().item(),
    }


def of_walks(likeness: Tensor, walks: Sequence[Walk]) -> dict:
    """Means over walks.

    "consecutive": likeness of the nearest images of two steps in a row that differ; "to_start" and "to_end", (S,): of
    the nearest image of each step to both ends; "images": different ones met on a walk; "cosine", (S,): of the nearest
    image, low in between where codes leave holes.
    """
    steps = [(a, b) for one in walks for a, b in zip(one.images, one.images[1:]) if a != b]
    return {
        "walks": len(walks),
        "consecutive": sum(float(likeness[a, b]) for a, b in steps) / len(steps) if steps else None,
        "to_start": torch.stack([likeness[one.start, one.images] for one in walks]).mean(0).tolist(),
        "to_end": torch.stack([likeness[one.end, one.images] for one in walks]).mean(0).tolist(),
        "images": sum(len(set(one.images)) for one in walks) / len(walks),
        "cosine": torch.tensor([one.cosines for one in walks]).mean(0).tolist(),
    }


def half_way(values: Sequence[float]) -> float:
    """The value of the middle step, or the mean of both middle ones."""
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
