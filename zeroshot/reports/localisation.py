"""The page of `zeroshot.localisation`: recall, uncertainty, and pictures with the boxes that were found and meant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from probemb.data.boxes import PhraseDataset
from probemb.data.boxes.geometry import Box, enclosing
from probemb.data.boxes.proposals import Proposals
from probemb.data.failures import BadSample
from probemb.evaluation.analyses.localisation import Localised
from probemb.metrics.localisation import THRESHOLD, recall_at
from probemb.reports.figures import BLUE, GREEN, GREY, ORANGE, Chart
from probemb.reports.pages import thumbnail, write_page
from probemb.reports.text import percent
from zeroshot.crops import LOCALISATION_GENERATOR

EXAMPLES = 12  # of phrases that are found, and of phrases that are not
SIDE = 240  # pixels of an example's longer side


def write_report(file: Path, results: dict, data: PhraseDataset, proposals: Proposals, found: Localised) -> None:
    """Write the page; `results` is what results.json holds."""
    ranking = next(iter(found.first))
    hit = recall_at(found.first_overlaps[ranking], 1)
    shown = {
        title: [example(data, proposals, found, ranking, row) for row in evenly(found, data, hit == right)]
        for title, right in (("Found first", True), ("Not found first", False))
    }
    write_page(
        file, Path(__file__).with_name("localisation.html"), LOCALISATION_GENERATOR, results=results,
        config=results["config"], tiles=_tiles(results), thresholds=_thresholds(results["thresholds"]),
        bins=_bins(results["uncertainty"]), threshold=THRESHOLD,
        examples={title: [one for one in some if one] for title, some in shown.items()},
    )  # fmt: skip


def _tiles(results: dict) -> list[tuple[str, str, str]]:
    first = results["rows"][0]
    bound = results["rows"][-1]["r@1"]["value"]
    tiles = [(percent(first[m]["value"]), m.upper(), f"{first['title']}, %") for m in ("r@1", "r@5", "r@10")]
    return [*tiles, (percent(bound), "upper bound", "of the proposals, %")]


def _thresholds(curves: dict) -> Chart:
    chart = Chart("iou", x_label="IoU from which a proposal is right", y_label="recall, %")
    chart.line(curves["iou"], [100 * y for y in curves["upper_bound"]], "upper bound", GREY, dashed=True)
    for name, colour in (("r@10", GREEN), ("r@5", ORANGE), ("r@1", BLUE)):
        chart.line(curves["iou"], [100 * y for y in curves[name]], name.upper(), colour)
    return chart


def _bins(bins: dict | None) -> Chart | None:
    if bins is None:
        return None
    return Chart("uncertainty", x_label="uncertainty of the phrase", y_label="R@1, %").bins(bins, "phrases")


def evenly(found: Localised, data: PhraseDataset, wanted) -> list[int]:
    """EXAMPLES places in `found` at equal distances among those wanted ((Q,) bool), each of another image."""
    places: dict[int, int] = {}
    for place in wanted.nonzero().flatten().tolist():
        places.setdefault(data.phrases[found.rows[place]].image, place)
    chosen = list(places.values())
    step = max(1, len(chosen) / EXAMPLES)
    return [chosen[int(i * step)] for i in range(min(EXAMPLES, len(chosen)))]


def example(data: PhraseDataset, proposals: Proposals, found: Localised, ranking: str, place: int) -> dict | None:
    """The picture of a phrase with its boxes, or None if the file has changed since."""
    phrase = data.phrases[found.rows[place]]
    try:
        picture = data.images.open(phrase.image)
    except BadSample:
        return None
    width, height = data.sizes[phrase.image]
    first = [i for i in found.first[ranking][place].tolist() if i >= 0]
    boxes = [rectangle(proposals.boxes[phrase.image][i], "next") for i in reversed(first[1:3])]
    boxes += [rectangle(box, "meant") for box in _meant(phrase.boxes)]
    right = float(found.first_overlaps[ranking][place, 0]) >= THRESHOLD
    boxes.append(rectangle(proposals.boxes[phrase.image][first[0]], "right" if right else "wrong"))
    return {
        "src": thumbnail(picture, SIDE),
        "width": width,
        "height": height,
        "stroke": max(width, height) / 110,
        "boxes": boxes,
        "text": phrase.text,
        "kind": phrase.kind,
        "overlap": float(found.first_overlaps[ranking][place, 0]),
        "u": float(found.u[place]),
    }


def _meant(boxes: Sequence[Box]) -> list[Box]:
    return [*boxes, enclosing(boxes)] if len(boxes) > 1 else list(boxes)


def rectangle(box: Box, kind: str) -> dict:
    """A box for the page's SVG."""
    left, top, right, bottom = box
    return {"x": left, "y": top, "width": right - left, "height": bottom - top, "kind": kind}
