"""One table of several data sets: a row each, and their mean."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from probemb.cli.configuration import to_dict
from probemb.cli.named_paths import NamedPath, refuse_same_names
from probemb.cli.results import write_json
from zeroshot.config import GENERATOR, ImagenetConfig

SPLITS = ("val", "validation", "test", "train")
SHOWN = 4  # filters in the printed table; the page and the JSON have all
METRICS = ("top1", "mean_per_class_recall", "top5")


def folder_names(data: Sequence[NamedPath]) -> list[str]:
    """A name for each data set, its own or of its path, fit for a folder: "imagenet-val", "cifar-10-batches-bin".

    Raises UserError: two are given the same name.
    """
    refuse_same_names([one.name for one in data if one.name], "data")
    taken, names = {"figures"}, []
    for one in data:
        name = re.sub(r"[^\w.-]+", "-", one.name or _own_name(one.path)).strip("-.") or "data"
        distinct, number = name, 2
        while distinct in taken:
            distinct, number = f"{name}-{number}", number + 1
        taken.add(distinct)
        names.append(distinct)
    return names


def _own_name(path: str) -> str:
    place = Path(os.path.abspath(path))
    name = place.name.removesuffix(".tar").removesuffix(".bin")
    return f"{place.parent.name}-{name}" if name in SPLITS else name


def write_summary(config: ImagenetConfig, found: Sequence[tuple[str, dict]], out: Path) -> None:
    """Print the table, and write it as results.json and report.html.

    Args:
        found: name and results of each data set, all with the same filters.
    """
    from zeroshot.reports.several import write_report

    summary = {"config": to_dict(config), **summarise(found)}
    print_summary(summary)
    write_json(out / "results.json", summary, GENERATOR)
    write_report(out / "report.html", summary)
    print(f"\nwritten: {out / 'results.json'}, {out / 'report.html'}, and those of each data set in {out}", flush=True)


def summarise(found: Sequence[tuple[str, dict]]) -> dict:
    """{"data": one entry for each data set, "mean": over data sets, each counting once}."""
    data = []
    for name, results in found:
        calibration, selective = results["calibration"], results["selective"]
        data.append(
            {
                "name": name,
                "data": results["config"]["data"],
                "images": results["images"],
                "classes": results["classes"],
                "rows": results["rows"],
                "ece": None if calibration is None else calibration["ece"],
                "selective_area": selective["uncertainty"]["area"] if "uncertainty" in selective else None,
            }
        )
    rows = []
    for q, row in enumerate(data[0]["rows"]):
        same = [one["rows"][q] for one in data]
        means = {key: sum(one[key] for one in same) / len(same) for key in (*METRICS, "gain")}
        rows.append({"filter": row["filter"], "note": row["note"], **means})
    mean = {
        key: None if any(one[key] is None for one in data) else sum(one[key] for one in data) / len(data)
        for key in ("ece", "selective_area")
    }
    return {"data": data, "mean": {"rows": rows, **mean}}


def print_summary(summary: dict) -> None:
    """Print the table: top-1 of some filters, and the other metrics of `all`."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    rows = summary["mean"]["rows"]
    shown, base = _shown(rows), next(q for q, row in enumerate(rows) if row["filter"] == "all")
    table = Table(title="zero-shot accuracy, top-1 in %; per class, top-5, ECE of `all`", show_footer=True)
    table.add_column("data", "mean", overflow="fold")
    table.add_column("images", justify="right")
    table.add_column("classes", justify="right")
    for q in shown:
        note = "" if rows[q]["note"] == "zero-shot" else f"\n{rows[q]['note']}"
        table.add_column(rows[q]["filter"] + note, _percent(rows[q]["top1"]), justify="right")
    for heading, key in (("per class", "mean_per_class_recall"), ("top-5", "top5")):
        table.add_column(heading, _percent(rows[base][key]), justify="right")
    table.add_column("ECE", _percent(summary["mean"]["ece"]), justify="right")
    for one in summary["data"]:
        shares = (
            [one["rows"][q]["top1"] for q in shown] + [one["rows"][base][key] for key in METRICS[1:]] + [one["ece"]]
        )
        table.add_row(one["name"], f"{one['images']:,}", f"{one['classes']:,}", *map(_percent, shares))
    console.print(table)


def _shown(rows: Sequence[dict]) -> list[int]:
    """Indices of `single`, `all`, and then rather few-shot and zero-shot rows than oracles."""

    def rank(q: int) -> tuple[int, int]:
        first = {"single": -2, "all": -1}.get(rows[q]["filter"])
        kinds = ("few-shot", "zero-shot", "unlabelled", "transductive", "oracle")
        return next(
            k for k, kind in enumerate(kinds) if rows[q]["note"].startswith(kind)
        ) if first is None else first, q

    return sorted(sorted(range(len(rows)), key=rank)[:SHOWN])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"
