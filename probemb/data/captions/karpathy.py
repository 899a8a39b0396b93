"""Karpathy's json of COCO, Flickr30k and Flickr8k: captions and splits, beside folders of images."""

import json
from pathlib import Path, PurePosixPath

from probemb.data.captions.dataset import (
    CaptionDataset,
    Entry,
    assemble,
    check_unique,
    choose_split,
    is_id,
    only_file,
    read_text,
    resolve_split,
    split_name,
)
from probemb.data.captions.image_files import is_inside, locate
from probemb.data.shards.samples import MAX_CAPTION_CHARS
from probemb.errors import UserError


def read_karpathy(path: Path, split: str | None, images: Path | None) -> CaptionDataset:
    """`{"images": [{"filename", "filepath", "split", "cocoid", "sentences": [{"raw", "sentid"}]}]}`.

    COCO's ids are used if "cocoid" is present; else an image is named by its file. Raises UserError.
    """
    if path.is_dir():
        path = only_file(sorted(path.glob("dataset*.json*")), path, "a Karpathy json")
    try:
        rows = json.loads(read_text(path).decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text in UTF-8.", "Fetch the annotation file again.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {str(error)[:200]}.", "Fetch the annotation file again.") from None
    rows = rows.get("images") if isinstance(rows, dict) else None
    if not isinstance(rows, list):
        raise UserError(
            f"{path} is not in Karpathy's format: it has no list of images.",
            "Name dataset_coco.json, dataset_flickr30k.json or one like them.",
        )
    splits, names, entries = [], [], []
    for number, row in enumerate(rows):
        try:
            splits.append(split_name(_text(row["split"], "the split")))
            names.append(_file_name(row))
            entries.append(_entry(row, names[-1]))
        except KeyError as error:
            raise _not_karpathy(path, number, f"there is no {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise _not_karpathy(path, number, str(error)) from None
    split = resolve_split(split, splits)
    chosen = set(choose_split(split, splits, str(path)))
    check_unique(names, "file name", str(path))
    check_unique((entry.id for entry in entries), "image id", str(path))
    kept = [index for index, part in enumerate(splits) if part in chosen]
    entries, candidates = [entries[i] for i in kept], [(names[i], PurePosixPath(names[i]).name) for i in kept]
    located, missing = locate(candidates, [names[i] for i in kept], str(path), images, [path.parent])
    return assemble(entries, source=str(path), split=split, located=located, missing=missing)


def _entry(row: dict, name: str) -> Entry:
    texts, ids = [], []
    is_coco = row.get("cocoid") is not None
    if is_coco and not is_id(row["cocoid"]):
        raise ValueError("the cocoid is not a whole number from 0 on")
    if not isinstance(row["sentences"], list):
        raise ValueError("the sentences are not a list")
    for sentence in row["sentences"]:
        text = _text(sentence["raw"], "the caption").strip()[:MAX_CAPTION_CHARS]
        if is_coco and not is_id(sentence["sentid"]):
            raise ValueError("the sentid is not a whole number from 0 on")
        if text:
            texts.append(text)
            ids.append(sentence.get("sentid"))
    if is_coco:
        return Entry(row["cocoid"], texts, ids)
    return Entry(str(PurePosixPath(name).with_suffix("")), texts)


def _file_name(row: dict) -> str:
    name = _text(row["filename"], "the filename")
    folder = row.get("filepath")
    whole = f"{_text(folder, 'the filepath')}/{name}" if folder else name
    if not is_inside(whole):
        raise ValueError(f"the image {whole[:200]!r} does not lie in the image folder")
    return str(PurePosixPath(whole))


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is not a text")
    return value


def _not_karpathy(path: Path, number: int, why: str) -> UserError:
    return UserError(
        f"Image {number} of {path} is not in Karpathy's format: {why}.",
        "Correct that entry, or fetch the annotation file again.",
    )
