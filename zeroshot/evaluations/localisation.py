"""`python -m zeroshot.localisation`: phrases rank the proposals of their image."""

import torch
from PIL import ImageDraw

from probemb.data.boxes import (
    PhraseDataset,
    Proposals,
    enclosing,
    find_phrases,
    grid_proposals,
    read_proposals,
    read_region_proposals,
)
from probemb.data.failures import BadSample
from probemb.errors import UserError
from probemb.evaluation.localisation import KS, THRESHOLD, Localised, localise, recall_at
from probemb.evaluation.rankings import RANKINGS
from probemb.evaluation.uncertainty import evenly
from probemb.metrics.uncertainty import mean_estimates, uncertainty_bins
from probemb.models import DualEncoder
from probemb.reports import pages
from probemb.reports.pages import Card, Cell, Page, Picture, Table, thumbnail, verdict
from probemb.reports.text import number, plus_minus
from zeroshot.evaluations import runner
from zeroshot.localisation import LocalisationConfig

UNTYPED = "all"
METRICS = {f"r@{k}": f"R@{k}" for k in KS}
EXAMPLES = 24
SIDE = 240  # pixels of an example's longer side
OUTLINES = {"next": "#ffd23f", "meant": "#ffffff", "right": "#2fbf71", "wrong": "#ff5a36"}
NOTES = (
    f"Found at k: one of the first k proposals has an IoU of at least {THRESHOLD} with the phrase's box. Guessing: the "
    "first k proposals drawn at random. Upper bound: the phrases for which any proposal is right. A phrase of several "
    "types counts for each of them."
)


def evaluate(config: LocalisationConfig) -> None:
    """Find data and proposals, load the model, localise, and write the results. Raises UserError."""
    data = find_phrases(config.data, config.split, config.images, config.sample)
    if config.regions is not None:
        proposals = read_region_proposals(config.regions, data, config.top)
    elif config.proposals is None:
        proposals = grid_proposals(data, config.grid.scales, config.grid.ratios, config.grid.step)
    else:
        proposals = read_proposals(config.proposals, data, config.top)
    run = runner.start(config, "localisation")
    model = run.embedder.model
    check_inputs(model, proposals)
    rankings, options = runner.pair_rankings(config.rankings, run.embedder)
    found = localise(run.embedder, data, proposals, rankings, options, config.several)
    first = rankings[0]
    hit = recall_at(found.first_overlaps[first], 1).double()
    bins = uncertainty_bins(found.u, hit) if model.probabilistic else None
    results = {
        "probabilistic": model.probabilistic,
        "images": len(found.image.unique()),
        "phrases": len(found.rows),
        "phrases_without_box": data.without_box,
        "proposals": {"source": proposals.source, "total": proposals.total, "dropped": proposals.dropped},
        "rows": summary(found),
        "types": by_type(found, [data.phrases[row].kind or UNTYPED for row in found.rows], first),
        "uncertainty": bins,
    }
    places: dict[int, int] = {}  # a phrase of each image
    for place, row in enumerate(found.rows):
        places.setdefault(data.phrases[row].image, place)
    shown = [list(places.values())[i] for i in evenly(len(places), EXAMPLES)]
    examples = [one for place in shown for one in example(data, proposals, found, first, place, model)]
    figures = pages.bin_figure("uncertainty", bins, "phrases", "uncertainty of the phrase", "R@1, %")
    page = Page(
        "Phrase localisation",
        f"{config.model} on {config.data}: {len(data):,} images, {len(data.phrases):,} phrases, "
        f"{proposals.total / len(data):,.0f} proposals an image ({proposals.source}); {data.without_box:,} phrases "
        "without a box are left out",
        [
            ("Recall", [NOTES, *make_tables(results)]),
            ("Uncertainty", [figures]),
            ("Examples: white is meant; green or red ranked first, yellow second and third", [examples]),
        ],
    )  # fmt: skip
    run.finish(results, page, found.bad, data.split)


def check_inputs(model: DualEncoder, proposals: Proposals) -> None:
    """Refuse crops for a model that reads regions, the reverse, and regions of another width. Raises UserError."""
    shape = getattr(model.image_tower, "region_shape", None)
    reads = shape and f"regions of {shape[1]} numbers"
    has = proposals.features and f"regions of {proposals.features.shape[1]} numbers"
    if reads != has:
        raise UserError(
            f"The model reads {reads or 'pixels'}, and {proposals.source} has {has or 'crops, which are pixels'}.",
            "Name another model, or its features with --regions (`python -m tools.write_regions --proposals`).",
        )


