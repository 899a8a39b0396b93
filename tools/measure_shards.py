"""Measure the samples of shards for their columns: sizes of images, lengths of captions, and scores from parquet."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from probemb.cli.progress import progress
from probemb.data.failures import BadSample, BadShard
from probemb.data.shards.columns import TYPES, key_hash, score_column, write_columns
from probemb.data.shards.index import Shard
from probemb.data.shards.samples import SampleSpan, list_samples, parse_sample, read_sample
from probemb.errors import UserError
from probemb.pools import process_pool

_MOST = 65_535  # words and characters that a column can say


@dataclass(frozen=True)
class Scores:
    """Columns of parquet files that become scores.

    Args:
        names: of the columns.
        source: one parquet file for all shards; None for NAME.parquet beside each NAME.tar, as img2dataset writes.
        key: the column with the samples' keys.
    """

    names: tuple[str, ...] = ()
    source: Path | None = None
    key: str = "key"

    @property
    def columns(self) -> list[str]:
        """The names under which they are stored."""
        return [score_column(name) for name in self.names]


def measure_folder(folder: Path, shards: Sequence[Shard], scores: Scores, workers: int) -> tuple[Path, dict[str, int]]:
    """Write the columns of the shards; returns their folder, and how many samples have each score.

    Raises:
        UserError: a shard or a parquet file cannot be read, lacks a column, or no key of it occurs in the shards.
    """
    table = read_scores(scores.source, scores) if scores.names and scores.source else None
    scored = dict.fromkeys(scores.columns, 0)

    def parts(pool, advance) -> Iterator[dict[str, np.ndarray]]:
        for first in range(0, len(shards), 8 * workers):  # bounded, so that finished shards do not pile up
            for part in pool.map(measure_shard, shards[first : first + 8 * workers], own):
                if table is not None:
                    part |= join(part["key"], table)
                for name in scored:
                    scored[name] += int(np.isfinite(part[name]).sum())
                advance(1)
                yield part
        if empty := [name for name, count in scored.items() if not count]:
            raise UserError(
                f"No sample of {folder} has a score for {empty[0]}.",
                "Name the column with the samples' keys, as they are in the tars, with --score-key.",
            )

    own = [scores if table is None else Scores()] * (8 * workers)
    try:
        with (
            progress("Measuring samples", len(shards)) as advance,
            process_pool(min(workers, len(shards)), "--workers") as pool,
        ):
            path = write_columns(folder, shards, parts(pool, advance), [*TYPES, *scored])
    except OSError as error:
        raise UserError(
            f"The columns cannot be written into {folder}: {error.strerror}.", "Make the folder writable."
        ) from None
    return path, scored


def measure_shard(shard: Shard, scores: Scores) -> dict[str, np.ndarray]:
    """The columns of one shard. Raises UserError."""
    again = "Index the folder again, and see --verify."
    try:
        with open(shard.path, "rb") as file:
            spans, _ = list_samples(file)
            if len(spans) != shard.samples:
                raise UserError(f"{shard.path} holds {len(spans)} samples, its index says {shard.samples}.", again)
            rows = [measure(file.fileno(), span) for span in spans]
    except (BadShard, OSError) as error:
        raise UserError(f"{shard.path} cannot be read ({error}).", again) from None
    numbers = np.array(rows, np.int64).reshape(-1, 6)
    names = [name for name in TYPES if name != "key"]
    part = {"key": key_hash(span.key for span in spans)} | dict(zip(names, numbers.T))
    if scores.names:
        part |= join(part["key"], read_scores(shard.path.with_suffix(".parquet"), scores))
    return part


def measure(fd: int, span: SampleSpan) -> tuple[int, int, int, int, int, int]:
    """Width, height, fewest and most words, fewest and most characters; zeros for what cannot be read."""
    from PIL import Image

    try:
        sample = parse_sample(read_sample(fd, span), span.key, need_caption=None)
    except BadSample:
        return (0,) * 6
    try:
        with Image.open(io.BytesIO(sample.image)) as image:  # reads the header alone
            size = image.size
    except Exception:  # PIL raises many types for a damaged header
        size = (0, 0)
    words = [min(len(caption.split()), _MOST) for caption in sample.captions] or [0]
    chars = [min(len(caption), _MOST) for caption in sample.captions] or [0]
    return *size, min(words), max(words), min(chars), max(chars)


def read_scores(path: Path, scores: Scores) -> dict[str, np.ndarray]:
    """Hashes of the keys in "key", sorted, and the scores beside them. Raises UserError."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    if not path.is_file():
        raise UserError(
            f"There is no {path} with scores.",
            "Put NAME.parquet beside each NAME.tar, or name one file for all with --scores FILE.",
        )
    try:
        names = pq.read_schema(path).names
        if missing := [name for name in (scores.key, *scores.names) if name not in names]:
            raise UserError(
                f"{path} has no column {missing[0]}.",
                f"It has {', '.join(names[:20])}: correct --score, or --score-key for the samples' keys.",
            )
        table = pq.read_table(path, columns=[scores.key, *scores.names])
        hashes = key_hash(str(key) for key in table[scores.key].to_pylist())
        order = np.argsort(hashes, kind="stable")
        found = {"key": hashes[order]}
        for name in scores.names:
            numbers = pc.cast(table[name], pa.float32(), safe=False).to_numpy()
            found[score_column(name)] = np.asarray(numbers, np.float32)[order]
        return found
    except UserError:
        raise
    except Exception as error:  # pyarrow raises many types for a damaged file
        raise UserError(
            f"{path} cannot be read as a table of scores ({type(error).__name__}).",
            "Name a parquet file with a column of keys and numeric columns of scores.",
        ) from None


def join(keys: np.ndarray, table: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The scores of a table for these keys, NaN for those that it does not have."""
    known = table["key"]
    place = np.minimum(np.searchsorted(known, keys), max(len(known) - 1, 0))
    there = known[place] == keys if len(known) else np.zeros(len(keys), bool)
    scores = {}
    for name, numbers in table.items():
        if name != "key":
            scores[name] = np.full(len(keys), np.nan, np.float32)
            scores[name][there] = numbers[place[there]]
    return scores


if __name__ == "__main__":
    raise SystemExit("This is not a command. Use `python -m tools.index_shards --columns`; see its --help.")
