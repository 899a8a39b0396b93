"""Samples in webdataset shards: their places in a tar, and parsing of their bytes.

Tars, captions and images are untrusted: sizes are checked before they are used, and unusable data raises `BadShard` or
`BadSample` with the reason.
"""

import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any, BinaryIO, NamedTuple

from probemb.data.failures import BadSample, BadShard

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
TEXT_EXTENSIONS = ("txt", "json", "cls")
CAPTIONS = ("json.captions", "txt", "json.caption")  # img2dataset writes the last two alike
MAX_IMAGE_BYTES = 256 << 20
MAX_TEXT_BYTES = 1 << 20
# Every text tower cuts at a few dozen tokens, while byte-pair encoding is quadratic in the length of one unbroken word.
MAX_CAPTION_CHARS = 2_000
_CHUNK = 1 << 20

# The key is the path up to the first dot of its last component, the rest is the extension (webdataset's rule).
_KEY_AND_EXTENSION = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
_IN_JSON = re.compile(r"((?:[^.]+\.)*?json)\.(.+)", re.DOTALL)


class Member(NamedTuple):
    """A regular file in a tar."""

    name: str
    offset: int
    size: int


class SampleSpan(NamedTuple):
    """A sample in its tar: extension (lower case, without a dot) -> member."""

    key: str
    parts: dict[str, Member]


@dataclass(frozen=True)
class Sample:
    key: str
    image: bytes  # encoded: JPEG, PNG or WebP
    captions: list[str]  # stripped, at most MAX_CAPTION_CHARS; none of them is empty
    label: int | None = None  # class index of KEY.cls
    meta: dict = field(default_factory=dict)  # KEY.json


def walk_tar(file: str | os.PathLike | BinaryIO, salvage: bool = False) -> Iterator[Member]:
    """Regular files of an uncompressed tar, in order.

    Raises BadShard: not a tar, damaged, cut off (also between two members, where tarfile sees the end), or sparse.
    With `salvage` the walk resumes at the next valid header instead.
    """
    named = isinstance(file, (str, os.PathLike))
    label = os.fspath(file) if named else str(getattr(file, "name", "tar"))
    try:
        opened = open(file, "rb", buffering=0) if named else nullcontext(file)  # noqa: SIM115
    except OSError as error:
        raise BadShard(f"{label}: cannot be opened ({error.strerror})") from None
    with opened as raw:
        length = os.fstat(raw.fileno()).st_size
        raw.seek(0)
        try:
            with tarfile.open(fileobj=raw, mode="r:", encoding="utf-8", ignore_zeros=salvage) as tar:
                while member := tar.next():
                    tar.members.clear()  # which would take a kilobyte a member
                    end = member.offset_data + member.size
                    if member.issparse() or member.size < 0 or end > length:
                        if salvage:
                            continue
                        raise BadShard(f"{label}: cut off or damaged: {member.size:,} bytes at {member.offset_data:,}")
                    if member.isreg():
                        yield Member(member.name, member.offset_data, member.size)
                if not salvage:
                    _check_end(raw.fileno(), label, tar.offset)
        except (BadShard, OSError):
            raise
        except Exception as error:  # hostile headers fail in many ways
            if not salvage:
                what = "the file is empty" if not length else f"not an uncompressed tar, or cut off ({error})"
                raise BadShard(f"{label}: {what}") from None


def _check_end(fd: int, label: str, marker: int) -> None:
    end = marker
    while chunk := os.pread(fd, _CHUNK, end):
        if chunk.count(0) != len(chunk):
            raise BadShard(f"{label}: damaged at byte {marker:,}: no header, but data follows (or tars were joined)")
        end += len(chunk)
    if end < marker + tarfile.BLOCKSIZE:
        raise BadShard(f"{label}: cut off at byte {end:,}: the end of the archive is missing")


def group_members(members: Iterable[Member]) -> Iterator[SampleSpan]:
    """Groups of neighbouring members with the same key (webdataset's rule); names without an extension are skipped."""
    named = ((match[1], match[2], m) for m in members if (match := _KEY_AND_EXTENSION.fullmatch(m.name)))
    for key, group in groupby(named, itemgetter(0)):
        yield SampleSpan(key, {extension.lower(): member for _, extension, member in group})


