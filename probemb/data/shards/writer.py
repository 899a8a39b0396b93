"""Writes webdataset shards (KEY.jpg, KEY.txt, optionally KEY.json) with webdataset's own writer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from probemb.data.shards.samples import SampleSpan, read_sample
from probemb.files import replace_file

if TYPE_CHECKING:
    from webdataset import TarWriter


def tar_writer(file: BinaryIO) -> TarWriter:
    """A writer of samples {"__key__", extension: bytes}; the same samples give the same bytes."""
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
