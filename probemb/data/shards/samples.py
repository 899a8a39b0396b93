"""Samples in webdataset shards: their places in a tar, and parsing of their bytes.

A walk over the tar's headers finds the samples, so that a reader can seek to any of them. Tars, captions and images are
untrusted: sizes are checked before they are used, and unusable data raises `BadShard` or `BadSample` with the reason.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from probemb.data.failures import BadSample
from probemb.data.shards.tar import Member, walk_tar
from probemb.files import replace_file

if TYPE_CHECKING:
    from webdataset import TarWriter

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
TEXT_EXTENSIONS = ("txt", "json", "cls")
MAX_IMAGE_BYTES = 256 << 20
MAX_TEXT_BYTES = 1 << 20
# Every text tower cuts at a few dozen tokens, while byte-pair encoding is quadratic in the length of one unbroken word.
MAX_CAPTION_CHARS = 2_000

# The key is the path up to the first dot of its last component, the rest is the extension (webdataset's rule).
_KEY_AND_EXTENSION = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)


class SampleSpan(NamedTuple):
    """The place of a sample in its tar: extension (lower case, without a dot) -> member."""

    key: str
    parts: dict[str, Member]


@dataclass(frozen=True)
class Sample:
    """One sample, not yet decoded."""

    key: str
    image: bytes  # encoded: JPEG, PNG or WebP
    captions: list[str]  # stripped; none of them is empty
    label: int | None = None  # class index of KEY.cls
    meta: dict = field(default_factory=dict)  # KEY.json


def group_members(members: Iterable[Member]) -> Iterator[SampleSpan]:
    """Groups of neighbouring members with the same key (webdataset's rule); names without an extension are skipped.

    Of two members with the same name in one group the later one counts, as when the tar is unpacked.
    """
    key, parts = None, {}
    for member in members:
        match = _KEY_AND_EXTENSION.fullmatch(member.name)
        if match is None:
            continue
        if match[1] != key:
            if parts:
                yield SampleSpan(key, parts)
            key, parts = match[1], {}
        parts[match[2].lower()] = member
    if parts:
        yield SampleSpan(key, parts)


def list_samples(file: str | os.PathLike | io.IOBase) -> tuple[list[SampleSpan], int]:
    """Samples of one tar in their order, and the number of other groups. Raises BadShard.

    A sample has an image and a text member (txt, json or cls); only the members that `parse_sample` reads are kept.
    """
    samples, others = sort_groups(group_members(walk_tar(file)))
    return samples, len(others)


def sort_groups(groups: Iterable[SampleSpan]) -> tuple[list[SampleSpan], list[SampleSpan]]:
    """The samples, with the members that `parse_sample` reads, and the groups that are none."""
    samples, others = [], []
    for key, parts in groups:
        image = next((ext for ext in IMAGE_EXTENSIONS if ext in parts), None)
        texts = [ext for ext in TEXT_EXTENSIONS if ext in parts]
        if image is None or not texts:
            others.append(SampleSpan(key, parts))
        else:
            samples.append(SampleSpan(key, {ext: parts[ext] for ext in (image, *texts)}))
    return samples, others


def read_sample(fd: int, span: SampleSpan) -> dict[str, bytes]:
    """Bytes of one sample of an open tar, by extension; safe from several threads.

    Raises BadSample: a member is too large, or the file has become shorter since it was walked.
    """
    parts = {}
    for extension, member in span.parts.items():
        limit = MAX_IMAGE_BYTES if extension in IMAGE_EXTENSIONS else MAX_TEXT_BYTES
        if member.size > limit:
            raise BadSample(f"{span.key}.{extension} has {member.size:,} bytes, more than {limit:,}")
        data = os.pread(fd, member.size, member.offset)
        if len(data) != member.size:
            raise BadSample(f"{span.key}.{extension} ends early: the shard has become shorter")
        parts[extension] = data
    return parts


def parse_sample(parts: Mapping[str, bytes], key: str = "", need_caption: bool | None = True) -> Sample:
    """Parse a sample's bytes, given by extension; the image stays encoded.

    Captions come from KEY.json's "captions" (strings, or objects with a "caption"), else from KEY.txt, one a line, else
    from KEY.json's "caption" (img2dataset writes both). They are strict UTF-8, stripped, cut at 2,000 characters; empty
    ones are dropped. The class index is KEY.cls.

    Raises BadSample: no image; text that is not UTF-8, not JSON or malformed; no caption left (with
    `need_caption=False`: neither a caption nor a class index; with None an image is enough).
    """
    image = next((parts[ext] for ext in IMAGE_EXTENSIONS if ext in parts), None)
    if not image:
        raise BadSample("there is no image")
    meta = _parse_json(parts["json"]) if "json" in parts else {}
    if "captions" in meta:
        captions = meta["captions"]
    elif "txt" in parts:
        captions = _decode_text(parts["txt"], "txt").split("\n")
    else:
        captions = [meta["caption"]] if meta.get("caption") is not None else []
    if isinstance(captions, list):  # COCO's annotations have {"id", "caption"} in place of the caption
        captions = [one.get("caption") if isinstance(one, dict) else one for one in captions]
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise BadSample("the captions of the json are not a list of strings")
    captions = [text[:MAX_CAPTION_CHARS] for text in (caption.strip() for caption in captions) if text]
    label = _parse_class(parts["cls"]) if "cls" in parts else None
    if not captions and (need_caption or (label is None and need_caption is False)):
        raise BadSample("there is no caption" if need_caption else "there is neither a caption nor a class index")
    return Sample(key, image, captions, label, meta)


def _decode_text(data: bytes, extension: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample(f"the {extension} is not UTF-8 (byte {error.start})") from None


def _parse_json(data: bytes) -> dict:
    try:
        meta = json.loads(_decode_text(data, "json"))
    except (ValueError, RecursionError):
        raise BadSample("the json cannot be parsed") from None
    if not isinstance(meta, dict):
        raise BadSample("the json is not an object")
    return meta


def _parse_class(data: bytes) -> int:
    if not re.fullmatch(rb"\s*[0-9]{1,9}\s*", data):
        raise BadSample("the cls is not a class index (a whole number from 0 on)")
    return int(data)


def tar_writer(file: BinaryIO) -> TarWriter:
    """webdataset's writer of samples {"__key__", extension: bytes}; the same samples give the same bytes."""
    from webdataset import TarWriter  # which imports torch

    return TarWriter(file, encoder=False, user="", group="", mode=0o644, mtime=0)


def copy_samples(shard: BinaryIO, spans: Iterable[SampleSpan], path: Path) -> None:
    """Some samples of an open shard as the shard `path`, which is replaced atomically."""

    def write(aside: Path) -> None:
        with open(aside, "wb") as file, tar_writer(file) as tar:
            for span in spans:
                tar.write({"__key__": span.key, **read_sample(shard.fileno(), span)})

    replace_file(path, write)


def encode_captions(captions: Iterable[str]) -> bytes:
    """The content of KEY.txt: one caption per line; line breaks inside a caption become blanks."""
    return "\n".join(" ".join(caption.split()) for caption in captions).encode("utf-8", "replace")
