"""The page of `zeroshot.union`: uncertainty against area, both tables, and some triplets."""

from __future__ import annotations

from pathlib import Path

from probemb.data.boxes import PhraseDataset
from probemb.data.failures import BadSample
from probemb.evaluation.analyses.localisation import crop
from probemb.evaluation.analyses.unions import ITEMS, SIDES, TASKS, EmbeddedTriplets
from probemb.evaluation.uncertainty import MEASURES, evenly
from probemb.reports.figures import BLUE, GREEN, ORANGE, Chart
from probemb.reports.pages import thumbnail, write_page
from probemb.reports.text import number, percent
from zeroshot.crops import UNION_GENERATOR

EXAMPLES = 12
SIDE = 150  # pixels of an example's longer side
DIGITS = {"sum": 3, "log-det": 2, "geometric-mean": 4}  # behind the point, of each measure
NAMES = {"sum": "sum", "log-det": "log det", "geometric-mean": "σ"}
COLOURS = {"A": BLUE, "B": GREEN, "C": ORANGE}


def write_report(file: Path, results: dict, data: PhraseDataset, found: dict[float, EmbeddedTriplets]) -> None:
    """Write the page; `results` is what results.json holds."""
    probabilistic = results["probabilistic"]
    charts = {side: _uncertainty(results["areas"], side) for side in SIDES} if probabilistic else {}
    largest = list(found.values())[-1]
    examples = [_example(data, largest, row, probabilistic) for row in evenly(len(largest.triplets), EXAMPLES)]
    write_page(
        file, Path(__file__).with_name("union.html"), UNION_GENERATOR, results=results, config=results["config"],
        charts=charts, measures=list(MEASURES), digits=DIGITS, names=NAMES, items=ITEMS, sides=SIDES, tasks=list(TASKS),
        tiles=_tiles(results), examples=[one for one in examples if one],
    )  # fmt: skip


def _tiles(results: dict) -> list[tuple[str, str, str]]:
    row = results["areas"][-1]
    best, area = row["selection"][0], f"at {row['area']:.0%}"
    tiles = [(percent(best["mean"]["value"]), f"binary selection, {best['title']}", f"% of four tasks, {area}")]
    if row["uncertainty"]:
        u = row["uncertainty"]["log-det"]
        tiles.append((percent(u["images"]["larger"]["value"]), "unions more uncertain as images", f"%, {area}"))
        fewer = 1 - u["captions"]["larger"]["value"]
        tiles.append((percent(fewer), "unions less uncertain as captions", f"%, {area}"))
    return tiles


def _uncertainty(areas: list[dict], side: str) -> Chart:
    """Mean log det of A, B and C against the area; probabilistic VSE++, Fig. 2."""
    chart = Chart(side, x_label="largest area of a crop, % of the image", y_label="log det Σ, mean")
    for item, colour in COLOURS.items():
        values = [row["uncertainty"]["log-det"][side][item] for row in areas]
        chart.line(
            [100 * row["area"] for row in areas], [one["value"] for one in values], item, colour, points=True,
            spread=[one["se"] or 0.0 for one in values],
        )  # fmt: skip
    return chart


def _example(data: PhraseDataset, found: EmbeddedTriplets, row: int, probabilistic: bool) -> list[dict] | None:
    """Picture, caption and uncertainty of A, B and C; None if the file has changed."""
    triplet = found.triplets[row]
    try:
        picture = data.images.open(triplet.image)
    except BadSample:
        return None
    scale = tuple(a / b for a, b in zip(picture.size, data.sizes[triplet.image]))
    shown = []
    for item, box, caption in zip(ITEMS, triplet.boxes, triplet.captions):
        u = [number(float(getattr(found, side)[item][row].log_det().mean())) for side in SIDES] if probabilistic else []
        shown.append({"item": item, "src": thumbnail(crop(picture, box, scale), SIDE), "caption": caption, "u": u})
    return shown
