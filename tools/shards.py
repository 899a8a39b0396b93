"""Make, index, verify, repair and measure webdataset shards.

    python -m tools.shards make captions.csv --out data/mine      # images with captions in any form (docs/data.md)
    python -m tools.shards index data/cc3m                        # write index.json, which training needs
    python -m tools.shards verify data/cc3m --report damage.json  # decode everything; exit code 1 if it finds damage
    python -m tools.shards repair data/cc3m data/repaired         # new shards of what can be read in damaged ones
    python -m tools.shards measure data/cc3m --score similarity   # columns.npz, by which data.filter selects samples

A sample is KEY.jpg (or png, webp) and KEY.txt, KEY.json or KEY.cls, one after the other. `make` decodes every image,
keeps its bytes, and names what it leaves out; its folder appears when it is complete. The index has each shard's
samples, bytes and SHA-256; `verify` compares the shards with it and decodes them as training does. `measure` notes the
sizes of images, the lengths of captions, and scores from the parquet files beside the tars.
"""

import io
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from jsonargparse.typing import ClosedUnitInterval
from PIL import Image

from probemb.cli.command import Parser, run_command
from probemb.cli.ranges import Count, Processes
from probemb.data.captions.dataset import HELD_OUT, CaptionDataset
from probemb.data.captions.find import find_captions
from probemb.data.failures import BadSample, BadShard, escaped
from probemb.data.image_loader import Place, describe_bad, read_place, refuse_too_many
from probemb.data.images import decode_image
from probemb.data.shards.index import (
    INDEX_NAME,
    SCORE,
    TYPES,
    Shard,
    key_hash,
    read_index,
    read_index_file,
    write_columns,
    write_index,
)
from probemb.data.shards.samples import (
    CAPTIONS,
    Sample,
    SampleSpan,
    list_samples,
    parse_sample,
    read_sample,
    sort_groups,
)
from probemb.data.shards.write import copy_samples, encode_captions, write_corpus
from probemb.errors import UserError, count
from probemb.files import file_sha256, replace_text
from probemb.machine import cores
from probemb.progress import progress
from tools.pools import process_pool

SHOWN = 20  # damaged shards on the screen
Parse = Callable[..., Sample]  # `parse_sample`


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.shards", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="make|index|verify|repair|measure")
    for command in (make, index, verify, repair, measure):
        sub = commands.add_parser(command.__name__, help=command.__doc__.splitlines()[0])
        sub.set_defaults(run=command)
        what = "images with captions: a CSV, a folder, …" if command is make else "folder that holds the .tar files"
        sub.add_argument("folder", type=Path, metavar="DATA" if command is make else "FOLDER", help=what)
        sub.add_argument("--workers", type=Processes, default=min(16, cores()), help="processes (default: %(default)s)")
        if command is make:
            sub.add_argument("--out", type=Path, required=True, help="folder of the shards; of each split with --split")
            sub.add_argument("--images", type=Path, help="folder of the images, if they are not beside the table")
            sub.add_argument("--split", nargs="+", help="train, val, test, each into a folder of its own")
            sub.add_argument("--samples", type=Count, default=1000, help="in a shard (default: %(default)s)")
            sub.add_argument("--max-bad", type=ClosedUnitInterval, default=0.05, help="share that may be left out")
        if command is index:
            sub.add_argument("--skip-damaged", action="store_true", help="leave unreadable tars out of the index")
        if command in (verify, repair):
            sub.add_argument("--labelled", action="store_true", help="accept KEY.cls instead of a caption")
            about = "names of captions, as in data.captions, of which a sample needs one (default: txt, and json's)"
            sub.add_argument("--captions", nargs="+", default=CAPTIONS, metavar="NAME", help=about)
        if command is verify:
            sub.add_argument("--report", type=Path, metavar="FILE", help="write all damage as JSON")
        if command is repair:
            sub.add_argument("out", type=Path, metavar="OUT", help="folder of the new shards")
        if command is measure:
            sub.add_argument("--score", action="append", default=[], metavar="COLUMN", help="of parquet; repeatable")
            sub.add_argument("--scores", type=Path, metavar="FILE", help="for all tars (default: NAME.parquet of each)")
            sub.add_argument("--score-key", default="key", metavar="COLUMN", help="the keys there (%(default)s)")
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except OSError as error:
        what = f"{error.filename or options.folder} cannot be used: {error.strerror or error}."
        raise UserError(what, "Free some space, make it writable, or name another.") from None


