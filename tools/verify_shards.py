"""Find damaged samples in shards by decoding everything as training does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from probemb.cli.progress import progress
from probemb.data.failures import BadShard
from probemb.data.shards.index import Shard, file_sha256
from probemb.data.shards.samples import group_members, sort_groups
from probemb.data.shards.tar import walk_tar
from probemb.errors import UserError
from probemb.pools import process_pool
from tools.repair_shards import reason_unusable, split_kind

MAX_NAMED = 1000  # damaged samples of one shard that are named; all are counted
_SHOWN = 20


@dataclass
class Verified:
    """Findings about one shard; `indexed`: samples according to the index.

    `skipped` counts file groups that are not samples, such as KEY.jpg without a caption; training ignores them.
    `halves` has the keys of those that are an image or a text alone. `damage` that keeps training from using any sample
    of the shard is also in `unusable`.
    """

    name: str
    indexed: int | None
    samples: int = 0
    bytes: int = 0
    skipped: int = 0
    damage: list[str] = field(default_factory=list)
    bad: int = 0
    bad_samples: list[dict[str, str]] = field(default_factory=list)
    sha256: str | None = None
    unusable: bool = False
    halves: dict[str, str] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Samples that training would have to replace."""
        expected = self.samples if self.indexed is None else self.indexed
        return expected if self.unusable else max(0, expected - self.samples) + self.bad


def verify_shard(path: Path, row: Shard | None, need_caption: bool = True, decode: bool = True) -> Verified:
    """Check one tar; `row`: its entry in the index; without `decode` only headers and the hash are read."""
    result = Verified(path.name, row.samples if row else None)
    try:
        result.bytes, result.sha256 = path.stat().st_size, file_sha256(path)
        if row and result.bytes != row.bytes:
            result.damage.append(f"has {result.bytes:,} bytes, but its index says {row.bytes:,}")
            result.unusable = True
        elif row and row.sha256 and row.sha256 != result.sha256:
            result.damage.append("has other content than when it was indexed (another SHA-256)")
        with open(path, "rb") as file:
            spans, others = sort_groups(group_members(walk_tar(file)))
            result.samples, result.skipped = len(spans), len(others)
            result.halves = {span.key: kind for span in others if (kind := split_kind(span))}
            _find_split_within(result, others)
            if row and len(spans) != row.samples:
                result.damage.append(f"holds {len(spans):,} samples, but its index says {row.samples:,}")
            for number, span in enumerate(spans if decode else ()):
                reason = reason_unusable(file.fileno(), span, need_caption)
                if reason is None:
                    continue
                result.bad += 1
                if len(result.bad_samples) < MAX_NAMED:
                    result.bad_samples.append({"index": number, "key": _plain(span.key), "reason": _plain(reason)})
    except BadShard as error:
        result.damage.append(_plain(str(error)).removeprefix(f"{path}: "))
        result.unusable = True
    except OSError as error:
        result.damage.append(f"cannot be read ({error.strerror})")
        result.unusable = True
    return result


def _find_split_within(result: Verified, others: Sequence) -> None:
    """Samples whose image and text are in this shard, but not one after the other."""
    kinds: dict[str, set[str]] = {}
    for span in others:
        kinds.setdefault(span.key, set()).add(split_kind(span))
    split = [key for key, found in kinds.items() if {"image", "text"} <= found]
    for key in split:
        del result.halves[key]
    if split:
        result.damage.append(_describe_split(split, "files that are not one after the other"))


def _find_split_across(results: Sequence[Verified]) -> None:
    """Samples whose image is in one shard and whose text is in another."""
    texts = {key: one for one in results for key, kind in one.halves.items() if kind == "text"}
    for one in results:
        split: dict[str, list[str]] = {}
        for key, kind in one.halves.items():
            if kind == "image" and key in texts:
                split.setdefault(texts[key].name, []).append(key)
        for name, keys in split.items():
            one.damage.append(_describe_split(keys, f"this shard and {name}"))


def _describe_split(keys: Sequence[str], where: str) -> str:
    shown = ", ".join(map(_plain, keys[:3])) + (", …" if len(keys) > 3 else "")
    return f"{len(keys):,} sample{'s are' if len(keys) > 1 else ' is'} split over {where} ({shown})"


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def verify_folder(
    paths: Sequence[Path],
    index: dict[str, Shard] | None,
    workers: int,
    need_caption: bool = True,
    decode: bool = True,
) -> list[Verified]:
    """Check all shards in `workers` processes; results sorted by name."""
    index = index or {}
    missing = index.keys() - {path.name for path in paths}
    results = [Verified(name, index[name].samples, damage=["is not there"], unusable=True) for name in missing]
    with (
        progress("Verifying shards" if decode else "Walking shards", len(paths)) as advance,
        process_pool(min(workers, len(paths)), "--workers") as pool,
    ):
        jobs = [pool.submit(verify_shard, path, index.get(path.name), need_caption, decode) for path in paths]
        for job in as_completed(jobs):
            results.append(job.result())
            advance(1)
    _find_split_across(results)
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
        "damaged": [_row(one) for one in results if one.damage or one.bad],
    }
    try:
        replace_text(path, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"The report {path} cannot be written: {error.strerror}.", "Name another file.") from None


def _row(one: Verified) -> dict:
    row = asdict(one) | {"lost": one.lost}
    del row["halves"], row["unusable"]
    return row


def read_rows(folder: Path) -> dict[str, Shard] | None:
    """The entries of index.json by name; None without one."""
    from probemb.data.shards.index import INDEX_NAME, read_index_file

    if not (folder / INDEX_NAME).exists():
        return None
    return {shard.name: shard for shard in read_index_file(folder)}


if __name__ == "__main__":
    raise SystemExit("This is not a command. Use `python -m tools.index_shards --verify`; see its --help.")
