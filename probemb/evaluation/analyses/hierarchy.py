"""HierarCaps: captions of an image from general to specific, and the walk from the image's closest caption to a root.

N images, L captions of each from general to specific, T = N L captions, D dimensions. Captions are numbered: equal
texts have equal numbers.
Source: Alper and Averbuch-Elor, Emergent Visual-Semantic Hierarchies (ECCV 2024); the walk: ProLIP §4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from probemb.distances import inclusion
from probemb.gaussian import Gaussian

STEPS = 50
BLOCK = 16  # images at a time


class Score(NamedTuple):
    """Means over images: the share of found captions that are the image's own, the share of its own that are found,
    and whether there is any."""

    precision: float
    recall: float
    any: float


def walk(images_ND: Tensor, texts_TD: Tensor, numbers_T: Tensor, roots_ND: Tensor, steps: int = STEPS) -> list[Tensor]:
    """Numbers of the captions closest to points on the way from an image's closest caption towards a root.

    Args:
        images_ND, texts_TD: unit length; roots_ND: one for each image, which is not reached.
    """
    share, found = torch.arange(steps)[:, None] / steps, []
    for image, root in zip(images_ND.split(BLOCK), roots_ND.split(BLOCK)):
        start = texts_TD[(image @ texts_TD.T).argmax(1)][:, None]
        way = normalize(start - (start - root[:, None]) * share.to(start), dim=-1)
        found += [rows.unique() for rows in numbers_T[(way @ texts_TD.T).argmax(-1).cpu()]]
    return found


def within_radius(
    images_ND: Tensor, texts_TD: Tensor, numbers_T: Tensor, root_D: Tensor, steps: int = STEPS
) -> list[Tensor]:
    """Numbers of the captions closest to an image among those within each of the radii around the root."""
    radius, order = (texts_TD - root_D).norm(dim=-1).sort(stable=True)
    limits = torch.linspace(float(radius[0]), float(radius[-1]), steps, dtype=radius.dtype, device=radius.device)
    last = torch.searchsorted(radius, limits + 1e-9, right=True) - 1  # of each radius
    texts, numbers, found = texts_TD[order], numbers_T[order.cpu()], []
    for image in images_ND.split(BLOCK):
        found += [rows.unique() for rows in numbers[(image @ texts.T).cummax(1).indices[:, last].cpu()]]
    return found


def score(found: Sequence[Tensor], numbers_NL: Tensor) -> Score:
    """Of the captions found for each image, against its own."""
    rows = [
        (torch.isin(seen, own).double().mean(), torch.isin(own, seen).double().mean(), torch.isin(seen, own).any())
        for seen, own in zip(found, numbers_NL)
    ]
    return Score(*torch.tensor(rows, dtype=torch.float64).mean(0).tolist())


def including_roots(images: Gaussian, texts: Gaussian, root_D: Tensor) -> Tensor:
    """Between the root and the caption that includes each image the most, at unit length, (N, D)."""
    best = torch.cat([inclusion(images[i : i + BLOCK], texts).argmax(1) for i in range(0, len(images), BLOCK)])
    return normalize(texts.mean[best] + root_D, dim=-1)


def level_correlation(values_NL: Tensor) -> float:
    """Mean over images of Kendall's tau-b between a value of its captions and their level, from general to specific."""
    level = torch.arange(values_NL.shape[1])
    upper = (level[:, None] < level[None]).to(values_NL.device)
    difference = (values_NL[:, None, :] - values_NL[:, :, None]).sign()[:, upper]
    pairs, untied = difference.shape[1], difference.abs().sum(1)
    return float((difference.sum(1) / (untied * pairs).sqrt().clamp_min(1)).double().mean())
