"""Noisy correspondence: a share of the captions is moved to wrong images, once for the whole run.

The images of these captions are permuted among themselves, as in NCR. `noise.npy` in the run folder keeps the index of
the image of each caption of the clean data.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np

from probemb.data.captions.find import CaptionDataset
from probemb.data.npy import read_npy
from probemb.errors import UserError
from probemb.files import replace_file

NOISE_FILE = "noise.npy"
_LEAST_MOVED = 0.9  # of the ratio: a few captions return to their own image by chance


def shuffle_captions(dataset: CaptionDataset, ratio: float, seed: int) -> tuple[CaptionDataset, np.ndarray]:
    """The data with a share of its captions at wrong images, and the image of each caption, (M,) int64.

    Every image keeps its number of captions. Of the floor(ratio · M) captions drawn, a few may return to their own
    image. Source: NCR §4.1; PCME++ Table 2 (20 % and 50 %).

    Raises:
        UserError: the ratio is not in [0, 1].
    """
    if not 0 <= ratio <= 1:
        raise UserError(f"The noise ratio is {ratio}.", "Give the share of wrong captions, from 0 to 1.")
    owner = np.array(dataset.owner(), np.int64)
    draw = np.random.RandomState([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, 0x6E6F])
    chosen = draw.permutation(len(owner))[: int(ratio * len(owner))]
    image_of = owner.copy()
    image_of[chosen] = owner[draw.permutation(chosen)]
    return assign_captions(dataset, image_of), image_of


def assign_captions(dataset: CaptionDataset, image_of: np.ndarray) -> CaptionDataset:
    """The data with caption c at image `image_of[c]`, (M,); within an image in the order of the clean data.

    So pair p of the result is caption `np.argsort(image_of, kind="stable")[p]` of the clean data. Raises ValueError
    for an array that does not leave every image its number of captions.
    """
    if not _fits(dataset, image_of):
        raise ValueError("this array does not give every image its number of captions")
    order = np.argsort(image_of, kind="stable")
    cuts = np.cumsum([len(texts) for texts in dataset.captions])[:-1]
    groups = np.split(order, cuts)

    def move(rows: list) -> list[list]:
        flat = [one for row in rows for one in row]
        return [[flat[c] for c in group] for group in groups]

    scenes = dataset.scenes
    if scenes is not None:
        moved = move([captions for _, captions in scenes])
        scenes = [(scene, captions) for (scene, _), captions in zip(scenes, moved)]
    ids = dataset.caption_ids
    return replace(
        dataset, captions=move(dataset.captions), caption_ids=None if ids is None else move(ids), scenes=scenes
    )


def noisy_captions(
    dataset: CaptionDataset, ratio: float, seed: int, folder: Path, write: bool = True
) -> CaptionDataset:
    """`shuffle_captions`, kept as `noise.npy` in the run folder; an existing file is used instead.

    Args:
        write: write the file; the other ranks draw the same.

    Raises:
        UserError: the file there does not fit the data or the ratio.
    """
    shuffled, image_of = shuffle_captions(dataset, ratio, seed)
    path = folder / NOISE_FILE
    if path.exists():
        kept = load_noise(path, dataset, ratio)
        return shuffled if np.array_equal(kept, image_of) else assign_captions(dataset, kept)
    if write and ratio > 0:
        save_noise(path, image_of)
    return shuffled


def save_noise(path: Path, image_of: np.ndarray) -> None:
    """Write the array as a whole or not at all. Raises OSError."""
    content = io.BytesIO()
    np.save(content, image_of, allow_pickle=False)
    replace_file(path, lambda aside: aside.write_bytes(content.getvalue()))


def load_noise(path: Path, dataset: CaptionDataset, ratio: float) -> np.ndarray:
    """The image of each caption, (M,) int64. Raises UserError if the file does not fit the clean data or the ratio."""
    remedy = "Resume with the data and the noise ratio of that run, or start a new one."
    try:
        image_of = read_npy(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {str(error)[:200].rstrip('.')}.", remedy) from None
    if not _fits(dataset, image_of):
        raise UserError(f"{path} does not fit the {dataset.n_captions} captions of {dataset.source}.", remedy)
    image_of = image_of.astype(np.int64)
    owner = np.array(dataset.owner(), np.int64)
    moved, most = int((image_of != owner).sum()), int(ratio * len(owner))
    least = int(_LEAST_MOVED * most) if most > 100 else 0  # of a few, all may stay by chance
    if not least <= moved <= most:
        raise UserError(
            f"{path} has {moved / len(owner):.1%} of the captions at wrong images, but the noise ratio is {ratio:g}.",
            remedy,
        )
    return image_of


def _fits(dataset: CaptionDataset, image_of: np.ndarray) -> bool:
    if image_of.ndim != 1 or image_of.dtype.kind not in "iu" or len(image_of) != dataset.n_captions:
        return False
    if len(image_of) and not 0 <= image_of.min() <= image_of.max() < len(dataset):
        return False
    counts = [len(texts) for texts in dataset.captions]
    return bool((np.bincount(image_of.astype(np.int64), minlength=len(dataset)) == counts).all())
