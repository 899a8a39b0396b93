"""Captions in webdataset shards: KEY.jpg beside KEY.txt or KEY.json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from probemb.data.captions.dataset import CaptionDataset, Entry, assemble
from probemb.data.failures import BadSample
from probemb.data.image_loader import Images, Place, find_tars, list_members
from probemb.data.reading import AUTO, as_id, as_list, choose_split, split_name
from probemb.data.scenes.predicates import sample_from_json
from probemb.data.shards.samples import (
    IMAGE_EXTENSIONS,
    TEXT_EXTENSIONS,
    Sample,
    SampleSpan,
    group_members,
    parse_sample,
    read_sample,
)
from probemb.errors import UserError

CLASS_FILES = ("classes.json", "classes.txt")  # of shards with labels
_SPLIT_OF_TAR = re.compile(r"([A-Za-z]+)[-_.]")


def read_shards(path: Path, split: str | None, images: Path | None = None) -> CaptionDataset:
    """Images and captions of shards.

    KEY.json may have "image_id" or "cocoid", and "caption_ids" in the order of its captions, or each caption as {"id",
    "caption"}; and "class", the name of the image's class, if all have it. Unusable samples are in `images.bad`, with
    name and reason. Raises UserError: no shards, no such split, damaged shards, or no captioned image.
    """
    if images is not None:
        raise UserError(f"{path} holds its images itself.", "Leave the image folder out, or name an annotation file.")
    tars, split = _find(path, split)
    located, entries, metas = Images(places=[], source=str(path)), [], []
    for name, place, span, file in walk_samples(tars):
        words = {ext: span.parts[ext] for ext in TEXT_EXTENSIONS if ext in span.parts}
        if not words:
            continue
        try:
            sample = parse_sample({"jpg": b"-", **read_sample(file.fileno(), span._replace(parts=words))}, span.key)
            entry = _entry(sample, span.key)
        except (BadSample, ValueError) as error:
            if place is not None:
                located.bad.append((name, str(error)))
            continue
        if place is None:
            located.bad.append((name, "there are captions, but no image"))
            continue
        entries.append(entry)
        located.places.append(place)
        metas.append(sample.meta)
    if not entries:
        why = f" ({located.bad[0][0]}: {located.bad[0][1]})" if located.bad else ""
        raise UserError(
            f"{path} holds no image with a caption{why}.", "Name shards with KEY.txt or KEY.json beside each image."
        )
    if len({entry.id for entry in entries}) < len(entries):  # keys are unique in a tar
        named = zip(entries, located.places)
        entries = [entry._replace(id=place.name) if isinstance(entry.id, str) else entry for entry, place in named]
    scenes = read_scenes(metas, [entry.captions for entry in entries])
    classes = [meta.get("class") for meta in metas]
    classes = classes if all(isinstance(name, str) for name in classes) else None
    return assemble(entries, path, split, located, scenes=scenes, classes=classes)


def walk_samples(tars: Sequence[Path]) -> Iterator[tuple[str, Place | None, SampleSpan, BinaryIO]]:
    """Name, place of the image if there is one, and members of every sample, and the open tar. Raises UserError."""
    for tar in tars:
        prefix = f"{tar.name}:" if len(tars) > 1 else ""
        members = list_members(tar)
        with open(tar, "rb") as file:
            for span in group_members(members):
                image = next((span.parts[ext] for ext in IMAGE_EXTENSIONS if ext in span.parts), None)
                place = image and Place(prefix + span.key, str(tar), image.offset, image.size)
                yield prefix + span.key, place, span, file


def _find(path: Path, split: str | None) -> tuple[list[Path], str | None]:
    """The tars and their split, None where none was asked for."""
    tars = find_tars(path)
    if not tars and path.is_dir():
        folders = {
            split_name(folder.name): folder
            for folder in sorted(path.iterdir())
            if any(folder.glob("*.tar")) and not any((folder / name).exists() for name in CLASS_FILES)  # no captions
        }
        if split == AUTO and len(folders) == 1:
            return find_tars(next(iter(folders.values()))), None
        if folders:
            split, parts = choose_split(split, folders, path)
            if split is None:
                raise UserError(f"{path} holds the splits {', '.join(folders)}.", "Name one of them.")
            return [tar for part in parts for tar in find_tars(folders[part])], split
    if not tars:
        what = "holds no webdataset shards" if path.is_dir() else "does not exist"
        raise UserError(
            f"The data path {path} {what}.",
            "Name shards with captions, or make the synthetic data with `python -m tools.make_scenes data/scenes`.",
        )
    names = [split_name(found[1]) if (found := _SPLIT_OF_TAR.match(tar.name)) else "" for tar in tars]
    if not path.is_dir() and split == AUTO:
        split = None
    if split is None or (path.is_dir() and split_name(path.resolve().name) == split_name(split)):
        return tars, split and split_name(split)
    split, parts = choose_split(split, filter(None, names), path)
    return [tar for name, tar in zip(names, tars) if split is None or name in parts], split


def _entry(sample: Sample, key: str) -> Entry:
    """Raises ValueError: malformed ids."""
    meta = sample.meta
    known = [as_id(meta[name], f"the {name}") for name in ("image_id", "cocoid") if meta.get(name) is not None]
    rows, ids = meta.get("captions"), meta.get("caption_ids")
    if ids is None and rows and all(isinstance(one, dict) and "id" in one for one in rows):
        ids = [one["id"] for one in rows]
    if ids is not None:
        ids = [as_id(one, "a caption id") for one in as_list(ids, "the caption_ids")]
        if rows and len(ids) == len(rows):  # empty captions were dropped
            texts = [one["caption"] if isinstance(one, dict) else one for one in rows]
            ids = [one for one, text in zip(ids, texts) if text.strip()]
        if len(ids) != len(sample.captions):
            raise ValueError(f"there are {len(ids)} caption_ids for {len(sample.captions)} captions")
    return Entry(known[0] if known else key, sample.captions, ids)


def read_scenes(metas: Sequence[dict], texts: Sequence[Sequence[str]]) -> list[tuple] | None:
    """(scene, captions) of each sample of the synthetic world; None if any sample is from elsewhere."""
    try:
        found = [sample_from_json(meta) for meta in metas]
    except (TypeError, ValueError, AttributeError):
        return None
    stated = [[caption.text for caption in captions] for _, captions in found]
    return found if stated == [list(captions) for captions in texts] else None
