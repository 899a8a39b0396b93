"""The page of `zeroshot.composed`: tables, R-Precision against k, ROC curves, and queries with what they found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from probemb.data.compositions.dataset import Compositions
from probemb.data.compositions.queries import KINDS, Part, Query
from probemb.data.failures import BadSample
from probemb.evaluation.composed import positives_of, ranked_by
from probemb.evaluation.embedding import EmbeddedImages
from probemb.evaluation.feasibility import SCORES, feasibility_strata, mean_roc_curve
from probemb.evaluation.uncertainty import evenly
from probemb.metrics import closest_items
from probemb.models.composers import Composer
from probemb.reports.figures import BLUE, GREEN, GREY, ORANGE, PALETTE, Chart
from probemb.reports.pages import thumbnail, write_page
from probemb.reports.text import percent
from zeroshot.crops import COMPOSED_GENERATOR
from zeroshot.questions import NAMES, Asked, feasibility_sets

EXAMPLES = 3  # of every set and kind of query
DEPTH = 6  # images shown of what a query found
SIDE = 96  # pixels of a picture's longer side
COLOURS = (BLUE, GREEN, ORANGE)


def write_report(
    file: Path, results: dict, gallery: EmbeddedImages, asked: Sequence[Asked], composer: Composer
) -> None:
    """Write the page; `results` is what results.json holds."""
    ranking = results["rows"][0]["ranking"]
    measured = [one for one in asked if one.questions.combinations != "infeasible"]
    write_page(
        file, Path(__file__).with_name("composed.html"), COMPOSED_GENERATOR, results=results, config=results["config"],
        names=NAMES, tiles=_tiles(results), by_parts=_by_parts(results["rows"], ranking),
        curves=_curves(composer, asked, results["feasibility"]), ranking=ranking,
        examples=[(one.questions, examples(gallery, one, ranking)) for one in measured],
    )  # fmt: skip


def _tiles(results: dict) -> list[tuple[str, str, str]]:
    first = results["rows"][0]
    of = f"k = {first['k']}, {first['combinations']}, %"
    shown = [(percent(first["kinds"]["all"][name]["value"]), NAMES[name], of) for name in first["metrics"]]
    if results["feasibility"]:
        row = results["feasibility"]["rows"][-len(_scores(results["feasibility"]))]
        title = row["title"].partition(",")[0]
        shown.append((percent(row["kinds"]["all"]["value"]), "AUC of feasibility", f"{title}, {row['feasible']}, %"))
    return shown


def _scores(found: dict) -> list[str]:
    return list(dict.fromkeys(row["score"] for row in found["rows"]))


def _by_parts(rows: Sequence[dict], ranking: str) -> Chart | None:
    """R-Precision against k, by kind of query, of the first set of each k; None for a single k."""
    first = {}
    for row in rows:
        if row["ranking"] == ranking:
            first.setdefault(row["k"], row["kinds"])
    if len(first) < 2:
        return None
    chart = Chart("parts", x_label="parts of a query", y_label="R-Precision, %")
    for kind, colour in zip(KINDS, COLOURS):
        ks = [k for k, kinds in first.items() if kind in kinds]
        found = [first[k][kind]["r_precision"] for k in ks]
        if ks:
            spread = [100 * one["se"] for one in found]
            chart.line(ks, [100 * one["value"] for one in found], kind, colour, points=True, spread=spread)
    return chart


def _curves(composer: Composer, asked: Sequence[Asked], found: dict | None) -> dict[str, Chart]:
    """ROC curves of the scores against infeasible combinations, of seen and unseen ones, means of kinds; MPC Fig. 5."""
    if found is None:
        return {}
    never, sets = feasibility_sets(asked)
    charts = {}
    for name, one in sets.items():
        chart = Chart(f"roc-{name}", x_label=f"{name} combinations refused, %", y_label="infeasible ones refused, %")
        chart.line([0, 100], [0, 100], "chance", GREY, dashed=True)
        scores = feasibility_strata(composer, one.found, never.found).items()
        for (score, strata), colour in zip(((score, strata) for score, strata in scores if strata), PALETTE):
            wrong, right = (100 * rates for rates in mean_roc_curve(list(strata.values())))
            auc = next(r for r in found["rows"] if (r["score"], r["feasible"]) == (score, name))["kinds"]["all"]
            title = f"{SCORES[score].title.partition(',')[0]}: {percent(auc['value'])}"
            chart.line(wrong.tolist(), right.tolist(), title, colour, notes=[""] * len(wrong))
        charts[name] = chart
    return charts


def examples(gallery: EmbeddedImages, asked: Asked, ranking: str) -> list[dict]:
    """Some queries of every kind at equal distances: their parts, and the first images of their ranking."""
    import torch

    positives = positives_of(asked.questions.data, asked.found.queries, gallery.kept)
    rows = []
    for kind in KINDS:
        answerable = zip(asked.found.queries, positives.counts.tolist())
        mine = [row for row, (query, count) in enumerate(answerable) if query.kind == kind and count]
        rows += [mine[i] for i in evenly(len(mine), EXAMPLES)]
    if not rows:
        return []
    some = asked.found.only(torch.tensor(rows))
    score = ranked_by(gallery, some, ranking, without_own=asked.changes)
    closest = closest_items(score, len(rows), len(gallery.kept), DEPTH)
    return [_example(gallery, asked.questions.data, query, top) for query, top in zip(some.queries, closest.tolist())]


def _example(gallery: EmbeddedImages, data: Compositions, query: Query, top: Sequence[int]) -> dict:
    images = [gallery.kept[place] for place in top]
    correct = set(data.targets(query.concepts).tolist())
    return {
        "kind": query.kind,
        "parts": [_part(data, part) for part in query.parts],
        "asks": data.named(query.concepts),
        "targets": len(correct & set(gallery.kept)),
        "right": sum(image in correct for image in images),
        "found": [_picture(data, image, "right" if image in correct else "wrong") for image in images],
    }


def _part(data: Compositions, part: Part) -> dict:
    if not part.is_image:
        return {"text": part.text, "src": "", "note": ""}
    try:
        picture = data.images.part(part.image, part.box)
    except BadSample:
        return {"text": f"(an image of {data.concepts[part.concept]})", "src": "", "note": ""}
    return {"text": "", "src": thumbnail(picture, SIDE), "note": data.concepts[part.concept]}


def _picture(data: Compositions, image: int, kind: str) -> dict:
    note = data.named(sorted(data.holds[image])) or data.images.places[image].name
    try:
        return {"src": thumbnail(data.images.open(image), SIDE), "kind": kind, "note": note}
    except BadSample:
        return {"src": "", "kind": kind, "note": note}