def summary(found: Localised) -> list[dict]:
    """A row for each ranking, then guessing, then the upper bound; each metric with "value" and "se"."""
    outcomes = {
        RANKINGS[name].title: (name, {f"r@{k}": recall_at(overlaps, k) for k in KS})
        for name, overlaps in found.first_overlaps.items()
    }
    outcomes["guessing"] = (None, {f"r@{k}": found.chance[:, i] for i, k in enumerate(KS)})
    outcomes["upper bound of the proposals"] = (None, {f"r@{k}": found.best_overlap >= THRESHOLD for k in KS})
    return [
        {"ranking": name, "title": title, **mean_estimates(hits, found.image)}
        for title, (name, hits) in outcomes.items()
    ]


def by_type(found: Localised, kinds: list[str], ranking: str) -> list[dict]:
    """Recall under one ranking, guessing, upper bound and mean u for each type of phrase, frequent ones first.

    A phrase of several types, "people/clothing", counts for each.
    """
    outcomes = {f"r@{k}": recall_at(found.first_overlaps[ranking], k) for k in KS}
    outcomes |= {"guessing": found.chance[:, 0], "upper_bound": found.best_overlap >= THRESHOLD, "u": found.u}
    rows = []
    for kind in sorted({one for several in kinds for one in several.split("/")}):
        some = torch.tensor([kind in several.split("/") for several in kinds])
        rows.append({"type": kind, "phrases": int(some.sum()), **mean_estimates(outcomes, found.image, some)})
    return sorted(rows, key=lambda row: -row["phrases"])


def make_tables(results: dict) -> list[Table]:
    """Recall by ranking and by type of phrase."""
    rows: list = [(row["title"], *(plus_minus(row[name]) for name in METRICS)) for row in results["rows"]]
    rows.insert(-2, ())
    title = f"phrase localisation, {results['phrases']:,} phrases in {results['images']:,} images, percent"
    tables = [Table(("ranked by", *METRICS.values()), rows, title)]
    rows = [
        (row["type"], f"{row['phrases']:,}", *(plus_minus(row[key]) for key in (*METRICS, "guessing", "upper_bound")),
         number(row["u"]["value"]) if results["probabilistic"] else "")
        for row in results["types"]
    ]  # fmt: skip
    headings = ("type", "phrases", *METRICS.values(), "guessing", "upper bound", "mean u")
    return [*tables, Table(headings, rows, f"by type, ranked by {results['rows'][0]['title']}")]


def example(
    data: PhraseDataset, proposals: Proposals, found: Localised, ranking: str, place: int, model: DualEncoder
) -> list[Card]:
    """The picture of a phrase with its boxes drawn on it; nothing if the file has changed since."""
    phrase = data.phrases[found.rows[place]]
    try:
        picture = data.images.open(phrase.image).convert("RGB")
    except BadSample:
        return []
    width, height = data.sizes[phrase.image]
    scale = (picture.width / width, picture.height / height) * 2
    overlap = float(found.first_overlaps[ranking][place, 0])
    first = [proposals.boxes[phrase.image][i] for i in found.first[ranking][place].tolist() if i >= 0]
    boxes = [(box, "next") for box in reversed(first[1:3])] + [(box, "meant") for box in phrase.boxes]
    boxes += [(enclosing(phrase.boxes), "meant"), (first[0], verdict(overlap >= THRESHOLD))]
    draw = ImageDraw.Draw(picture)
    for box, kind in boxes:
        outline = [float(end) * by for end, by in zip(box, scale)]
        draw.rectangle(outline, outline=OUTLINES[kind], width=max(1, round(max(picture.size) / 110)))
    u = f", u = {number(float(found.u[place]))}" if model.probabilistic else ""
    about = f"{phrase.kind + ', ' if phrase.kind else ''}IoU {overlap:.2f}{u}"
    return [Card(f"“{phrase.text}”", [Picture(thumbnail(picture, SIDE), phrase.text)], [Cell(about)])]
