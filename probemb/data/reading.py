"""Checked reading of annotation files from outside: bounded, in UTF-8, and with one shape of error.

A reader parses one entry at a time and raises what malformed content makes Python raise (ValueError with the reason,
KeyError, TypeError); `checked` and `parse_each` turn that into a UserError with file, entry and reason.
"""

import csv
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar

import numpy as np

from probemb.errors import UserError, nearest

MAX_FILE = 1 << 30  # bytes of an annotation file, unpacked
MAX_ARRAYS = 4 << 30  # bytes of an .npz, unpacked
MAX_ID = 2**63 - 1
MALFORMED = (
    *(ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, csv.Error),
    *(OSError, EOFError, zlib.error, SyntaxError),  # the last of XML
)
REMEDY = "Correct the file, or fetch it again."
AUTO = "auto"  # `test` where the data has several of USUAL_SPLITS, else all of it
USUAL_SPLITS = ("train", "restval", "val", "test")
_SPLIT_NAMES = {"dev": "val", "valid": "val", "validation": "val"}  # other names of a split
_SPLIT_PARTS = {"train": ("train", "restval")}  # COCO's restval: images of val2014 that Karpathy gave to training
T = TypeVar("T")


def malformed(path: str | Path, what: str, error: Exception | str, entry: str = "", remedy: str = REMEDY) -> UserError:
    return UserError(f"{path} is not {what}: {entry and f'in {entry}, '}{reason(error)}.", remedy)


def reason(error: Exception | str) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)[:200]


@contextmanager
def checked(path: str | Path, what: str, remedy: str = REMEDY) -> Iterator[None]:
    """Raises UserError for malformed content that is found inside."""
    try:
        yield
    except MALFORMED as error:
        raise malformed(path, what, error, remedy=remedy) from None


def parse_each(
    path: str | Path, what: str, rows: Iterable, parse: Callable[..., T | None], unit: str = "entry"
) -> Iterator[T]:
    """`parse` of every row, without None. Raises UserError, which names the row, counted from 1."""
    rows = iter(rows)
    try:
        for number in count(1):  # noqa: B007 - of the row that is read next
            if (row := next(rows, rows)) is rows:
                return
            if (parsed := parse(row)) is not None:
                yield parsed
    except MALFORMED as error:
        raise malformed(path, what, error, f"{unit} {number}") from None


def parse_all(*args, **more) -> list:
    """A list of `parse_each`."""
    return list(parse_each(*args, **more))


def parse_lines(path: Path, what: str, parse: Callable[[str], T | None]) -> list[T]:
    """`parse` of every line that is not blank. Raises UserError, which names the line."""
    lines = read_text(path).split("\n")
    return parse_all(path, what, lines, lambda line: parse(line.strip("\r")) if line.strip() else None, "line")


def read_bytes(path: Path, limit: int = MAX_FILE) -> bytes:
    """The content of a regular file, unpacked if it is gzipped. Raises UserError: not readable, or too large."""
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}.", "Check the path.")
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            content = (gzip.GzipFile(fileobj=file) if packed else file).read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}.", "Check the file, or fetch it again.") from None
    if len(content) > limit:
        raise UserError(f"{path} has more than {limit >> 20:,} MiB.", "Check the path.")
    return content


def read_text(path: Path, limit: int = MAX_FILE) -> str:
    """The content of a file in UTF-8, also gzipped. Raises UserError, which says how to convert another text."""
    content = read_bytes(path, limit)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, wide = content.count(b"\n", 0, error.start) + 1, content[:2] in (b"\xff\xfe", b"\xfe\xff")
        convert = f"iconv -f {'UTF-16' if wide else 'WINDOWS-1252'} -t UTF-8 '{path}' > converted{path.suffix}"
        why, remedy = f"byte {error.start} is of another encoding", f"Convert it: {convert}"
        raise malformed(path, "a text in UTF-8", why, f"line {line}", remedy) from None


