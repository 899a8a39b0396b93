"""One finished shard: a tar of KEY.jpg, KEY.txt and KEY.json, a record of every row, and a done-marker.

    OUT/00012.tar                        complete or absent
    OUT/download/records/00012.parquet   a row per requested image: key, url, cause, detail, sizes, hash
    OUT/download/records/00012.json      written last: counts by cause, histograms, samples and bytes of the tar

A shard without its marker is fetched again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from probemb.data.shards.index import Shard, file_sha256, write_index
from probemb.data.shards.samples import list_samples, read_sample
from probemb.data.shards.writer import encode_captions, tar_writer
from probemb.files import flush, replace_file, replace_text

STATE = "download"  # the folder in OUT for everything but the shards
GOT, DUPLICATE = "got", "duplicate image"
NAME_DIGITS = 5

SIDES = (64, 128, 256, 384, 512, 768, 1024, 2048)  # pixels of the shorter side as fetched
ASPECTS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0)  # longer side / shorter side
WORDS = (2, 4, 8, 12, 16, 24, 32, 64)  # of a caption


class NotWritten(Exception):
    """A shard that could not be finished; the message is the reason."""


@dataclass
class Record:
    """The outcome of one row. `cause` is GOT, DUPLICATE or the reason why there is no image."""

    key: str
    url: str
    cause: str
    detail: str = ""
    width: int = 0  # as fetched
    height: int = 0
    bytes: int = 0  # as stored
    hash: str = ""  # of the bytes as fetched
    words: int = 0


@dataclass
class Marker:
    """Summary of a finished shard: `samples` and `bytes` of its tar (0, 0 if there is none), sums over its records.

    sha256: of the tar; None if there is none, or in markers of older versions.
    """

    shard: int
    samples: int = 0
    bytes: int = 0
    sha256: str | None = None
    causes: dict[str, int] = field(default_factory=dict)
    sides: list[int] = field(default_factory=lambda: [0] * (len(SIDES) + 1))
    aspects: list[int] = field(default_factory=lambda: [0] * (len(ASPECTS) + 1))
    words: list[int] = field(default_factory=lambda: [0] * (len(WORDS) + 1))


class ShardPaths:
    """Paths of the files of shard `number` of the corpus in `folder`."""

    def __init__(self, folder: Path, number: int):
        name = f"{number:0{NAME_DIGITS}d}"
        self.tar = folder / f"{name}.tar"
        self.part = folder / f".{name}.tar.part"
        self.records = folder / STATE / "records" / f"{name}.parquet"
        self.marker = folder / STATE / "records" / f"{name}.json"
        self.error = folder / STATE / "records" / f"{name}.error"
        self.count = folder / STATE / "records" / f"{name}.count"
        self.plan = folder / STATE / "plan" / f"{name}.parquet"
        self.arrow = folder / STATE / "work" / f"{name}.arrow"


class ShardWriter:
    """Writes one shard: `add` or `drop` every row, then `finish`, which raises any error.

    With `unique`, an image whose hash was seen in this shard before is dropped.
    """

    def __init__(self, folder: Path, number: int, unique: bool = True):
        self.unique = unique
        self.paths, self.number = ShardPaths(folder, number), number
        self.records: list[Record] = []
        self.problem: Exception | None = None
        self._hashes: set[str] = set()
        self._file = open(self.paths.part, "wb")  # noqa: SIM115
        self._tar = tar_writer(self._file)

    def add(self, record: Record, image: bytes, captions: Sequence[str], meta: dict) -> None:
        """A fetched image: its encoded bytes, its captions (KEY.txt), and the content of KEY.json if any."""
        if self.unique and record.hash in self._hashes:
            record.cause = DUPLICATE
        else:
            self._hashes.add(record.hash)
            record.bytes = len(image)
            sample = {"__key__": record.key, "jpg": image, "txt": encode_captions(captions)}
            if meta:
                sample["json"] = json.dumps(meta, ensure_ascii=False).encode("utf-8", "replace")
            if self.problem is None:
                try:
                    self._tar.write(sample)
                except (OSError, ValueError) as error:  # a full disk is reported once, by finish()
                    self.problem = error
        self.records.append(record)

    def drop(self, record: Record) -> None:
        """Record a row without an image."""
        self.records.append(record)

    def finish(self, asked: int | None = None) -> Marker:
        """Close the tar, verify it, move it into place, and write the marker.

        Raises:
            NotWritten: rows are missing (of `asked`), or the tar does not read back.
            OSError: from writing.
        """
        from tools.shards import check_shard

        try:
            if self.problem is not None:
                raise self.problem
            if asked is not None and len(self.records) != asked:
                raise NotWritten(f"{asked - len(self.records)} of {asked} rows were lost")
            self._tar.close()
            self._file.flush()
            self._file.close()
            got = sum(record.cause == GOT for record in self.records)
            seen = check_shard(self.paths.part, None)
            if seen.samples != got or seen.bad or seen.damage:
                first = (seen.damage or [one["reason"] for one in seen.bad_samples] or ["samples are missing"])[0]
                raise NotWritten(f"the shard does not read back: {first}")
            flush(self.paths.part)
        except BaseException:
            self.abandon()
            raise
        if got:
            self.paths.part.replace(self.paths.tar)
            flush(self.paths.tar.parent)
            marker = Marker(self.number, got, seen.bytes, seen.sha256)
        else:
            self.paths.part.unlink()
            marker = Marker(self.number)
        return write_records(self.paths, marker, self.records)

    def abandon(self) -> None:
        """Remove the unfinished tar."""
        with suppress(OSError, ValueError):  # no room for buffered data, or already closed
            self._tar.close()
        with suppress(OSError):
            self._file.close()
        self.paths.part.unlink(missing_ok=True)


def write_records(paths: ShardPaths, marker: Marker, records: Sequence[Record]) -> Marker:
    """Write the records, then the marker with sums over them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: [getattr(one, name) for one in records] for name in Record.__dataclass_fields__}, _schema())
    replace_file(paths.records, lambda aside: pq.write_table(table, aside, compression="zstd"))
    summarise(marker, records)
    replace_text(paths.marker, json.dumps(vars(marker)) + "\n")
    return marker


