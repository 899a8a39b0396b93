"""COCO and Flickr8k (Flickr30k alike) from their published archives: images in zips, captions in others.

Archives are files or addresses; what is fetched is kept in OUT/download/archives until the shards are there. The
images' bytes stay as they are unless --resize says otherwise. Each split becomes a corpus of its own, OUT/train, …
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from probemb.data.annotations import (
    COCO_FILE,
    SPLIT_FILE,
    TOKEN_FILE,
    Picture,
    coco_pictures,
    split_pictures,
    token_pictures,
)
from probemb.data.images import decode_image
from probemb.data.index import Shard, write_index
from probemb.data.shards import MAX_IMAGE_BYTES
from probemb.data.sources import Fetch, Remote, fetch, is_remote
from probemb.data.tar import BadSample, BadShard
from probemb.errors import UserError
from probemb.files import replace_text
from probemb.progress import progress
from probemb.runs.lock import RunLock
from tools.download_report import Outcome, print_report, totals, write_report
from tools.download_shard import GOT, STATE, Marker, Record, ShardPaths, ShardWriter, read_marker

MAX_ARCHIVE_BYTES = 64 << 30
MAX_TEXT_BYTES = 2 << 30
_COCO = "http://images.cocodataset.org"
PUBLISHED = {
    year: [
        f"{_COCO}/zips/train{year}.zip",
        f"{_COCO}/zips/val{year}.zip",
        f"{_COCO}/annotations/annotations_trainval{year}.zip",
    ]
    for year in ("2014", "2017")
}
ABSENT = "not in the archives"
TITLES = {"coco": "COCO", "flickr8k": "Flickr8k"}


@dataclass(frozen=True)
class Place:
    """Where an image lies: a file in a folder, or a member of a zip."""

    archive: str
    member: str | None
    size: int


@dataclass(frozen=True)
class Task:
    """One shard: its folder and number, the images, and how they are stored."""

    folder: Path
    number: int
    pictures: Sequence[Picture]
    places: Sequence[Place | None]
    settings: dict


def fetch_archives(corpus: str, sources: Sequence[str], given) -> int:
    """COCO or Flickr8k, from its archives to its report; `given` are the command's options."""
    if given.part or given.retry_failed or given.prepare:
        raise UserError(
            f"--part, --retry-failed and --prepare are for lists of addresses, and {corpus} comes in archives.",
            "Leave them out.",
        )
    folder = Path(given.out)
    settings = {name: getattr(given, name) for name in ("image_size", "upscale", "min_size", "quality", "shard_size")}
    settings |= {"resize": given.resize or "no", "hash": given.hash}
    sources = [
        one for word in sources for one in (PUBLISHED[word] if corpus == "coco" and word in PUBLISHED else [word])
    ]
    if not sources:
        raise UserError(
            f"No archive of {TITLES[corpus]} was named.",
            "Name its zip files or their addresses"
            + (", or 2014 for all published ones." if corpus == "coco" else "."),
        )
    _check_folder(folder, corpus, settings)
    (folder / STATE).mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder / STATE / "locks" / "whole")
    replace_text(
        folder / STATE / "state.json", json.dumps({"corpus": corpus, "settings": settings, "format": 1}) + "\n"
    )
    paths = [_fetched(one, folder / STATE / "archives") for one in sources]
    splits, images, dropped = _read(corpus, paths)
    asked = sum(map(len, splits.values())) + sum(dropped.values())
    done = {split: _write_split(folder / split, chosen, images, settings, given) for split, chosen in splits.items()}
    markers = [one for found in done.values() for one in found]
    for split, found in done.items():
        shards = [(ShardPaths(folder / split, one.shard).tar, one) for one in found if one.samples]
        if shards:
            write_index(folder / split, [Shard(path.name, path, one.samples, one.bytes) for path, one in shards])
    tars = [ShardPaths(folder / split, one.shard).tar for split, found in done.items() for one in found if one.samples]
    outcome = Outcome(TITLES[corpus], asked, dropped, markers, shards=len(markers), tars=tars, settings=settings)
    report = totals(outcome)
    report["splits"] = {split: sum(one.samples for one in found) for split, found in done.items()}
    page = write_report(folder, report, outcome)
    if given.json:
        print(json.dumps(report))
    else:
        print_report(report)
        print(", ".join(f"{split} {count:,}" for split, count in report["splits"].items()))
        print(f"wrote {page}")
    lock.release()
    if not report["got"]:
        raise UserError(
            f"None of the {asked:,} images is in the archives.",
            "Name the zip files of the images beside the captions'.",
        )
    return 0


