"""Fetch a shard of addresses with img2dataset, three parts of which are replaced:

- requests have limits (`tools.download.web`),
- responses are decoded by `probemb.data.images.decode_image` alone (`tools.download.resizing`),
- rows go to `ShardWriter` instead of its own writer, so that a tar is written completely or not at all.

Imports img2dataset, which takes seconds.
"""

from __future__ import annotations

import functools
import json
import os
import time
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # no request for its latest version
os.environ.setdefault("TQDM_DISABLE", "1")

import pyarrow as pa
import pyarrow.parquet as pq
from img2dataset.downloader import Downloader

from tools.download.resizing import Resizing
from tools.download.shard import GOT, NotWritten, Record, ShardPaths, ShardWriter
from tools.download.web import Limits, bounded

COUNT_EVERY = 1.0  # seconds between updates of a shard's progress


class RowWriter:
    """img2dataset's sample writer protocol over `ShardWriter`."""

    def __init__(self, number, output_folder, save_caption, oom_shard_count, schema, encode_format, *, fetch):
        self.fetch, self.writer = fetch, ShardWriter(fetch.folder, number)
        fetch.writer = self.writer
        self._counted = time.monotonic()

    def write(self, img_str, key, caption, meta) -> None:
        record = Record(meta["id"], meta["url"], GOT, words=len(caption.split()))
        if img_str is None:
            record.cause, _, record.detail = (meta["error_message"] or "no image|").partition("|")
            self.writer.drop(record)
        else:
            hashed = meta[self.fetch.compute_hash]
            record.width, record.height, record.hash = meta["original_width"], meta["original_height"], hashed
            names = ("url", "width", "height", "original_width", "original_height", self.fetch.compute_hash)
            about = {name: meta[name] for name in names}
            self.writer.add(record, img_str, [caption], json.loads(meta["extra"]) | about)
        if self.writer.problem is not None:
            self.fetch.opener.stopped = True
        if time.monotonic() - self._counted > COUNT_EVERY:
            self._counted = time.monotonic()
            with suppress(OSError):  # only for the progress bar
                self.writer.paths.count.write_text(str(len(self.writer.records)))

    def close(self) -> None:
        self.writer.finish(self.fetch.asked)


class Fetcher(Downloader):
    """img2dataset's downloader of one shard; takes (number, path of the plan), returns (success, (number, path)).

    Args:
        folder: of the corpus.
        options: of the command (`Download`).
        settings: of the folder, which decide what is stored.
    """

    def __init__(self, folder: Path, options, settings: dict):
        self.folder = folder.absolute()
        self.limits = Limits(
            options.seconds,
            min(options.patience, options.seconds),
            int(options.max_mib * 2**20),
            options.redirects,
            options.private_hosts,
            ("img2dataset", str(options.user_agent).lower()) if options.respect_opt_out else (),
        )
        super().__init__(
            sample_writer_class=None,
            resizer=Resizing(settings),
            thread_count=options.threads,
            save_caption=True,
            extract_exif=False,
            output_folder=str(self.folder / "download" / "work"),
            column_list=["id", "extra", "caption", "url"],
            timeout=self.limits.patience,
            number_sample_per_shard=max(settings["shard_size"], 2),
            oom_shard_count=5,
            compute_hash=settings["hash"],
            verify_hash_type=None,
            encode_format="jpg",
            retries=0,
            user_agent_token=options.user_agent,
            disallowed_header_directives=None,  # `Limits.agents`, which also holds for redirects
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
            _save_error(paths, error)
            return False, row
        finally:
            if self.writer is not None:
                self.writer.abandon()
            paths.count.unlink(missing_ok=True)
            paths.arrow.unlink(missing_ok=True)
            self.writer = self.opener = self.sample_writer_class = None
        paths.error.unlink(missing_ok=True)
        return True, row


def _save_error(paths: ShardPaths, error: Exception) -> None:
    """Store the error for the command, which may run on another machine."""
    with suppress(OSError):  # the disk is full; the command notices that the shard is missing
        paths.error.write_text(getattr(error, "strerror", None) or str(error) or type(error).__name__)