def read_lines(path: Path) -> list[str]:
    """The lines of a text that are not blank, stripped."""
    return [line.strip() for line in read_text(path).split("\n") if line.strip()]


def read_json(path: Path) -> object:
    text = read_text(path)
    with checked(path, "JSON"):
        return json.loads(text)


@contextmanager
def _hostile() -> Iterator[None]:
    """Bytes that are no arrays fail in many ways."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def read_npy(file: str | os.PathLike | BinaryIO, *, mapped: bool = False) -> np.ndarray:
    """The array of a .npy file, memory-mapped and read-only if `mapped`. Raises ValueError."""
    with _hostile():
        array = np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("it is an archive of arrays")
    return array


def read_npz(file: str | os.PathLike, *names: str) -> list[np.ndarray]:
    """Arrays of an .npz file. Raises ValueError."""
    with _hostile(), np.load(file, allow_pickle=False) as arrays:
        if sum(member.file_size for member in arrays.zip.infolist()) > MAX_ARRAYS:
            raise ValueError(f"it has more than {MAX_ARRAYS >> 30} GiB")
        return [arrays[name] for name in names]


def is_id(value: object) -> bool:
    """True for a whole number from 0 on of at most 63 bits, as COCO's ids are."""
    return type(value) is int and 0 <= value <= MAX_ID


def as_id(value: object, what: str) -> int:
    if not is_id(value):
        raise ValueError(f"{what} is not a whole number from 0 on")
    return value


def as_text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is not a text")
    return value


def as_list(value: object, what: str, limit: int = MAX_ID) -> list:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError(f"{what} are not a list of up to {limit:,}" if limit < MAX_ID else f"{what} are not a list")
    return value


def as_inside(name: object) -> str:
    """The name of a file that stays inside the folder it is joined to."""
    path = PurePosixPath(as_text(name, "the name of an image"))
    plain = path.name and len(name) < 4096 and name.isprintable() and "\\" not in name and ":" not in name
    if not plain or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"the image {name[:200]!r} does not lie in the image folder")
    return str(path)


def check_unique(ids: Iterable[int | str], what: str, source: str | Path) -> None:
    """Raises UserError if an id occurs twice."""
    seen: set[int | str] = set()
    for one in ids:
        if one in seen:
            raise UserError(f"{source} has two entries with the {what} {one}.", "Remove one of them.")
        seen.add(one)


def only_file(files: Sequence[Path], folder: Path, what: str) -> Path:
    """The only file of a list. Raises UserError if there are none or several."""
    if len(files) != 1:
        named = f": {', '.join(file.name for file in files[:4])}" if files else ""
        raise UserError(f"{folder} holds {len(files)} files that match {what}{named}.", "Name one file, or a split.")
    return files[0]


def listed(names: Sequence[str], last: str = "and") -> str:
    """The names as "a, b and c"."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def is_split(name: str) -> bool:
    return split_name(name) in USUAL_SPLITS


def split_name(name: str) -> str:
    return _SPLIT_NAMES.get(name, name)


def choose_split(split: str | None, known: Iterable[str], source: str | Path) -> tuple[str | None, tuple[str, ...]]:
    """The canonical split ("val" for "dev", None for all data), and the parts of the data that form it.

    "auto" is "test" of data with several usual splits, else all. Raises UserError.
    """
    known, split = list(dict.fromkeys(known)), split and split_name(split)
    if split == AUTO:
        split = "test" if len(set(known) & set(USUAL_SPLITS)) > 1 else None
    if split is None:
        return None, tuple(known)
    parts = tuple(part for part in _SPLIT_PARTS.get(split, (split,)) if part in known)
    if not parts:
        others = f"only {listed(sorted(known))}" if known else "none at all"
        what = f"{source} has no split '{split}', {others}.{nearest(split, known)}"
        raise UserError(what, "Name one of these splits." if known else "Leave the split out to use all data.")
    return split, parts
