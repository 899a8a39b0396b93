"""COCO and Flickr8k (also Flickr30k) from their published archives: images in some zips, captions in others.

Archives are files or addresses; fetched ones are stored in OUT/download/archives. Images stay byte-identical unless
--resize is given. Each split becomes a corpus of its own, OUT/train, …
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from probemb.cli.progress import progress
from probemb.data.captions.annotations import (
    COCO_FILE,
    SPLIT_FILE,
    TOKEN_FILE,
    Picture,
    coco_pictures,
    split_pictures,
    token_pictures,
)
from probemb.data.failures import BadSample
from probemb.data.images import decode_image
from probemb.data.shards.samples import MAX_IMAGE_BYTES, MAX_TEXT_BYTES
from probemb.data.workers import shorten_sockets
from probemb.errors import UserError
from probemb.files import replace_text
from probemb.pools import process_pool
from probemb.runs.lock import RunLock
from tools.download.plan import State, check_same, read_state
from tools.download.report import Outcome, publish
from tools.download.shard import GOT, STATE, Marker, Record, ShardPaths, ShardWriter, read_marker, write_shard_index
from tools.download.zips import Place, fetch_archive, members, read_bytes, read_text

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
class Task:
    """One shard: its folder and number, the images, their locations, and the settings."""

    folder: Path
    number: int
    pictures: Sequence[Picture]
    places: Sequence[Place | None]
    settings: dict


def fetch_archives(corpus: str, sources: Sequence[str], options) -> int:
    """Fetch COCO or Flickr8k and write shards, indexes and report."""
    if options.part or options.retry_failed or options.prepare:
        raise UserError(
            f"--part, --retry-failed and --prepare are for lists of addresses, and {corpus} comes in archives.",
            "Leave them out.",
        )
    folder = Path(options.out)
    settings = {name: getattr(options, name) for name in ("image_size", "upscale", "min_size", "quality", "shard_size")}
    settings |= {"resize": options.resize or "no", "hash": options.hash}
    sources = [
        one for word in sources for one in (PUBLISHED[word] if corpus == "coco" and word in PUBLISHED else [word])
    ]
    if not sources:
        raise UserError(
            f"No archive of {TITLES[corpus]} was named.",
            f"Name its zip files or their addresses{', or 2014 for all published ones' if corpus == 'coco' else ''}.",
        )
    state = read_state(folder)
    if state is not None:
        check_same(folder, state, corpus, settings)
    (folder / STATE).mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder / STATE / "locks" / "whole")
    try:
        paths = [fetch_archive(one, folder / STATE / "archives", options.patience) for one in sources]
        splits, images, dropped = _read(corpus, paths)
        sums = _sums(splits, folder, state)
        # Stored only after the archives were accepted.
        started = {"corpus": corpus, "settings": settings, "splits": sums, "format": 1}
        replace_text(folder / STATE / "state.json", json.dumps(started) + "\n")
        done = {name: _write_split(folder / name, chosen, images, settings, options) for name, chosen in splits.items()}
        asked = sum(map(len, splits.values())) + sum(dropped.values())
        markers = [one for found in done.values() for one in found]
        outcome = Outcome(
            TITLES[corpus],
            asked,
            dropped,
            markers,
            shards=len(markers),
            tars=[tar for split, found in done.items() for tar in write_shard_index(folder / split, found)],
            settings=settings,
            splits={split: sum(one.samples for one in found) for split, found in done.items()},
        )
        report = publish(folder, outcome, options.json)
    finally:
        lock.release()
    if not report["got"]:
        raise UserError(
            f"None of the {asked:,} images is in the archives.",
            "Name the zip files of the images beside those of the captions.",
        )
    return 0


def _sums(splits: dict[str, list[Picture]], folder: Path, state: State | None) -> dict[str, str]:
    """The SHA-256 of every split's images and captions. Raises UserError: the folder holds others of that split."""
    held = state.splits if state else {}
    found = {
        name: hashlib.sha256(json.dumps([[one.key, one.name, one.captions] for one in pictures]).encode()).hexdigest()
        for name, pictures in splits.items()
    }
    for name, mark in found.items():
        if held.get(name, mark) != mark:
            raise UserError(f"{folder} holds other images or captions of {name}.", "Name another folder with --out.")
    return held | found


def _read(corpus: str, paths: Sequence[Path]) -> tuple[dict[str, list[Picture]], dict[str, Place], Counter]:
    """Images by split, the location of every image by name, and counts of dropped images by cause."""
    texts: dict[str, tuple[str, Place]] = {}
    images: dict[str, Place] = {}
    for path in paths:
        for name, place in members(path):
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
    pictures, bad = token_pictures(read_text(place, label), label)
    lists = {
        found[1]: read_text(place, label)
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
        splits[found[1]], without = coco_pictures(read_text(place, label), label)
        dropped["no caption"] += without
    if not any(splits.values()):
        raise UserError(
            "The archives hold no captions, such as captions_train2014.json.",
            "Name annotations_trainval2014.zip beside the images.",
        )
    return splits, images, +dropped


def _write_split(
    folder: Path, pictures: list[Picture], images: dict[str, Place], settings: dict, options
) -> list[Marker]:
    """Write the missing shards of one split."""
    (folder / STATE / "records").mkdir(parents=True, exist_ok=True)
    size = settings["shard_size"]
    tasks = []
    for number, first in enumerate(range(0, len(pictures), size)):
        chosen = pictures[first : first + size]
        tasks.append(Task(folder, number, chosen, [images.get(one.name) for one in chosen], settings))
    done = {task.number: read_marker(ShardPaths(folder, task.number)) for task in tasks}
    left = [task for task in tasks if done[task.number] is None or done[task.number].causes.get(ABSENT)]
    with progress(folder.name, sum(len(task.pictures) for task in left)) as advance:
        for marker in _run(left, min(options.processes, len(left))):
            done[marker.shard] = marker
            advance(sum(marker.causes.values()))
    return [done[task.number] for task in tasks]


def _run(tasks: Sequence[Task], processes: int):
    if processes <= 1:
        yield from map(write_shard, tasks)
        return
    shorten_sockets()
    context = get_context("forkserver")
    context.set_forkserver_preload(["tools.download.worker"])
    with process_pool(processes, "--processes", context) as pool:
        for job in as_completed([pool.submit(write_shard, task) for task in tasks]):
            yield job.result()


def write_shard(task: Task) -> Marker:
    """Write one shard. Raises OSError, NotWritten."""
    writer = ShardWriter(task.folder, task.number, unique=False)
    try:
        for picture, place in zip(task.pictures, task.places):
            text = sum(len(one.encode()) + 1 for one in picture.captions)
            words = sum(len(one.split()) for one in picture.captions) // len(picture.captions)
            record = Record(picture.key, picture.name, GOT, words=words)
            if place is None or text > MAX_TEXT_BYTES:
                record.cause = ABSENT if place is None else "malformed row"
                writer.drop(record)
                continue
            try:
                data = read_bytes(place, MAX_IMAGE_BYTES)
                image = decode_image(data, exif=True)
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
            writer.add(record, _stored(data, task.settings), picture.captions, picture.meta)
        return writer.finish(len(task.pictures))
    finally:
        writer.abandon()


def _stored(data: bytes, settings: dict) -> bytes:
    """The JPEG unchanged, or resized as --resize says."""
    if settings["resize"] == "no" and data.startswith(b"\xff\xd8\xff"):
        return data
    from tools.download.resizing import Resizing

    made, *_, problem = Resizing(settings)(io.BytesIO(data))
    if problem:
        raise OSError(f"an image cannot be resized ({problem})")
    return made