def sort_groups(groups: Iterable[SampleSpan]) -> tuple[list[SampleSpan], list[SampleSpan]]:
    """The samples, which have an image and a text (txt, json, cls, or another one such as caption.txt), with these
    members; and the groups that are none.
    """
    samples, others = [], []
    for key, parts in groups:
        image = next((ext for ext in IMAGE_EXTENSIONS if ext in parts), None)
        more = [ext for ext in parts if ext.endswith((".txt", ".json")) and parts[ext].size <= MAX_TEXT_BYTES]
        texts = [*(ext for ext in TEXT_EXTENSIONS if ext in parts), *more]
        if image is None or not texts:
            others.append(SampleSpan(key, parts))
        else:
            samples.append(SampleSpan(key, {ext: parts[ext] for ext in (image, *texts)}))
    return samples, others


def list_samples(file: str | os.PathLike | BinaryIO, salvage: bool = False) -> tuple[list, list]:
    """`sort_groups` of one tar. Raises BadShard."""
    return sort_groups(group_members(walk_tar(file, salvage)))


def read_sample(fd: int, span: SampleSpan) -> dict[str, bytes]:
    """Bytes of one sample of an open tar, by extension. Raises BadSample: too large, or the file has become shorter."""
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


def parse_sample(
    parts: Mapping[str, bytes], key: str = "", need_caption: bool | None = True, names: Sequence[str] = CAPTIONS
) -> Sample:
    """Parse a sample's bytes, given by extension; the image stays encoded.

    Its captions are those of the first name that has any, see `read_captions`. Raises BadSample. `need_caption`: False
    accepts a class index in place of a caption, None an image alone.
    """
    image = next((parts[ext] for ext in IMAGE_EXTENSIONS if ext in parts), None)
    if not image:
        raise BadSample("there is no image")
    documents = {"json": _read_json(parts, "json")}
    captions = next(filter(None, (read_captions(parts, name, documents) for name in names)), [])
    if "cls" in parts and not re.fullmatch(rb"\s*[0-9]{1,9}\s*", parts["cls"]):
        raise BadSample("the cls is not a class index (a whole number from 0 on)")
    label = int(parts["cls"]) if "cls" in parts else None
    if not captions and (need_caption or (label is None and need_caption is False)):
        raise BadSample("there is no caption" if need_caption else "there is neither a caption nor a class index")
    return Sample(key, image, captions, label, documents["json"])


def _read_json(parts: Mapping[str, bytes], member: str) -> dict:
    try:
        content = json.loads(parts[member]) if member in parts else {}
    except (ValueError, RecursionError):
        raise BadSample(f"the {member} cannot be parsed") from None
    if not isinstance(content, dict):
        raise BadSample(f"the {member} is not an object")
    return content


def read_captions(parts: Mapping[str, bytes], name: str, documents: dict[str, dict]) -> list[str]:
    """Captions by a name: the lines of a text member (txt, caption.txt), or the text or list of texts under a key of a
    JSON member (json.caption, json.a.b, syn.json.texts), of which `documents` keeps the parsed ones; COCO's texts are
    objects with a "caption". Empty if there are none. Raises BadSample.
    """
    member, keys = split_caption_name(name)
    if keys:
        if member not in documents:
            documents[member] = _read_json(parts, member)
        value = documents[member]
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if (found := _texts(value)) is None:
            raise BadSample(f"{name} is neither a text nor a list of texts")
    else:
        try:
            found = parts.get(member, b"").decode("utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise BadSample(f"the {member} is not UTF-8 (byte {error.start})") from None
    return clean_captions(found)


def clean_captions(texts: Iterable[str]) -> list[str]:
    """Stripped, cut, and without empty ones."""
    return [text[:MAX_CAPTION_CHARS] for text in map(str.strip, texts) if text]


@lru_cache
def split_caption_name(name: str) -> tuple[str, list[str]]:
    """The extension of the member, and the keys inside it, of a caption's name."""
    found = _IN_JSON.fullmatch(name)
    return (found[1], found[2].split(".")) if found else (name, [])


def _texts(value: Any) -> list[str] | None:
    value = [] if value is None else value if isinstance(value, list) else [value]
    found = [one.get("caption") if isinstance(one, dict) else one for one in value]
    return found if all(isinstance(one, str) for one in found) else None


def caption_names(parts: Mapping[str, bytes]) -> list[str]:
    """The names by which a sample without its image has texts. Raises BadSample."""
    names = []
    for member in parts:
        if member.endswith("json"):
            values = [(member, _read_json(parts, member))]
            for name, value in values:  # which grows
                if isinstance(value, dict):
                    values += [(f"{name}.{key}", inner) for key, inner in value.items() if "." not in key]
                elif any(map(str.strip, _texts(value) or [])):
                    names.append(name)
        elif member != "cls" and parts[member].strip():
            names.append(member)
    return names
