"""The page of `zeroshot.retrieval`: rankings, uncertainty against recall, the embeddings, extreme items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.data.failures import BadSample
from probemb.evaluation.rankings import TITLES, title_of
from probemb.evaluation.tolerance import METRICS as CHOSEN_BY
from probemb.evaluation.uncertainty import MEASURES
from probemb.reports.figures import BLUE, GREY, ORANGE, Chart
from probemb.reports.pages import thumbnail, write_page
from probemb.reports.text import number, percent, printable
from zeroshot.config import RETRIEVAL_GENERATOR
from zeroshot.reports.judgements import section
from zeroshot.reports.predictors import explain

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.data.captions.find import CaptionDataset
    from probemb.evaluation.embed_pairs import EmbeddedPairs
    from probemb.gaussian import Gaussian

METRICS = {"r@1": "R@1", "r@5": "R@5", "r@10": "R@10", "r_precision": "R-P", "map_at_r": "mAP@R"}
SHOWN = "own captions: R@1"  # the metric of bins and curves that are drawn; the table has all
BINNED = (SHOWN, "COCO 1K: R@1")  # the second as in PCME++ Fig. 3: each query within its own fold
SIDES = {"images": "Images as queries", "captions": "Captions as queries"}
MEASURED = {
    "sum": "the sum of an item's variances",
    "log-det": "the log-determinant of an item's covariance",
    "geometric-mean": "the geometric mean of an item's standard deviations",
}
ERASED = {
    "pixels": "Images, a grey square over them",
    "regions": "Images, regions left out",
    "words": "Captions, words left out",
    "ends": "Captions, their ends left out",
}


def write_report(
    file: Path, results: dict, pairs: EmbeddedPairs, captions: CaptionDataset, per_query: dict[str, dict[str, Tensor]]
) -> None:
    """Write the page; `results` is what results.json holds."""
    found, rows = results["uncertainty"], results["rows"]
    values = {
        "tables": {kind: [row for row in rows if row["positives"] == kind] for kind in _distinct(rows, "positives")},
        "how": {title_of(row): row["how"] for row in rows},
        "tolerance": [_tolerance(one) for one in results["tolerance"].values() if one["curve"]],
        "projection": _projection(results["projection"], captions, pairs, sized=bool(found)),
        "judged": section(results["judgements"]) if results["judgements"] else None,
    }
    values["generality"] = describe_generality(results["generality"]) if results["generality"] else []
    unknown = results["unknown_words"]
    values["unknown"] = describe_unknown(unknown) if unknown else None
    values["explained"] = explain(results["predictors"])
    if found:
        measure = MEASURES[results["config"]["uncertainty"]]
        shown = {side: metrics[SHOWN] for side, metrics in found["quality"].items()}
        values |= {
            "bins": _bins(found["quality"]),
            "rejection": _sides(shown, "rejection", _rejection),
            "erased": _erased(found.get("erased") or {}),
            "images": {which: _images(queries, pairs, captions, measure) for which, queries in
                       found["extremes"]["images"].items()},
            "texts": {which: _texts(queries, pairs, captions, measure) for which, queries in
                      found["extremes"]["captions"].items()},
        }  # fmt: skip
    write_page(
        file, Path(__file__).with_name("retrieval.html"), RETRIEVAL_GENERATOR, results=results,
        config=results["config"], found=found, metrics=METRICS, titles=TITLES, title_of=title_of,
        tiles=_tiles(rows), measure=MEASURED[results["config"]["uncertainty"]], **values,
    )  # fmt: skip


def describe_generality(found: dict) -> list[str]:
    """Sentences on inclusion as a measure of generality."""

    def text(one: dict) -> str:
        return f"{percent(one['value'])} % ({percent(one['low'])} to {percent(one['high'])})"

    own, nested = found["own"], found["nested"]
    chance = f"; in the caption of another image {text(own['lies_in_other'])}" if own["lies_in_other"] else ""
    lines = [f"image lies in its own caption (inclusion), of {own['pairs']:,} pairs: {text(own['lies_in'])}{chance}"]
    if nested:
        area = "{value:.3f} ({low:.3f} to {high:.3f})".format(**nested["roc_auc"])
        lines.append(
            f"caption lies in the one that is true of more images, of {nested['pairs']:,} nested pairs: "
            f"{text(nested['lies_in'])}, ROC AUC of the direction {area}"
        )
    return lines


def describe_unknown(found: dict) -> str:
    """A sentence on words that the model does not know."""
    words = ", ".join(printable(word) for word in found["words"])
    return (
        f"warning: {found['captions']:,} captions ({percent(found['share'])} %) have words that the model does not "
        f"know (such as {words}); their uncertainty says nothing about these"
    )


def _distinct(rows: Sequence[dict], key: str) -> list:
    return list(dict.fromkeys(row[key] for row in rows))


def _tiles(rows: Sequence[dict]) -> list[tuple[str, str, str]]:
    first = rows[0]
    mark = ", oracle" if first.get("chosen") == "oracle" else ""
    tiles = [
        (percent(first["i2t"]["r@1"]), f"image → text{mark}", "R@1, %"),
        (percent(first["t2i"]["r@1"]), f"text → image{mark}", "R@1, %"),
        (f"{first['rsum']:.1f}", f"both directions{mark}", "RSUM, of 600"),
    ]
    for row in (row for row in rows if row["ranking"] == first["ranking"]):
        if row["positives"] == "COCO 1K":
            tiles.append((f"{row['rsum']:.1f}", f"COCO 1K{mark}", "RSUM, of 600"))
        elif row["positives"] in ("ECCV Caption", "all true captions"):
            value = (row["i2t"]["map_at_r"] + row["t2i"]["map_at_r"]) / 2
            tiles.append((percent(value), f"{row['positives']}{mark}", "mAP@R, mean of both, %"))
    return tiles


def _tolerance(found: dict) -> dict:
    """The curve over the weight of the gallery's u, in both directions."""
    curve, what = found["curve"], CHOSEN_BY[found["metric"]]
    chart = Chart("tolerance", x_label="weight of the gallery's u", y_label=f"{what}, %")
    for way, name, colour in (("i2t", "image → text", BLUE), ("t2i", "text → image", ORANGE)):
        chart.line(curve["lambda"], [100 * y for y in curve[way]], name, colour, points=True)
    return found | {"chart": chart, "what": f"{what} of {found['positives']}"}