@dataclass
class Report:
    """Findings about one shard; `indexed`: samples according to the index.

    `skipped` counts file groups that are no samples, such as KEY.jpg without a caption; training ignores them. `damage`
    that keeps training from using any sample of the shard is also in `unusable`.
    """

    name: str
    indexed: int | None
    samples: int = 0
    bytes: int = 0
    skipped: int = 0
    damage: list[str] = field(default_factory=list)
    bad_samples: list[dict] = field(default_factory=list)
    sha256: str | None = None
    unusable: bool = False

    @property
    def damaged(self) -> bool:
        return bool(self.damage or self.bad_samples)

    @property
    def expected(self) -> int:
        return self.samples if self.indexed is None else self.indexed

    @property
    def lost(self) -> int:
        """Samples that training would have to replace."""
        return self.expected if self.unusable else max(0, self.expected - self.samples) + len(self.bad_samples)

    @property
    def reasons(self) -> str:
        kinds: dict[str, list[str]] = {}
        for sample in self.bad_samples:
            kinds.setdefault(sample["reason"], []).append(sample["key"])
        kinds = dict(sorted(kinds.items(), key=lambda item: -len(item[1])))
        of_samples = (f"{len(keys)} x {reason} ({_some(keys)})" for reason, keys in kinds.items())
        return "; ".join([*self.damage, *of_samples])


# --------------------------------------------------------------------------------------------------------------- make


def make(options: Namespace) -> int:
    """Write images with captions, in any form of docs/data.md, as shards with an index."""
    for split in options.split or ["auto"]:
        captions = find_captions(options.folder, split, options.images, held_out=HELD_OUT)
        if captions.split and not options.split:
            raise UserError(f"{options.folder} has splits.", "Name those to write, as in --split train val test.")
        make_shards(options, captions, options.out / split if options.split else options.out)
    return 0


