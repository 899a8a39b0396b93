"""HierarCaps: `id,captions,image_url`, the captions of an image from general to specific, separated by " => "."""

import csv
import io
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from probemb.data.captions.dataset import (
    CaptionDataset,
    Entry,
    assemble,
    choose_split,
    only_file,
    read_text,
    resolve_split,
)
from probemb.data.captions.image_files import is_inside, locate
from probemb.errors import UserError


def read_hierarcaps(path: Path, split: str | None, images: Path | None) -> CaptionDataset:
    """Read the table; images are named, and looked for, by the file name in their URL. Raises UserError."""
    if path.is_dir():
        path = only_file(sorted(path.glob("hierarcaps*.csv")), path, "HierarCaps' table")
    choose_split(resolve_split(split, ()), (), str(path))
    entries = []
    try:
        for row in csv.DictReader(io.StringIO(read_text(path).decode("utf-8-sig")), strict=True):
            name = PurePosixPath(urlsplit(row["image_url"]).path).name
            if not is_inside(name):
                raise ValueError(f"{name[:100]!r} is no name of an image")
            entries.append(Entry(name, [text.strip() for text in row["captions"].split("=>") if text.strip()]))
    except (csv.Error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not HierarCaps' table: {str(error)[:200]}, in row {len(entries) + 1}.", "Fetch it again."
        ) from None
    names = [str(entry.id) for entry in entries]
    located, missing = locate([[name] for name in names], names, str(path), images, [path.parent])
    return assemble(entries, source=str(path), split=None, located=located, missing=missing)
