"""Write shards: tars of samples, and whole folders of them."""

from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from webdataset import TarWriter

from probemb.data.shards.index import Shard, write_index
from probemb.data.shards.samples import SampleSpan, read_sample
from probemb.files import file_sha256, replace_file
from probemb.runs.lock import new_folder


def tar_writer(file: BinaryIO):
    """webdataset's TarWriter of samples {"__key__", extension: bytes}; the same samples give the same bytes."""
    return TarWriter(file, encoder=False, user="", group="", mode=0o644, mtime=0)


def write_corpus(folder: Path, samples: Iterable[dict[str, bytes]], size: int) -> int:
    """Write samples {extension: bytes} as tars of `size` samples, and the index, into a new folder, which appears when
    it is complete; returns their number. Raises OSError, and whatever `samples` raises.
    """
    rest, shards, count = iter(samples), [], 0
    with new_folder(folder) as aside:
        for first in rest:
            path, before = aside / f"{len(shards):05d}.tar", count
            with open(path, "wb") as file, tar_writer(file) as tar:
                for sample in chain([first], islice(rest, size - 1)):
                    tar.write({"__key__": f"{count:08d}", **sample})
                    count += 1
            shards.append(Shard(path.name, path, count - before, path.stat().st_size, file_sha256(path)))
        write_index(aside, shards)
    return count


def copy_samples(shard: BinaryIO, spans: Iterable[SampleSpan], path: Path) -> None:
    def write(aside: Path) -> None:
        with open(aside, "wb") as file, tar_writer(file) as tar:
            for span in spans:
                tar.write({"__key__": span.key, **read_sample(shard.fileno(), span)})

    replace_file(path, write)


def encode_captions(captions: Iterable[str]) -> bytes:
    """The content of KEY.txt: one caption per line; line breaks inside a caption become blanks."""
    return "\n".join(" ".join(caption.split()) for caption in captions).encode("utf-8", "replace")