def summarise(marker: Marker, records: Sequence[Record]) -> None:
    """Fill in counts by cause, and histograms of the fetched images."""
    marker.causes = dict(Counter(one.cause for one in records).most_common())
    for one in records:
        if one.cause == GOT:
            short, long = sorted((one.width, one.height))
            marker.sides[_bin(short, SIDES)] += 1
            marker.aspects[_bin(long / max(short, 1), ASPECTS)] += 1
            marker.words[_bin(one.words, WORDS)] += 1


def _bin(value: float, edges: Sequence[float]) -> int:
    """Bin i holds the values below edges[i] and not below edges[i - 1]."""
    return next((i for i, edge in enumerate(edges) if value < edge), len(edges))


def _schema():
    import pyarrow as pa

    kinds = {"str": pa.string(), "int": pa.int64()}
    return pa.schema([(name, kinds[field.type]) for name, field in Record.__dataclass_fields__.items()])


def read_records(paths: ShardPaths, columns: Sequence[str] | None = None) -> list[dict]:
    """Rows of a finished shard."""
    import pyarrow.parquet as pq

    return pq.read_table(paths.records, columns=columns).to_pylist()


def read_marker(paths: ShardPaths) -> Marker | None:
    """The marker of a finished shard; None if it is not finished or its tar has changed."""
    try:
        content = json.loads(paths.marker.read_text(encoding="utf-8"))
        marker = Marker(**content)
        size = paths.tar.stat().st_size if marker.samples else 0
    except (OSError, ValueError, TypeError):
        return None
    return marker if size == marker.bytes else None


def write_shard_index(folder: Path, markers: Sequence[Marker]) -> list[Path]:
    """Write the index of the shards that hold samples; returns their paths (none: no index). Raises OSError."""
    rows = []
    for one in markers:
        if one.samples:
            path = ShardPaths(folder, one.shard).tar
            rows.append(Shard(path.name, path, one.samples, one.bytes, one.sha256))
    if rows:
        write_index(folder, rows)
    return [row.path for row in rows]


def drop_duplicates(folder: Path, shards: int) -> int:
    """Remove every image whose hash an earlier shard has; affected shards are rewritten one at a time.

    Returns the number of removed images. Raises OSError.
    """
    import numpy as np
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    hashes, owners = [], []
    for number in range(shards):
        table = pq.read_table(ShardPaths(folder, number).records, columns=["cause", "hash"])
        found = table.filter(pc.equal(table["cause"], GOT))["hash"].to_pylist()
        hashes.append(np.array([int(one[:16], 16) for one in found], np.uint64))
        owners.append(np.full(len(found), number, np.int32))
    if not hashes:
        return 0
    hash_N, owner_N = np.concatenate(hashes), np.concatenate(owners)
    order = np.argsort(hash_N, kind="stable")  # equal ones stay in the order of their shards
    again = np.zeros(len(order), bool)
    again[order[1:]] = hash_N[order[1:]] == hash_N[order[:-1]]
    for number in np.unique(owner_N[again]).tolist():
        paths = ShardPaths(folder, number)
        table = pq.read_table(paths.records, columns=["key", "cause"])
        keys = table.filter(pc.equal(table["cause"], GOT))["key"].to_pylist()
        drop = [key for key, twice in zip(keys, again[owner_N == number]) if twice]
        _remove_samples(folder, number, drop)
    return int(again.sum())


def _remove_samples(folder: Path, number: int, keys: Collection[str]) -> Marker:
    """Remove duplicates from a finished shard; the tar is replaced atomically. Raises OSError."""
    paths, keys = ShardPaths(folder, number), set(keys)
    try:
        kept = _copy_without(paths, keys)
    except BaseException:
        paths.part.unlink(missing_ok=True)
        raise
    marker = Marker(number, kept, paths.part.stat().st_size, file_sha256(paths.part)) if kept else Marker(number)
    records = [Record(**row) for row in read_records(paths)]
    for record in records:
        if record.key in keys and record.cause == GOT:
            record.cause, record.bytes = DUPLICATE, 0
    paths.marker.unlink()  # until the new one is there, the shard does not count as finished
    if kept:
        paths.part.replace(paths.tar)
    else:
        paths.part.unlink()
        paths.tar.unlink()
    return write_records(paths, marker, records)


def _copy_without(paths: ShardPaths, keys: set[str]) -> int:
    """The tar without the samples `keys`, written beside it; returns how many are left."""
    kept = 0
    with open(paths.tar, "rb") as file, open(paths.part, "wb") as part, tar_writer(part) as tar:
        for span in list_samples(file)[0]:
            if span.key not in keys:
                kept += 1
                tar.write({"__key__": span.key, **read_sample(file.fileno(), span)})
    flush(paths.part)
    return kept