def _check_folder(folder: Path, corpus: str, settings: dict) -> None:
    from tools.download_plan import check_same, read_state

    state = read_state(folder)
    if state is not None:
        check_same(folder, state, corpus, settings)


def _fetched(source: str, folder: Path) -> Path:
    """The archive as a file or folder here. Raises UserError."""
    if not is_remote(source):
        path = Path(source)
        if not path.exists():
            raise UserError(f"The archive {path} does not exist.", "Check the path.")
        return path
    remote = Remote(source)
    if remote.scheme not in ("http", "https"):
        raise UserError(f"{remote} is no web address.", "Name a file, a folder or an http(s) address.")
    name = Path(remote.split()[0]).name
    path = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:8]}-{name}"
    if path.exists():
        return path
    folder.mkdir(exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with progress(f"Fetching {name}", 1) as advance:
        try:
            with open(part, "w+b", buffering=0) as file:
                fetch(remote, file, None, Fetch(), MAX_ARCHIVE_BYTES)
                os.fsync(file.fileno())
            part.replace(path)
        except BadShard as error:
            raise UserError(f"{error}.", "Fetch it by other means and name the file.") from None
        finally:
            part.unlink(missing_ok=True)
        advance(1)
    return path


def _read(corpus: str, paths: Sequence[Path]) -> tuple[dict[str, list[Picture]], dict[str, Place], Counter]:
    """Images by split, where every image lies by its name, and counts of those that are dropped beforehand."""
    texts: dict[str, tuple[str, Place]] = {}
    images: dict[str, Place] = {}
    for path in paths:
        for name, place in _members(path):
            base = name.rpartition("/")[2]
            if base.lower().endswith((".jpg", ".jpeg", ".png")):
                images.setdefault(base, place)
            elif base.endswith((".json", ".txt", ".token")):
                texts.setdefault(base, (f"{path}: {name}" if place.member else str(path), place))
    if corpus == "coco":
        return _read_coco(texts, images)
    tokens = [base for base in texts if TOKEN_FILE.fullmatch(base) and "lemma" not in base]
    if len(tokens) != 1:
        raise UserError(
            f"The archives hold {len(tokens)} token files where there should be one.",
            "Name Flickr8k_text.zip or Flickr8k.token.txt, beside the images.",
        )
    label, place = texts[tokens[0]]
    pictures, bad = token_pictures(_text(place, label), label)
    lists = {
        found[1]: _text(place, label)
        for base, (label, place) in sorted(texts.items())
        if (found := SPLIT_FILE.fullmatch(base))
    }
    splits = split_pictures(pictures, lists)
    left = len(pictures) - sum(map(len, splits.values()))
    return splits, images, +Counter({"malformed row": bad, "in no split": left})


def _read_coco(texts: dict, images: dict[str, Place]) -> tuple[dict[str, list[Picture]], dict[str, Place], Counter]:
    splits: dict[str, list[Picture]] = {}
    dropped: Counter[str] = Counter()
    for base, (label, place) in sorted(texts.items()):
        found = COCO_FILE.fullmatch(base)
        if not found:
            continue
        if found[1] in splits:
            raise UserError(f"The archives hold captions of several years for {found[1]}.", "Name those of one year.")
        splits[found[1]], without = coco_pictures(_text(place, label), label)
        dropped["no caption"] += without
    if not any(splits.values()):
        raise UserError(
            "The archives hold no captions (captions_train2014.json or the like).",
            "Name annotations_trainval2014.zip beside the images.",
        )
    return splits, images, +dropped


def _members(path: Path) -> list[tuple[str, Place]]:
    """Names and places of what a zip, a folder or a single file holds. Nothing is unpacked."""
    if path.is_dir():
        found = sorted(one for one in path.rglob("*") if one.is_file())
        return [(one.relative_to(path).as_posix(), Place(str(one), None, one.stat().st_size)) for one in found]
    if path.suffix.lower() != ".zip" and not zipfile.is_zipfile(path):
        return [(path.name, Place(str(path), None, path.stat().st_size))]
    try:
        members = _archive(str(path)).infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise UserError(f"{path} is not a whole zip archive: {error}.", "Fetch it again.") from None
    return [(one.filename, Place(str(path), one.filename, one.file_size)) for one in members if not one.is_dir()]


@lru_cache(maxsize=8)
def _archive(path: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


def _text(place: Place, label: str) -> bytes:
    try:
        return _bytes(place, MAX_TEXT_BYTES)
    except BadSample as error:
        raise UserError(f"{label} is of no use: {error}.", "Fetch the archive again.") from None


def _bytes(place: Place, limit: int) -> bytes:
    """What lies there. Raises BadSample: it is larger than `limit` or than it says, or damaged."""
    if place.size > limit:
        raise BadSample(f"it has {place.size:,} bytes, more than {limit:,}")
    try:
        if place.member is None:
            with open(place.archive, "rb") as file:
                return file.read(limit)
        with _archive(place.archive).open(place.member) as file:
            data = file.read(place.size + 1)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
        raise BadSample(f"it cannot be read ({type(error).__name__})") from None
    if len(data) != place.size:
        raise BadSample("it has another size than its archive says")
    return data


def _write_split(
    folder: Path, pictures: list[Picture], images: dict[str, Place], settings: dict, given
) -> list[Marker]:
    """The shards of one split, those that are there already left alone."""
    (folder / STATE / "records").mkdir(parents=True, exist_ok=True)
    size = settings["shard_size"]
    tasks = []
    for number, first in enumerate(range(0, len(pictures), size)):
        chosen = pictures[first : first + size]
        tasks.append(Task(folder, number, chosen, [images.get(one.name) for one in chosen], settings))
    done = {task.number: read_marker(ShardPaths(folder, task.number)) for task in tasks}
    left = [task for task in tasks if done[task.number] is None or done[task.number].causes.get(ABSENT)]
    with progress(folder.name, sum(len(task.pictures) for task in left)) as advance:
        for marker in _run(left, min(given.processes, len(left))):
            done[marker.shard] = marker
            advance(sum(marker.causes.values()))
    return [done[task.number] for task in tasks]


def _run(tasks: Sequence[Task], processes: int):
    if processes <= 1:
        yield from map(write_shard, tasks)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        try:
            for job in as_completed([pool.submit(write_shard, task) for task in tasks]):
                yield job.result()
        except BrokenProcessPool:
            raise UserError(
                "A process was killed, usually for want of memory.", "Start the command again with fewer --processes."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def write_shard(task: Task) -> Marker:
    """One shard of an archive's images. Raises OSError, NotWritten."""
    writer = ShardWriter(task.folder, task.number, unique=False)
    try:
        for picture, place in zip(task.pictures, task.places):
            words = sum(len(one.split()) for one in picture.captions) // len(picture.captions)
            record = Record(picture.key, picture.name, GOT, words=words)
            if place is None:
                record.cause = ABSENT
                writer.drop(record)
                continue
            try:
                data = _bytes(place, MAX_IMAGE_BYTES)
                image = decode_image(data)
            except BadSample as error:
                record.cause, record.detail = "broken image", str(error)
                writer.drop(record)
                continue
            record.width, record.height = image.size
            if min(image.size) < task.settings["min_size"]:
                record.cause, record.detail = "too small", f"{image.width} x {image.height} pixels"
                writer.drop(record)
                continue
            record.hash = getattr(hashlib, task.settings["hash"])(data).hexdigest()
            writer.add(record, _stored(image, data, task.settings), picture.meta)
        return writer.finish(len(task.pictures))
    finally:
        writer.abandon()


def _stored(image, data: bytes, settings: dict) -> bytes:
    """The JPEG as it is, or as --resize wants it (img2dataset's policies)."""
    if settings["resize"] == "no" and data.startswith(b"\xff\xd8\xff"):
        return data
    from tools.download_fetch import Images, SafeResizer

    shape = (settings[name] for name in ("image_size", "resize", "upscale", "min_size", "quality"))
    made, *_, problem = SafeResizer(Images(*shape))(io.BytesIO(data))
    if problem:
        raise OSError(f"an image cannot be resized ({problem})")
    return made
