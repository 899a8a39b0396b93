"""Finds the image files that an annotation file names."""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

from probemb.data.captions.dataset import missing_images
from probemb.data.image_loader import Images, Place

_IMAGE_FOLDERS = ("images", "flickr30k-images", "flickr30k_images", "Flicker8k_Dataset", "")


def is_inside(name: str) -> bool:
    """True if an untrusted file name stays inside the folder it is joined to."""
    path = PurePosixPath(name)
    return bool(
        path.name
        and len(name) < 4096
        and name.isprintable()
        and "\\" not in name
        and ":" not in name
        and not path.is_absolute()
        and ".." not in path.parts
    )


def locate(
    candidates: Sequence[Sequence[str]], names: Sequence[str], source: str, images: Path | None, beside: Sequence[Path]
) -> tuple[Images | None, list[str]]:
    """The location of each image, and the names of missing ones.

    Args:
        candidates: for each image its possible paths below the folder; the first existing one is used.
        images: the folder; None searches beside the annotations, where all images may be missing.

    Raises UserError: some images are not in the folder.
    """

    @cache
    def names_in(folder: str) -> frozenset[str]:  # one listing per folder, not one `stat` for each of 100,000 images
        with suppress(OSError):
            return frozenset(os.listdir(folder))
        return frozenset()

    def exists(path: str) -> bool:
        folder, name = os.path.split(path)
        return name in names_in(folder)

    folders = [images] if images is not None else [folder / name for folder in beside for name in _IMAGE_FOLDERS]
    best: list[str | None] = [None] * len(candidates)
    for root in folders:
        if not root.is_dir():
            continue
        paths = ([os.path.join(root, name) for name in group] for group in candidates)
        found = [next(filter(exists, group), None) for group in paths]
        if sum(one is not None for one in found) > sum(one is not None for one in best):
            best = found
    missing = [name for name, one in zip(names, best) if one is None]
    if missing and (images is not None or len(missing) < len(names)):
        raise missing_images(source, missing, len(names))
    if missing:
        return None, missing
    return Images(places=[Place(name, file) for name, file in zip(names, best)], source=source), []
