"""Finds pictures that occur twice although their files differ: saved in another format, quality or size.

Two images look alike if small colour thumbnails of their decoded pixels are nearly the same. Squared distances of
photographs saved again (JPEG of quality 30, WebP of 50, half the size) are some 0.01 at most, of distinct ones 0.2 and
more. Crops, mirrored and repainted copies are not found. Memory is 780 bytes for each evaluated image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from probemb.data.image_loader import ImageBatches, Images
from probemb.errors import UserError
from probemb.progress import silent

SIDE = 8  # of a thumbnail
ALIKE = 0.025  # largest squared distance
FLAT = 8.0  # levels; a smaller contrast is not stretched, as it may be noise
COLOUR = 32.0  # levels of the mean colour that count as much as the whole contrast
MAX_SHARE = 0.05  # of images to choose on that may be evaluated ones
BATCH = 256


def describe(image: Image.Image) -> Tensor:
    """A thumbnail as (195,) float32: its pixels without the mean colour at unit contrast, and the mean colour."""
    pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), np.float32).reshape(-1, 3)
    colour = pixels.mean(axis=0)
    pixels = pixels - colour
    contrast = max(float(np.sqrt((pixels**2).mean())), FLAT)
    return torch.from_numpy(np.concatenate([pixels.ravel() / (contrast * pixels.size**0.5), colour / COLOUR]))


def seen_in(these: Images, those: Images, workers: int = 0, show: Callable = silent) -> list[int]:
    """Indices of `these` that look like one of `those`; unreadable images look like none.

    Args:
        workers: processes that decode; show: as `probemb.progress.progress`.
    """
    known, _ = _thumbnails(those, workers, show)
    found = []
    for part, rows in _batches(these, workers, show):
        if len(known):
            found += [row for row, near in zip(rows, _near(part, known)) if bool(near.any())]
    return found


def same_picture(images: Images, workers: int = 0, show: Callable = silent) -> list[int]:
    """For each image the index of the first one of its group; images that look alike, also by way of others, form one.

    Args: as `seen_in`.
    """
    thumbnails, rows = _thumbnails(images, workers, show)
    first = np.arange(len(images))
    for start in range(0, len(rows), BATCH):
        for i, near in enumerate(_near(thumbnails[start : start + BATCH], thumbnails[: start + BATCH]), start):
            groups = np.unique(first[[rows[j] for j in near[: i + 1].nonzero().flatten().tolist()]])
            if len(groups) > 1:
                first[np.isin(first, groups)] = groups[0]
    return first.tolist()


def leave_out(selection: Images, evaluated: Images, workers: int = 0, show: Callable = silent) -> tuple[list[int], str]:
    """Rows of images to choose on that look like no evaluated one, and a sentence about the others, or "".

    Raises UserError: more than MAX_SHARE of them look like evaluated images.
    """
    known = seen_in(selection, evaluated, workers, show)
    if not known:
        return list(range(len(selection))), ""
    share = f"{len(known):,} of the {len(selection):,} images in {selection.source} ({len(known) / len(selection):.1%})"
    such = selection.places[known[0]].name
    if len(known) > MAX_SHARE * len(selection):
        raise UserError(
            f"{share} show the same pictures as evaluated images (such as {such}), saved in another way.",
            "Choose on other images, such as those of another split (--select-split) or fold (--select-on folds:5).",
        )
    rows = sorted(set(range(len(selection))) - set(known))
    return rows, f"{share} show the same pictures as evaluated images (such as {such}), and nothing is chosen on them"


def _batches(images: Images, workers: int, show: Callable) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """Thumbnails (n, 195) and their rows; large JPEGs are decoded at a fraction of their size, all as they are seen."""
    batches = ImageBatches(replace(images, draft=8 * SIDE, exif=True), describe, BATCH, workers, max_bad=1.0)
    done = 0
    with show("thumbnails", len(images)) as advance:
        for part in batches:
            yield part, batches.kept[done:]
            done = len(batches.kept)
            if advance:
                advance(len(part))


def _thumbnails(images: Images, workers: int, show: Callable) -> tuple[Tensor, list[int]]:
    parts = list(_batches(images, workers, show))
    rows = [row for _, some in parts for row in some]
    return (torch.cat([part for part, _ in parts]) if parts else torch.empty(0, 3 * SIDE**2 + 3)), rows


def _near(a: Tensor, b: Tensor) -> Tensor:
    """(n, m) bool: thumbnails (n, 195) and (m, 195) that are alike."""
    return a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T <= ALIKE
