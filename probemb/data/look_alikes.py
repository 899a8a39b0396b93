"""Finds pictures that occur twice although their files differ: saved in another format, quality or size.

Two images look alike if small colour thumbnails of them are nearly the same: squared distances of photographs saved
again are some 0.01 at most, of distinct ones 0.2 and more. Crops and mirrored or repainted copies are not found.
"""

from collections.abc import Callable
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
    """Indices of `these` that look like one of `those`; unreadable images look like none."""
    known, asked = _thumbnails(those, workers, show), _thumbnails(these, workers, show)
    near = [_near(part, known).any(dim=1) for part in asked.split(BATCH)]
    return torch.cat(near).nonzero().flatten().tolist()


def same_picture(images: Images, workers: int = 0, show: Callable = silent) -> list[int]:
    """The index of the first one of each image's group; images that look alike, also by way of others, form one."""
    thumbnails, first = _thumbnails(images, workers, show), np.arange(len(images))
    for start in range(0, len(images), BATCH):
        for i, near in enumerate(_near(thumbnails[start : start + BATCH], thumbnails[: start + BATCH]), start):
            groups = np.unique(first[[*near[:i].nonzero().flatten().tolist(), i]])
            if len(groups) > 1:
                first[np.isin(first, groups)] = groups[0]
    return first.tolist()


def leave_out(selection: Images, evaluated: Images, workers: int = 0, show: Callable = silent) -> tuple[list[int], str]:
    """Rows of images to choose on that look like no evaluated one, and a sentence about the others, or ""."""
    known = seen_in(selection, evaluated, workers, show)
    if not known:
        return list(range(len(selection))), ""
    share = f"{len(known):,} of the {len(selection):,} images in {selection.source} ({len(known) / len(selection):.1%})"
    what = f"{share} show the same pictures as evaluated images (such as {selection.places[known[0]].name})"
    if len(known) > MAX_SHARE * len(selection):
        raise UserError(f"{what}.", "Name others by --select-data; zeroshot.imagenet also has --select-on folds:5.")
    return sorted(set(range(len(selection))) - set(known)), f"{what}, and nothing is chosen on them"


def _thumbnails(images: Images, workers: int, show: Callable) -> Tensor:
    """(N, 195), NaN for unreadable images; large JPEGs are decoded at a fraction of their size, all turned upright."""
    batches = ImageBatches(replace(images, draft=8 * SIDE, exif=True), describe, BATCH, workers, max_bad=1.0)
    parts = []
    with show("thumbnails", len(images)) as advance:
        for part in batches:
            parts.append(part)
            if advance:
                advance(len(part))
    found = torch.full((len(images), 3 * SIDE**2 + 3), torch.nan)
    found[batches.kept] = torch.cat([*parts, found[:0]])
    return found


def _near(a: Tensor, b: Tensor) -> Tensor:
    """(n, m) bool: thumbnails (n, 195) and (m, 195) that are alike."""
    return a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T <= ALIKE
