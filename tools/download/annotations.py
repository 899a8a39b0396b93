"""Published captions of COCO, Flickr8k and Flickr30k, for archives of images.

COCO      captions_train2014.json: {"images": [{"id", "file_name"}], "annotations": [{"image_id", "id", "caption"}]}
Flickr    Flickr8k.token.txt, results_20130124.token: NAME.jpg#0 TAB caption
splits    Flickr_8k.trainImages.txt, …devImages.txt, …testImages.txt: one NAME.jpg a line
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from probemb.data.reading import as_id, check_unique, checked, split_name
from probemb.errors import UserError

COCO_FILE = re.compile(r"captions_(train|val)(\d{4})\.json")
TOKEN_FILE = re.compile(r".*(?:\.token(?:\.txt)?|_token\.txt)")
SPLIT_FILE = re.compile(r".*[._](train|dev|val|test)(?:Images)?\.txt")
_PICTURE = re.compile(r"[^/\\\0]{1,200}\.(?:jpe?g|png)", re.IGNORECASE)
_TOKEN = re.compile(r"(([A-Za-z0-9_-]{1,100})\.(?:jpe?g|png))#(\d{1,4})\t(.*)", re.IGNORECASE)


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
    with checked(label, "one of COCO's caption files", "Name annotations_trainval2014.zip as COCO publishes it."):
        data = json.loads(content)
        check_unique((one["id"] for one in data["images"]), "image id", label)
        names = {as_id(one["id"], "an image id"): one["file_name"] for one in data["images"]}
        if not all(map(_PICTURE.fullmatch, names.values())):
            raise ValueError("a file_name is not that of an image")
        captions: dict[int, list[dict]] = {number: [] for number in names}
        for one in data["annotations"]:
            if text := " ".join(one["caption"].split()):
                captions[one["image_id"]].append({"id": as_id(one["id"], "an id"), "caption": text})
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
    captions: dict[tuple[str, str], dict[int, str]] = {}
    lines = [line.strip() for line in content.decode("utf-8-sig", "replace").split("\n") if line.strip()]
    good = [found for line in lines if (found := _TOKEN.fullmatch(line)) and found[4].strip()]
    if 2 * len(good) <= len(lines):
        raise UserError(f"{label} is not a token file.", "Its lines are `NAME.jpg#0 TAB caption`.")
    for found in good:
        captions.setdefault((found[2], found[1]), {})[int(found[3])] = " ".join(found[4].split())
    pictures = [Picture(*names, [texts[i] for i in sorted(texts)]) for names, texts in captions.items()]
    return pictures, len(lines) - len(good)


def split_pictures(pictures: Sequence[Picture], lists: Mapping[str, bytes]) -> dict[str, list[Picture]]:
    """Images by split, from lists of names; without lists all are "train". `dev` is called `val`.

    Raises UserError: two lists name the same image, or no list names any.
    """
    if not lists:
        return {"train": list(pictures)}
    known = {one.name: one for one in pictures}
    splits, names = {}, []
    for split, content in lists.items():
        lines = dict.fromkeys(line.strip() for line in content.decode("utf-8", "replace").split("\n") if line.strip())
        splits[split_name(split)] = [known[name] for name in lines if name in known]
        names += lines
    check_unique(names, "image", "The lists of splits")
    if not any(splits.values()):
        raise UserError("The lists of splits name no image that has captions.", "Name lists and captions of one set.")
    return {name: chosen for name, chosen in splits.items() if chosen}