def make_shards(options: Namespace, captions: CaptionDataset, out: Path) -> None:
    """Write a folder of shards and its index. Raises UserError: it exists, or too many images are unusable."""
    if out.exists():
        raise UserError(f"{out} exists.", "Remove it, or choose another --out.")
    images, bad = captions.images, list(captions.images.bad)

    def samples() -> Iterator[dict[str, bytes]]:
        total, workers = len(images), options.workers
        with progress("Writing samples", total) as advance, process_pool(workers, total, "--workers") as pool:
            for first in range(0, len(images), options.samples):  # a bounded number in memory
                places = images.places[first : first + options.samples]
                for row, (ending, data) in enumerate(pool.map(read_checked, places, chunksize=8), first):
                    advance(1)
                    if ending:
                        yield {ending: data, **texts_of(captions, row)}
                    else:
                        bad.append((images.places[row].name, data))
                refuse_too_many(bad, total + len(images.bad), captions.source, options.max_bad, "--max-bad")

    written = write_corpus(out, samples(), options.samples)
    if bad:
        print(describe_bad(bad, SHOWN))
    shards = count(-(-written // options.samples), "shard")
    print(f"wrote {out}: {written:,} samples in {shards}, and {INDEX_NAME}")


def read_checked(place: Place) -> tuple[str, bytes | str]:
    """The ending and the bytes of an image that can be decoded; else "" and the reason."""
    try:
        data = read_place(place)
        decode_image(data)
    except BadSample as error:
        return "", str(error)
    return {b"\xff\xd8": "jpg", b"\x89P": "png"}.get(data[:2], "webp"), data


def texts_of(captions: CaptionDataset, row: int) -> dict[str, bytes]:
    """KEY.txt, and KEY.json with the image's name, and its ids and class if known."""
    texts, meta = captions.captions[row], {"name": captions.images.places[row].name}
    if captions.caption_ids:
        rows = [{"id": number, "caption": text} for number, text in zip(captions.caption_ids[row], texts)]
        meta |= {"image_id": captions.image_ids[row], "captions": rows}
    if captions.classes:
        meta["class"] = captions.classes[row]
    return {"txt": encode_captions(texts), "json": json.dumps(meta).encode()}


# -------------------------------------------------------------------------------------------------------------- index


def index(options: Namespace) -> int:
    """Write index.json, which training needs; nothing is decoded."""
    index_folder(options.folder, options.workers, options.skip_damaged)
    return 0


def index_folder(folder: Path, workers: int, skip_damaged: bool = False) -> None:
    """Write the index of the readable shards. Raises UserError: some are damaged, or there is no sample."""
    reports = check_folder(folder, None, workers, decode=False)
    damaged = [report for report in reports if report.damage]
    for report in damaged:
        print(f"damaged: {folder / report.name}: {'; '.join(report.damage)}", file=sys.stderr)
    if damaged and not skip_damaged:
        raise UserError(
            f"{len(damaged)} of {len(reports)} shards in {folder} are damaged; no index was written.",
            "Fetch them again, write what can be read with `tools.shards repair`, or leave them out: --skip-damaged.",
        )
    sound = [report for report in reports if not report.damage]
    if not any(report.samples for report in sound):
        remedy = "A sample is KEY.jpg (or png, webp) and KEY.txt, KEY.json or KEY.cls, one after the other."
        raise UserError(f"No shard in {folder} holds a sample.", remedy)
    shards = [Shard(report.name, folder / report.name, report.samples, report.bytes, report.sha256) for report in sound]
    path = write_index(folder, shards)
    samples, skipped, size = (sum(getattr(one, name) for one in sound) for name in ("samples", "skipped", "bytes"))
    print(f"{count(len(sound), 'shard')}, {samples:,} samples, {size:,} bytes; {skipped:,} file groups are not samples")
    print(f"wrote {path}")


def check_folder(
    folder: Path, rows: dict[str, Shard] | None, workers: int, parse: Parse = parse_sample, decode: bool = True
) -> list[Report]:
    """`check_shard` of every shard, by name; `rows`: the index. Raises UserError: there are none."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", "Name the folder that holds the .tar files.")
    paths = sorted(path for path in folder.glob("*.tar") if path.is_file() and not path.name.startswith("."))
    if not paths:
        raise UserError(f"{folder} holds no .tar files.", "Name the folder that holds the .tar files.")
    rows = rows or {}
    missing = rows.keys() - {path.name for path in paths}
    reports = [Report(name, rows[name].samples, damage=["does not exist"], unusable=True) for name in missing]
    title = "Verifying shards" if decode else "Walking shards"
    with progress(title, len(paths)) as advance, process_pool(workers, len(paths), "--workers") as pool:
        jobs = [pool.submit(check_shard, path, rows.get(path.name), parse, decode) for path in paths]
        for job in as_completed(jobs):
            reports.append(job.result())
            advance(1)
    return sorted(reports, key=lambda report: report.name)


def check_shard(path: Path, row: Shard | None = None, parse: Parse = parse_sample, decode: bool = True) -> Report:
    """Check one tar; `row`: its entry in the index; without `decode` only headers and the hash are read."""
    report = Report(path.name, row.samples if row else None)
    try:
        report.bytes, report.sha256 = path.stat().st_size, file_sha256(path)
        if row and report.bytes != row.bytes:
            report.damage.append(f"has {report.bytes:,} bytes, but its index says {row.bytes:,}")
            report.unusable = True
        elif row and row.sha256 and row.sha256 != report.sha256:
            report.damage.append("has other content than when it was indexed (another SHA-256)")
        with open(path, "rb") as file:
            spans, others = list_samples(file)
            report.samples, report.skipped = len(spans), len(others)
            if apart := [span.key for span in _together(others)]:
                shown = _some(list(map(escaped, apart)))
                report.damage.append(f"{len(apart):,} samples' files are not one after the other ({shown})")
            if row and len(spans) != row.samples:
                report.damage.append(f"holds {len(spans):,} samples, but its index says {row.samples:,}")
            for number, span in enumerate(spans if decode else ()):
                if (reason := why_unusable(file.fileno(), span, parse)) is not None:
                    bad = {"index": number, "key": escaped(span.key), "reason": escaped(reason)}
                    report.bad_samples.append(bad)
    except BadShard as error:
        report.damage.append(escaped(str(error)).removeprefix(f"{path}: "))
        report.unusable = True
        with open(path, "rb") as file:
            if whole := len(list_samples(file, salvage=True)[0]):
                report.damage.append(f"whole samples in it, which `repair` saves: {whole:,}")
    except OSError as error:
        report.damage.append(f"cannot be read ({error.strerror})")
        report.unusable = True
    return report


def _together(groups: Sequence[SampleSpan]) -> list[SampleSpan]:
    """Samples whose files are apart from each other in the tar."""
    parts: dict[str, dict] = {}
    for key, members in groups:
        parts.setdefault(key, {}).update(members)
    return sort_groups(SampleSpan(key, members) for key, members in parts.items())[0]


def why_unusable(fd: int, span: SampleSpan, parse: Parse) -> str | None:
    """Reason that training cannot use a sample; None if it can."""
    try:
        decode_image(parse(read_sample(fd, span), span.key).image)
    except BadSample as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({os.strerror(error.errno)})"
    return None


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")


# ------------------------------------------------------------------------------------------------------------- verify


def verify(options: Namespace) -> int:
    """Decode everything as training does, and report damage; exit code 1 if there is any."""
    reports = decode_folder(options)
    damaged = sorted((report for report in reports if report.damaged), key=lambda report: -report.lost)
    for report in damaged[:SHOWN]:
        print(f"{escaped(report.name)}: {report.lost:,} of {report.expected:,} samples lost: {report.reasons}")
    if len(damaged) > SHOWN:
        print(f"… and {len(damaged) - SHOWN:,} more damaged shards")
    total, lost, skipped = (sum(getattr(report, name) for report in reports) for name in ("samples", "lost", "skipped"))
    shards, bad = count(len(reports), "shard"), count(len(damaged), "shard")
    print(f"{shards}, {total:,} samples: {bad} damaged, {lost:,} samples lost", end="")
    print(f"; {skipped:,} file groups are not samples" if skipped else "")
    if not (options.folder / INDEX_NAME).exists():
        print(f"There is no index.json in {options.folder} yet.", file=sys.stderr)
    if options.report:
        content = {"folder": str(options.folder), "shards": len(reports), "samples": total, "lost": lost}
        content["damaged"] = [asdict(report) | {"lost": report.lost} for report in damaged]
        replace_text(options.report, json.dumps(content, indent=1) + "\n")
        print(f"wrote {options.report}")
    return int(bool(damaged))


def decode_folder(options: Namespace) -> list[Report]:
    """Check all shards against the index, if there is one."""
    indexed = (options.folder / INDEX_NAME).exists()
    rows = {shard.name: shard for shard in read_index_file(options.folder)} if indexed else None
    return check_folder(options.folder, rows, options.workers, parser_of(options))


def parser_of(options: Namespace) -> Parse:
    return partial(parse_sample, need_caption=not options.labelled, names=options.captions)


# ------------------------------------------------------------------------------------------------------------- repair


def repair(options: Namespace) -> int:
    """Write new shards of what can be read in the damaged ones, and their index."""
    out, written = options.out, 0
    if out.resolve() == options.folder.resolve() or any(out.glob("*.tar")):
        raise UserError(f"{out} already holds shards.", "Name a new folder for the repaired ones.")
    for report in decode_folder(options):
        path = options.folder / report.name
        if report.damaged and path.is_file():
            samples = repair_shard(path, out / report.name, parser_of(options))
            known = "" if report.indexed is None else f" of {report.indexed:,}"
            print(f"{escaped(report.name)}: {samples:,}{known} samples can be read: {report.reasons}")
            written += samples
    if written:
        index_folder(out, options.workers)
    else:
        print(f"nothing to write to {out}: no damaged shard with readable samples")
    return 0


def repair_shard(path: Path, repaired: Path, parse: Parse) -> int:
    """Write the readable samples of a shard as a new one; returns their number."""
    with open(path, "rb") as file:
        samples, others = list_samples(file, salvage=True)
        spans = [*samples, *_together(others)]
        good = [span for span in spans if why_unusable(file.fileno(), span, parse) is None]
        if good:
            copy_samples(file, good, repaired)
    return len(good)


# ------------------------------------------------------------------------------------------------------------ measure


def measure(options: Namespace) -> int:
    """Write columns.npz beside the indexed shards, by which data.filter selects samples."""
    if options.scores and not options.score:
        raise UserError("--scores needs --score.", "Name the columns: --score COLUMN.")
    folder, shards = options.folder, read_index(options.folder)
    columns = options.score_key, *options.score
    table = read_scores(options.scores, columns) if options.scores else None
    beside = columns if options.score and table is None else None
    parts, total = [], len(shards)
    with progress("Measuring samples", total) as advance, process_pool(options.workers, total, "--workers") as pool:
        for part in pool.map(measure_shard, shards, [beside] * len(shards)):
            parts.append(part | (scores_of(part["key"], table) if table is not None else {}))
            advance(1)
    measured = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for name in (SCORE + name for name in options.score):
        if not (count := np.isfinite(measured[name]).sum()):
            remedy = "Name the column with the samples' keys, as they are in the tars, with --score-key."
            raise UserError(f"No sample of {folder} has a score for {name}.", remedy)
        print(f"{name}: {count:,} of {len(measured[name]):,} samples have one")
    print(f"wrote {write_columns(folder, shards, measured)}")
    return 0


def measure_shard(shard: Shard, columns: Sequence[str] | None) -> dict[str, np.ndarray]:
    """The columns of one shard, with those of the parquet file beside it. Raises UserError."""
    again = f"Index {shard.path.parent} again, and see `python -m tools.shards verify`."
    try:
        with open(shard.path, "rb") as file:
            spans, _ = list_samples(file)
            if len(spans) != shard.samples:
                raise UserError(f"{shard.path} holds {len(spans)} samples, its index says {shard.samples}.", again)
            rows = [measure_sample(file.fileno(), span) for span in spans]
    except (BadShard, OSError) as error:
        raise UserError(f"{shard.path} cannot be read ({error}).", again) from None
    part = {"key": key_hash(span.key for span in spans)}
    part |= dict(zip([name for name in TYPES if name != "key"], np.array(rows, np.int64).reshape(-1, 6).T))
    return part | (scores_of(part["key"], read_scores(shard.path.with_suffix(".parquet"), columns)) if columns else {})


def measure_sample(fd: int, span: SampleSpan) -> tuple[int, ...]:
    """Width, height, fewest and most words, fewest and most characters; zeros for what cannot be read."""
    try:
        sample = parse_sample(read_sample(fd, span), span.key, need_caption=None)
    except BadSample:
        return (0,) * 6
    try:
        with Image.open(io.BytesIO(sample.image)) as image:  # reads the header alone
            size = image.size
    except Exception:  # PIL raises many types for a damaged header
        size = (0, 0)
    most = np.iinfo(np.uint16).max  # that a column can hold
    words = [min(len(caption.split()), most) for caption in sample.captions] or [0]
    chars = [min(len(caption), most) for caption in sample.captions] or [0]
    return *size, min(words), max(words), min(chars), max(chars)


def read_scores(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Scores of a parquet file by the hash of their key, which is the first column. Raises UserError."""
    if not path.is_file():
        remedy = "Put NAME.parquet beside each NAME.tar, or name one file for all with --scores FILE."
        raise UserError(f"There is no {path} with scores.", remedy)
    try:
        names = pq.read_schema(path).names
        if missing := [name for name in columns if name not in names]:
            remedy = f"It has {', '.join(names[:20])}: correct --score, or --score-key for the samples' keys."
            raise UserError(f"{path} has no column {missing[0]}.", remedy)
        table = pd.read_parquet(path, columns=list(columns))
        keys, scores = key_hash(table[columns[0]].astype(str)), table[list(columns[1:])].astype(np.float32)
    except (pa.ArrowException, ValueError) as error:
        remedy = "Name a parquet file with a column of keys and numeric columns of scores."
        raise UserError(f"{path} cannot be read as a table of scores ({type(error).__name__}).", remedy) from None
    scores = scores.set_index(keys).add_prefix(SCORE)
    return scores[~scores.index.duplicated()]


def scores_of(keys: np.ndarray, table: pd.DataFrame) -> dict[str, np.ndarray]:
    """The scores of a table for these keys, NaN for those that it does not have."""
    return {name: column.to_numpy() for name, column in table.reindex(keys).items()}


if __name__ == "__main__":
    run_command(main)