def _sides(shown: dict, key: str, draw: Callable[[str, dict], Chart]) -> list[tuple[str, Chart, dict]]:
    """Title, chart and numbers for images and captions as queries, if computed."""
    return [(SIDES[side], draw(side, both[key]), both[key]) for side, both in shown.items() if both[key]]


def _bins(quality: dict) -> list[tuple[str, Chart, dict]]:
    """As `_sides`, of every metric in BINNED."""
    found = []
    for name in BINNED:
        for side, metrics in quality.items():
            if name in metrics and (bins := metrics[name]["bins"]):
                of = "" if name == SHOWN else f" of {name.partition(':')[0]}"
                chart = Chart(f"recall{of.replace(' ', '-').lower()}-of-{side}", x_label=f"uncertainty of the {side}",
                              y_label=f"R@1{of}, %")  # fmt: skip
                found.append((f"{SIDES[side]}{of.replace(' of', ',')}", chart.bins(bins, side), bins))
    return found


def _rejection(side: str, curve: dict) -> Chart:
    xs, ys = [100 * x for x in curve["refused"]], [100 * y for y in curve["score"]]
    chart = Chart(f"rejection-{side}", x_label="most uncertain queries refused, %", y_label="R@1 of the others, %")
    chart.line(xs, [100 * curve["random"]] * len(xs), "random", GREY, dashed=True)
    return chart.line(xs, ys, "uncertainty", BLUE)


def _erased(erased: dict) -> list[tuple[str, Chart, dict]]:
    charts = []
    for what, values in erased.items():
        chart = Chart(f"erased-{what}", x_label=f"erased {what}, %", y_label="mean uncertainty")
        chart.line([100 * share for share in values["shares"]], values["uncertainty"], points=True)
        charts.append((ERASED[what], chart, values))
    return charts


def _projection(found: dict, captions: CaptionDataset, pairs: EmbeddedPairs, sized: bool) -> Chart:
    texts = [text for i in pairs.kept for text in captions.captions[i]]
    every = [float(u) for side in SIDES for u in found[side]["uncertainty"]]
    low, high = min(every), max(every)
    chart = Chart("means", x_label="first direction", y_label="second direction")
    for side, colour, marker in (("captions", ORANGE, "^"), ("images", BLUE, "o")):
        points = []
        for row, x, y, u in zip(*(found[side][key].tolist() for key in ("rows", "x", "y", "uncertainty"))):
            label = texts[row] if side == "captions" else captions.images.places[pairs.kept[row]].name
            size, about = (2 + 4 * (u - low) / ((high - low) or 1), f": u = {number(u)}") if sized else (3, "")
            points.append((x, y, size, f"{label[:120]}{about}"))
        chart.cloud(points, side, colour, marker)
    return chart


def _images(
    queries: Sequence[dict], pairs: EmbeddedPairs, captions: CaptionDataset, measure: Callable[[Gaussian], Tensor]
) -> list[dict]:
    """Image queries with the captions that they retrieve; green and red say whether these are the image's own."""
    u, texts, shown = measure(pairs.images), [text for i in pairs.kept for text in captions.captions[i]], []
    for query in queries:
        row = query["row"]
        found = [{"text": texts[c], "kind": _kind(pairs.owner[c] == row)} for c in query["retrieved"] if c >= 0]
        picture = _picture(row, pairs, captions, found[0]["kind"])
        about = {"u": float(u[row]), "caption": captions.captions[pairs.kept[row]][0], "retrieved": found}
        shown += [picture | about] if picture else []
    return shown


def _texts(
    queries: Sequence[dict], pairs: EmbeddedPairs, captions: CaptionDataset, measure: Callable[[Gaussian], Tensor]
) -> list[dict]:
    """Caption queries with the images that they retrieve."""
    u, texts, shown = measure(pairs.texts), [text for i in pairs.kept for text in captions.captions[i]], []
    for query in queries:
        row = query["row"]
        found = [(i, _kind(pairs.owner[row] == i)) for i in query["retrieved"] if i >= 0]
        pictures = [picture for i, kind in found if (picture := _picture(i, pairs, captions, kind))]
        shown.append({"text": texts[row], "u": float(u[row]), "kind": found[0][1], "retrieved": pictures})
    return shown


def _kind(right: Tensor) -> str:
    return "right" if bool(right) else "wrong"


def _picture(row: int, pairs: EmbeddedPairs, captions: CaptionDataset, kind: str) -> dict | None:
    i = pairs.kept[row]
    try:
        source = thumbnail(captions.images.open(i))
    except BadSample:  # the file has changed
        return None
    return {"src": source, "note": f"{captions.images.places[i].name}: {kind}", "kind": kind}
