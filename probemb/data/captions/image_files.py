"""Finding the files of images that an annotation file names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from probemb.data.captions.dataset import missing_images
from probemb.data.image_loader import Images, Place

_IMAGE_FOLDERS = ("images", "flickr30k-images", "flickr30k_images", "Flicker8k_Dataset", "")


def is_inside(name: str) -> bool:
    """Whether the name of a file, which nobody vouches for, leads to a place within the folder that it is put to."""
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
    """Where each image lies, and the names of those that are nowhere.

    Args:
        candidates: for each image the paths below the folder to look at, the first that is there counts.
        images: the folder; None looks beside the annotations, where it is no error that there is no image at all.

    Raises:
        UserError: some images are not in the folder.
    """
    folders = [images] if images is not None else [folder / name for folder in beside for name in _IMAGE_FOLDERS]
    best: list[str | None] = [None] * len(candidates)
    for root in folders:
        if not root.is_dir():
            continue
        listing = _Listing(root)
        found = [next((listing.path(name) for name in group if listing.holds(name)), None) for group in candidates]
        if sum(one is not None for one in found) > sum(one is not None for one in best):
            best = found
    missing = [name for name, one in zip(names, best) if one is None]
    if missing and (images is not None or len(missing) < len(names)):
        raise missing_images(source, missing, len(names))
    if missing:
        return None, missing
    return Images(places=[Place(name, file) for name, file in zip(names, best)], source=source), []


class _Listing:
    """The names below a folder, one `scandir` for each folder in place of one `stat` for each of 100,000 images."""

    def __init__(self, root: Path):
        self.root = root
        self._names: dict[str, set[str]] = {}

    def holds(self, name: str) -> bool:
        folder, _, base = name.rpartition("/")
        if folder not in self._names:
            try:
                self._names[folder] = set(os.listdir(self.root / folder))
            except OSError:
                self._names[folder] = set()
        return base in self._names[folder]

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)
