"""Captions in webdataset shards: KEY.jpg beside KEY.txt or KEY.json."""

import re
from collections.abc import Sequence
from pathlib import Path

from probemb.data.captions.dataset import (
    AUTO,
    CaptionDataset,
    Entry,
    assemble,
    choose_split,
    is_id,
    resolve_split,
    split_name,
)
from probemb.data.failures import BadSample
from probemb.data.image_loader import Images, Place, find_tars, list_members
from probemb.data.labelled.images import CLASS_FILES
from probemb.data.shards.samples import (
    IMAGE_EXTENSIONS,
    TEXT_EXTENSIONS,
    Sample,
    group_members,
    parse_sample,
    read_sample,
)
from probemb.errors import UserError

_SPLIT_OF_TAR = re.compile(r"([A-Za-z]+)[-_.]")


def read_shards(data: str | Path, split: str | None) -> CaptionDataset:
    """Images and captions of shards.

    KEY.json may have "image_id" or "cocoid", and "caption_ids" in the order of its captions, or each caption as {"id",
    "caption"}; and "class", the name of the image's class, if all have it. Unusable samples are in `images.bad`, with
    name and reason. Raises UserError: no shards, no such split, damaged shards, or no captioned image.
    """
    tars, split = _find(data, split)
    images, entries, metas = Images(places=[], source=str(data)), [], []
    for tar in tars:
        prefix = f"{tar.name}:" if len(tars) > 1 else ""
        members = list_members(tar)
        with open(tar, "rb") as file:
            for span in group_members(members):
                name = prefix + span.key
                image = next((span.parts[ext] for ext in IMAGE_EXTENSIONS if ext in span.parts), None)
                words = {ext: span.parts[ext] for ext in TEXT_EXTENSIONS if ext in span.parts}
                if not words:
                    continue
                try:
                    content = read_sample(file.fileno(), span._replace(parts=words))
                    sample = parse_sample({"jpg": b"-", **content}, span.key)
                    entry = _entry(sample, span.key)
                except BadSample as error:
                    if image is not None:
                        images.bad.append((name, str(error)))
                    continue
                if image is None:
                    images.bad.append((name, "there are captions, but no image"))
                    continue
                entries.append(entry)
                images.places.append(Place(name, str(tar), image.offset, image.size))
                metas.append(sample.meta)
    if not entries:
        why = f" ({images.bad[0][0]}: {images.bad[0][1]})" if images.bad else ""
        raise UserError(
            f"{data} holds no image with a caption{why}.", "Name shards with KEY.txt or KEY.json beside each image."
        )
    if len({entry.id for entry in entries}) < len(entries):  # keys are unique in a tar
        entries = [
            entry._replace(id=place.name) if isinstance(entry.id, str) else entry
            for entry, place in zip(entries, images.places)
        ]
    scenes = read_scenes(metas, [entry.captions for entry in entries])
    named = [meta.get("class") for meta in metas]
    classes = named if all(isinstance(name, str) for name in named) else None
    return assemble(entries, source=str(data), split=split, located=images, scenes=scenes, classes=classes)


def _find(data: str | Path, split: str | None) -> tuple[list[Path], str | None]:
    """The tars and their split, None where none was asked for."""
    path, tars = Path(data), find_tars(data)
    if not tars and path.is_dir():
        folders = {
            split_name(folder.name): folder
            for folder in sorted(path.iterdir())
            if any(folder.glob("*.tar")) and not any((folder / name).exists() for name in CLASS_FILES)  # no captions
        }
        if split == AUTO and len(folders) == 1:
            return find_tars(next(iter(folders.values()))), None
        split = resolve_split(split, folders)
        if split is not None and folders:
            chosen = choose_split(split, folders, str(data))
            return [tar for part in chosen for tar in find_tars(folders[part])], split
        if folders:
            raise UserError(
                f"{data} holds the splits {', '.join(folders)}.",
                f"Name one of them, or a folder of shards such as {next(iter(folders.values()))}.",
            )
    if not tars:
        what = "holds no webdataset shards" if path.is_dir() else "does not exist"
        raise UserError(
            f"The data path {data} {what}.",
            "Name shards with captions, or make the synthetic data with `python -m tools.make_scenes data/scenes`.",
        )
    named = [(found and split_name(found[1]), tar) for tar in tars for found in [_SPLIT_OF_TAR.match(tar.name)]]
    known = [name for name, _ in named if name]
    split = resolve_split(split, known if path.is_dir() else ())
    if split is None or (path.is_dir() and split_name(path.resolve().name) == split):
        return tars, split
    chosen = choose_split(split, known, str(data))
    return [tar for name, tar in named if name in chosen], split


def _entry(sample: Sample, key: str) -> Entry:
    meta = sample.meta
    number = next((meta[key] for key in ("image_id", "cocoid") if meta.get(key) is not None), None)
    if number is not None and not is_id(number):
        raise BadSample("the image_id of the json is not a whole number from 0 on")
    rows, ids = meta.get("captions"), meta.get("caption_ids")
    if ids is None and rows and all(isinstance(one, dict) and "id" in one for one in rows):
        ids = [one["id"] for one in rows]
    if ids is not None:
        if not isinstance(ids, list) or not all(map(is_id, ids)):
            raise BadSample("the caption_ids of the json are not a list of whole numbers from 0 on")
        if rows and len(ids) == len(rows):  # empty captions were dropped
            texts = [one["caption"] if isinstance(one, dict) else one for one in rows]
            ids = [one for one, text in zip(ids, texts) if text.strip()]
        if len(ids) != len(sample.captions):
            raise BadSample(f"there are {len(ids)} caption_ids for {len(sample.captions)} captions")
    return Entry(key if number is None else number, sample.captions, ids)


def read_scenes(metas: Sequence[dict], texts: Sequence[Sequence[str]]) -> list[tuple] | None:
    """(scene, captions) of each sample of the synthetic world; None if any sample is from elsewhere."""
    from probemb.data.scenes import sample_from_json

    found = []
    for meta, captions in zip(metas, texts):
        try:
            scene, stated = sample_from_json(meta)
        except (TypeError, ValueError, AttributeError):
            return None
        if [caption.text for caption in stated] != list(captions):
            return None
        found.append((scene, stated))
    return found
