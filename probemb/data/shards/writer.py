"""Writes webdataset shards (KEY.jpg, KEY.txt, optionally KEY.json) with webdataset's own writer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from webdataset import TarWriter


def tar_writer(file: BinaryIO) -> TarWriter:
    """A writer of samples {"__key__", extension: bytes}; the same samples give the same bytes."""
    from webdataset import TarWriter  # which imports torch

    return TarWriter(file, encoder=False, user="", group="", mode=0o644, mtime=0)


def encode_captions(captions: Iterable[str]) -> bytes:
    """The content of KEY.txt: one caption per line; line breaks inside a caption become blanks."""
    return "\n".join(" ".join(caption.split()) for caption in captions).encode("utf-8", "replace")
