"""Published captions of COCO, Flickr8k and Flickr30k, for archives of images.

COCO      captions_train2014.json: {"images": [{"id", "file_name"}], "annotations": [{"image_id", "id", "caption"}]}
Flickr    Flickr8k.token.txt, results_20130124.token: NAME.jpg#0 TAB caption
splits    Flickr_8k.trainImages.txt, …devImages.txt, …testImages.txt: one NAME.jpg a line
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from probemb.errors import UserError

COCO_FILE = re.compile(r"captions_(train|val)(\d{4})\.json")
TOKEN_FILE = re.compile(r".*(?:\.token(?:\.txt)?|_token\.txt)")
SPLIT_FILE = re.compile(r".*[._](train|dev|val|test)(?:Images)?\.txt")
_KEY = re.compile(r"[A-Za-z0-9_-]{1,100}")
_PICTURE = re.compile(r"[^/\\\0]{1,200}\.(?:jpe?g|png)", re.IGNORECASE)


@dataclass
class Picture:
    """One image of an archive: the sample's key, its file's name, its captions, and the content of KEY.json."""

    key: str
    name: str
    captions: list[str]
    meta: dict = field(default_factory=dict)


def coco_pictures(content: bytes, label: str) -> tuple[list[Picture], int]:
    """Images of a COCO caption file by ascending id, and the number without captions.

    Raises UserError: another kind of file, or an id occurs twice.
    """
    try:
        data = json.loads(content)
        names = {}
        for one in data["images"]:
            if type(one["id"]) is not int or one["id"] < 0 or not _PICTURE.fullmatch(one["file_name"]):
                raise ValueError(one["file_name"])
            if one["id"] in names:
                raise ValueError(f"image {one['id']} occurs twice")
            names[one["id"]] = one["file_name"]
        captions: dict[int, list[dict]] = {number: [] for number in names}
        for one in data["annotations"]:
            text = " ".join(one["caption"].split())
            if text:
                captions[one["image_id"]].append({"id": int(one["id"]), "caption": text})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise UserError(
            f"{label} is not one of COCO's caption files.", "Name annotations_trainval2014.zip as COCO publishes it."
        ) from None
    pictures = [
        Picture(f"{key:012d}", names[key], [one["caption"] for one in rows], {"image_id": key, "captions": rows})
        for key, rows in sorted(captions.items())
        if rows
    ]
    return pictures, len(names) - len(pictures)


def token_pictures(content: bytes, label: str) -> tuple[list[Picture], int]:
    """Images of a Flickr token file in its order, and the number of malformed lines.

    Raises UserError: fewer than half of the lines are well-formed.
    """
    captions: dict[str, dict[int, str]] = {}
    bad = 0
    lines = content.decode("utf-8-sig", "replace").splitlines()
    for line in lines:
        found = re.fullmatch(r"([^\t#]+)#(\d{1,4})\t(.*)", line.strip())
        text = " ".join(found[3].split()) if found else ""
        if not text or not _PICTURE.fullmatch(found[1]) or not _KEY.fullmatch(found[1].rpartition(".")[0]):
            bad += bool(line.strip())
            continue
        captions.setdefault(found[1], {})[int(found[2])] = text
    if 2 * bad >= max(len(lines), 1):
        raise UserError(f"{label} is not a token file.", "Its lines are `NAME.jpg#0 TAB caption`.")
    return [
        Picture(name.rpartition(".")[0], name, [texts[i] for i in sorted(texts)]) for name, texts in captions.items()
    ], bad


def split_pictures(pictures: Sequence[Picture], lists: Mapping[str, bytes]) -> dict[str, list[Picture]]:
    """Images by split, from lists of names; without lists all are "train". `dev` is called `val`.

    Raises UserError: two lists name the same image, or no list names any.
    """
    if not lists:
        return {"train": list(pictures)}
    known = {one.name: one for one in pictures}
    splits: dict[str, list[Picture]] = {}
    taken: set[str] = set()
    for split, content in lists.items():
        names = [line.strip() for line in content.decode("utf-8", "replace").splitlines() if line.strip()]
        twice = taken.intersection(names)
        if twice:
            raise UserError(f"Two splits have the image {min(twice)}.", "Name the lists of one set of splits.")
        taken.update(names)
        splits["val" if split == "dev" else split] = [known[name] for name in dict.fromkeys(names) if name in known]
    if not any(splits.values()):
        raise UserError("The lists of splits name no image that has captions.", "Name lists and captions of one set.")
    return {name: chosen for name, chosen in splits.items() if chosen}
