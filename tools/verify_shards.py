"""Find damaged samples in shards by decoding everything as training does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from probemb.cli.progress import progress
from probemb.data.failures import BadSample, BadShard
from probemb.data.images import decode_image
from probemb.data.shards.samples import list_samples, parse_sample, read_sample
from probemb.errors import UserError
from probemb.pools import process_pool

MAX_NAMED = 1000  # damaged samples of one shard that are named; all are counted
_SHOWN = 20


@dataclass
class Verified:
    """Findings about one shard; `indexed`: samples according to the index.

    `skipped` counts file groups that are not samples, such as KEY.jpg without a caption; training ignores them.
    """

    name: str
    indexed: int | None
    samples: int = 0
    bytes: int = 0
    skipped: int = 0
    damage: list[str] = field(default_factory=list)
    bad: int = 0
    bad_samples: list[dict[str, str]] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Samples that training would have to replace."""
        expected = self.samples if self.indexed is None else self.indexed
        return max(0, expected - self.samples) + self.bad


def verify_shard(path: Path, row: tuple[int, int] | None, need_caption: bool = True, decode: bool = True) -> Verified:
    """Check one tar; `row`: its samples and bytes in the index; without `decode` only headers are read."""
    result = Verified(path.name, row[0] if row else None)
    try:
        result.bytes = path.stat().st_size
        if row and result.bytes != row[1]:
            result.damage.append(f"has {result.bytes:,} bytes, but its index says {row[1]:,}")
        with open(path, "rb") as file:
            spans, result.skipped = list_samples(file)
            result.samples = len(spans)
            if row and len(spans) != row[0]:
                result.damage.append(f"holds {len(spans):,} samples, but its index says {row[0]:,}")
            for number, span in enumerate(spans if decode else ()):
                reason = _wrong_with(file.fileno(), span, need_caption)
                if reason is None:
                    continue
                result.bad += 1
                if len(result.bad_samples) < MAX_NAMED:
                    result.bad_samples.append({"index": number, "key": _plain(span.key), "reason": reason})
    except BadShard as error:
        result.damage.append(_plain(str(error)).removeprefix(f"{path}: "))
    except OSError as error:
        result.damage.append(f"cannot be read ({error.strerror})")
    return result


def _wrong_with(fd: int, span, need_caption: bool) -> str | None:
    try:
        decode_image(parse_sample(read_sample(fd, span), span.key, need_caption).image)
    except BadSample as error:
        return _plain(str(error))
    return None


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def verify_folder(
    paths: Sequence[Path],
    index: dict[str, tuple[int, int]] | None,
    workers: int,
    need_caption: bool = True,
    decode: bool = True,
) -> list[Verified]:
    """Check all shards in `workers` processes; results sorted by name."""
    index = index or {}
    missing = index.keys() - {path.name for path in paths}
    results = [Verified(name, index[name][0], damage=["is not there"]) for name in missing]
    with (
        progress("Verifying shards" if decode else "Walking shards", len(paths)) as advance,
        process_pool(min(workers, len(paths)), "--workers") as pool,
    ):
        jobs = [pool.submit(verify_shard, path, index.get(path.name), need_caption, decode) for path in paths]
        for job in as_completed(jobs):
            results.append(job.result())
            advance(1)
    return sorted(results, key=lambda one: one.name)


def print_damage(results: Sequence[Verified]) -> None:
    """Print the damaged shards, the largest losses first."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    damaged = sorted((one for one in results if one.damage or one.bad), key=lambda one: -one.lost)
    table = Table()
    for name, justify in ("shard", "left"), ("samples", "right"), ("lost", "right"), ("what is wrong", "left"):
        table.add_column(name, justify=justify, overflow="fold")
    for one in damaged[:_SHOWN]:
        expected = one.samples if one.indexed is None else one.indexed
        table.add_row(escape(_plain(one.name)), f"{expected:,}", f"{one.lost:,}", escape("\n".join(_reasons(one))))
    console = Console()
    if damaged:
        console.print(table)
    if len(damaged) > _SHOWN:
        console.print(f"… and {len(damaged) - _SHOWN:,} more damaged shards")
    total, lost = sum(one.samples for one in results), sum(one.lost for one in results)
    left_out = sum(one.skipped for one in results)
    console.print(
        f"{len(results):,} shards, {total:,} samples: {len(damaged):,} shards damaged, {lost:,} samples lost"
        f"{f'; {left_out:,} groups of files are no samples' if left_out else ''}"
    )


def _reasons(one: Verified) -> Iterator[str]:
    yield from one.damage
    kinds: dict[str, list[str]] = {}
    for sample in one.bad_samples:
        kinds.setdefault(sample["reason"], []).append(sample["key"])
    for reason, keys in sorted(kinds.items(), key=lambda item: -len(item[1])):
        yield f"{len(keys)} x {reason}: {', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}"


def write_report(path: Path, folder: Path, results: Sequence[Verified]) -> None:
    """Write the findings as JSON. Raises UserError if the file cannot be written."""
    from probemb.files import replace_text

    report = {
        "folder": str(folder),
        "shards": len(results),
        "samples": sum(one.samples for one in results),
        "lost": sum(one.lost for one in results),
        "damaged": [asdict(one) | {"lost": one.lost} for one in results if one.damage or one.bad],
    }
    try:
        replace_text(path, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"The report {path} cannot be written: {error.strerror}.", "Name another file.") from None


def read_rows(folder: Path) -> dict[str, tuple[int, int]] | None:
    """(samples, bytes) by shard name from index.json; None without one."""
    from probemb.data.shards.index import INDEX_NAME, read_index_file

    if not (folder / INDEX_NAME).exists():
        return None
    return {shard.name: (shard.samples, shard.bytes) for shard in read_index_file(folder)}
