"""Fetching a shard of addresses with img2dataset, whose parts are used as they are but for three:

- addresses are asked for within limits (`tools.download.web`),
- what comes is decoded by `probemb.data.images.decode_image` alone; img2dataset resizes and encodes the pixels,
- rows go to `ShardWriter` in place of its own writer, so that a tar is whole or not there.

Imports img2dataset, which takes seconds.
"""

from __future__ import annotations

import functools
import io
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # it would ask a server for its newest version
os.environ.setdefault("TQDM_DISABLE", "1")

import pyarrow as pa
import pyarrow.parquet as pq
from img2dataset.downloader import Downloader
from img2dataset.resizer import Resizer

from probemb.data.failures import BadSample
from probemb.data.images import decode_image
from tools.download.shard import GOT, NotWritten, Record, ShardPaths, ShardWriter
from tools.download.web import Limits, bounded

OPT_OUT = ("noai", "noimageai", "noindex", "noimageindex")
COUNT_EVERY = 1.0  # seconds between two notes of how far a shard is


@dataclass(frozen=True)
class Images:
    """How images are stored; the names are img2dataset's."""

    image_size: int
    resize_mode: str
    upscale: bool
    min_image_size: int
    encode_quality: int


class SafeResizer(Resizer):
    """img2dataset's policy, applied to pixels that `decode_image` has decoded."""

    def __init__(self, images: Images):
        super().__init__(
            image_size=images.image_size,
            resize_mode=images.resize_mode,
            resize_only_if_bigger=not images.upscale,
            min_image_size=images.min_image_size,
            encode_quality=images.encode_quality,
        )

    def __call__(self, img_stream, blurring_bbox_list=None):
        """Returns (JPEG, width, height, original width, original height, None), or the reason in the last place."""
        data = img_stream.read()
        try:
            image = decode_image(data)
        except BadSample as error:
            return None, None, None, None, None, f"{_kind(data)}|{error}"
        if min(image.size) < self.min_image_size:
            return None, None, None, None, None, f"too small|{image.width} x {image.height} pixels"
        plain = io.BytesIO()
        image.save(plain, "BMP")  # the pixels as they are
        plain.seek(0)
        *resized, problem = super().__call__(plain, blurring_bbox_list)
        return (*resized, f"cannot be resized|{problem}" if problem else None)


def _kind(data: bytes) -> str:
    """What was sent in place of an image that can be decoded."""
    start = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not start:
        return "empty answer"
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<script", b"<body")):
        return "HTML, no image"
    if start.startswith((b"\xff\xd8\xff", b"\x89png\r\n", b"riff")):
        return "broken image"
    return "no image"


class RowWriter:
    """img2dataset's protocol of a writer of samples, over `ShardWriter`."""

    def __init__(self, number, output_folder, save_caption, oom_shard_count, schema, encode_format, *, fetch):
        self.fetch, self.writer = fetch, ShardWriter(fetch.folder, number)
        fetch.writer = self.writer
        self._told = time.monotonic()

    def write(self, img_str, key, caption, meta) -> None:
        record = Record(meta["id"], meta["url"], GOT, words=len(caption.split()))
        if img_str is None:
            record.cause, _, record.detail = (meta["error_message"] or "no image|").partition("|")
            if "X-Robots-Tag" in record.cause:
                record.cause, record.detail = "opted out", record.cause
            self.writer.drop(record)
        else:
            hashed = meta[self.fetch.compute_hash]
            record.width, record.height, record.hash = meta["original_width"], meta["original_height"], hashed
            about = {
                "url": meta["url"],
                "width": meta["width"],
                "height": meta["height"],
                "original_width": meta["original_width"],
                "original_height": meta["original_height"],
                self.fetch.compute_hash: hashed,
            }
            self.writer.add(record, img_str, [caption], json.loads(meta["extra"]) | about)
        if self.writer.problem is not None:
            self.fetch.opener.stopped = True
        if time.monotonic() - self._told > COUNT_EVERY:
            self._told = time.monotonic()
            with suppress(OSError):  # only for the progress bar
                self.writer.paths.count.write_text(str(len(self.writer.records)))

    def close(self) -> None:
        self.writer.finish(self.fetch.asked)


class Fetcher(Downloader):
    """img2dataset's downloader of one shard; called with (number, path of the plan), returns (whether it worked, that).

    Args:
        folder: of the corpus.
        limits: for each address.
        threads: addresses asked at a time.
        hash: "sha256", "sha512" or "md5", of the bytes as fetched.
        user_agent: a token that is added to img2dataset's user agent, and that X-Robots-Tag may address; None: none.
        opt_out: whether images that their servers exclude (X-Robots-Tag: noai, noimageai, noindex, noimageindex) are
            left out.
    """

    def __init__(
        self,
        folder: Path,
        images: Images,
        limits: Limits,
        *,
        threads: int,
        hash: str,
        user_agent: str | None,
        opt_out: bool,
        shard_size: int,
    ):
        self.folder, self.limits = folder, limits
        super().__init__(
            sample_writer_class=None,
            resizer=SafeResizer(images),
            thread_count=threads,
            save_caption=True,
            extract_exif=False,
            output_folder=str(folder / "download" / "work"),
            column_list=["id", "extra", "caption", "url"],
            timeout=limits.patience,
            number_sample_per_shard=max(shard_size, 2),
            oom_shard_count=5,
            compute_hash=hash,
            verify_hash_type=None,
            encode_format="jpg",
            retries=0,
            user_agent_token=user_agent,
            disallowed_header_directives=list(OPT_OUT) if opt_out else None,
        )
        self.writer: ShardWriter | None = None
        self.opener = None
        self.asked = 0

    def __call__(self, row: tuple[int, str]) -> tuple[bool, tuple[int, str]]:
        paths = ShardPaths(self.folder, row[0])
        self.sample_writer_class = functools.partial(RowWriter, fetch=self)
        try:
            table = pq.read_table(row[1])
            self.asked = table.num_rows
            with pa.OSFile(str(paths.arrow), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
                out.write_table(table)
            del table
            with bounded(self.limits) as self.opener:
                self.download_shard((row[0], str(paths.arrow)))
        except (OSError, NotWritten, ValueError, pa.ArrowException) as error:
            _note(paths, error)
            return False, row
        finally:
            if self.writer is not None:
                self.writer.abandon()
            paths.count.unlink(missing_ok=True)
            paths.arrow.unlink(missing_ok=True)
            self.writer = self.opener = self.sample_writer_class = None
        paths.error.unlink(missing_ok=True)
        return True, row


def _note(paths: ShardPaths, error: Exception) -> None:
    """For the command, which may be on another machine."""
    with suppress(OSError):  # no room even for that; the command sees that the shard is not there
        paths.error.write_text(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def make_fetcher(folder: Path, given, settings: dict):
    """The downloader of the command's options."""
    images = Images(
        settings["image_size"], settings["resize"], settings["upscale"], settings["min_size"], settings["quality"]
    )
    limits = Limits(
        given.seconds, min(given.patience, given.seconds), int(given.max_mib * 2**20), given.redirects,
        given.private_hosts,
    )  # fmt: skip
    return Fetcher(
        folder.absolute(),
        images,
        limits,
        threads=given.threads,
        hash=settings["hash"],
        user_agent=given.user_agent,
        opt_out=given.respect_opt_out,
        shard_size=settings["shard_size"],
    )
