"""Report of a download: how many images were asked for, fetched and lost, and why; a table, JSON and a page."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from probemb.data.failures import BadSample
from probemb.data.images import decode_image
from probemb.data.shards.samples import list_samples, parse_sample, read_sample
from probemb.files import replace_text
from probemb.reports.pages import thumbnail, write_page
from tools.download.shard import ASPECTS, GOT, SIDES, STATE, WORDS, Marker

GENERATOR = "python -m tools.download"
SHOWN_PICTURES = 18


@dataclass
class Outcome:
    """Data of the report.

    Args:
        title: of the corpus.
        asked: rows of the published lists (images of the archives).
        dropped: rows that were never requested, by cause.
        markers: of the finished shards.
        retried: causes of failures that were retried, which count there.
        shards: number of planned shards.
        tars: of the finished shards.
        lists, settings: for the JSON.
        splits: samples by split, of corpora that have splits.
    """

    title: str
    asked: int
    dropped: Counter
    markers: Sequence[Marker]
    retried: Counter = field(default_factory=Counter)
    shards: int = 0
    tars: Sequence[Path] = ()
    lists: Sequence[dict] = ()
    settings: dict = field(default_factory=dict)
    splits: dict[str, int] | None = None


def publish(folder: Path, outcome: Outcome, as_json: bool, write: bool = True) -> dict:
    """Print the report as a table or JSON; with `write`, also write its files. Raises OSError."""
    report = totals(outcome)
    page = write_report(folder, report, outcome) if write else None
    if as_json:
        print(json.dumps(report))
        return report
    print_report(report)
    if page:
        print(f"wrote {page}")
    return report


def totals(outcome: Outcome) -> dict:
    """The report as plain numbers: asked = got + the sum of lost + not_asked_yet."""
    causes = sum((Counter(one.causes) for one in outcome.markers), Counter())
    causes.subtract(outcome.retried)
    got = causes.pop(GOT, 0)
    lost = +(causes + outcome.dropped)
    return {
        "generator": GENERATOR,
        "corpus": outcome.title,
        "asked": outcome.asked,
        "got": got,
        "lost": dict(lost.most_common()),
        "not_asked_yet": outcome.asked - got - sum(lost.values()),
        "retried": sum(outcome.retried.values()),
        "shards": {"finished": len(outcome.markers), "of": outcome.shards, "tars": len(outcome.tars)},
        "bytes": sum(one.bytes for one in outcome.markers),
        "shorter_side": _histogram(SIDES, [one.sides for one in outcome.markers]),
        "aspect_ratio": _histogram(ASPECTS, [one.aspects for one in outcome.markers]),
        "caption_words": _histogram(WORDS, [one.words for one in outcome.markers]),
        "lists": list(outcome.lists),
        "settings": outcome.settings,
        **({} if outcome.splits is None else {"splits": outcome.splits}),
    }


def _histogram(edges: Sequence[float], counts: Sequence[Sequence[int]]) -> dict[str, int]:
    names = [f"below {edges[0]:g}", *(f"{a:g} to {b:g}" for a, b in pairwise(edges)), f"from {edges[-1]:g}"]
    return {name: sum(one[i] for one in counts) for i, name in enumerate(names)}


def write_report(folder: Path, report: dict, outcome: Outcome) -> Path:
    """`folder/download/report.json` and `report.html`; returns the page. Raises OSError."""
    replace_text(folder / STATE / "report.json", json.dumps(report, indent=1) + "\n")
    page = folder / STATE / "report.html"
    asked, got, lost = report["asked"], report["got"], sum(report["lost"].values())
    tiles = [
        (f"{asked:,}", "asked", ""),
        (f"{got:,}", "fetched", f"{100 * got / max(asked, 1):.1f} %"),
        (f"{lost:,}", "lost", f"{100 * lost / max(asked, 1):.1f} %"),
        (_size(report["bytes"]), "size", f"in {report['shards']['tars']:,} shards"),
    ]
    if report["not_asked_yet"]:
        tiles.append((f"{report['not_asked_yet']:,}", "not asked yet", ""))
    template = Path(__file__).with_name("report.html")
    write_page(page, template, GENERATOR, report=report, tiles=tiles, pictures=_pictures(outcome.tars))
    return page


def print_report(report: dict) -> None:
    """The counts as a table on stdout."""
    from rich.console import Console
    from rich.markup import escape as plain
    from rich.table import Table

    console = Console()
    table = Table()
    table.add_column(f"{report['corpus']}")
    for name in "images", "%":
        table.add_column(name, justify="right")
    rows = [("asked", report["asked"]), ("got", report["got"])]
    rows += [(f"lost: {cause}", count) for cause, count in report["lost"].items()]
    if report["not_asked_yet"]:
        rows.append(("not asked yet", report["not_asked_yet"]))
    for name, count in rows:
        table.add_row(plain(name), f"{count:,}", f"{100 * count / max(report['asked'], 1):.1f}")
    console.print(table)
    console.print(
        f"{report['shards']['tars']:,} shards, {_size(report['bytes'])}; "
        f"{report['shards']['finished']:,} of {report['shards']['of']:,} done"
    )
    if "splits" in report:
        print(", ".join(f"{split} {count:,}" for split, count in report["splits"].items()))


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def _pictures(tars: Sequence[Path]) -> list[dict]:
    """A few random samples, always the same for the same shards."""
    draw = random.Random(len(tars))
    chosen = draw.sample(list(tars), min(3, len(tars)))
    shown = []
    for path in chosen:
        with open(path, "rb") as file:
            spans = list_samples(file)[0]
            for span in draw.sample(spans, min(SHOWN_PICTURES // len(chosen), len(spans))):
                try:
                    sample = parse_sample(read_sample(file.fileno(), span), span.key)
                    source = thumbnail(decode_image(sample.image, exif=True))
                except BadSample:  # damaged since; see `tools.shards verify`
                    continue
                shown.append({"src": source, "note": f"{span.key}: {sample.captions[0]}", "kind": ""})
    return shown
