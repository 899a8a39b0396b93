"""`python -m zeroshot.localisation`: phrases rank the proposals of their image."""

from __future__ import annotations

from dataclasses import asdict

import torch
from PIL import ImageDraw

from probemb.data.boxes import PhraseDataset, find_phrases
from probemb.data.boxes.geometry import enclosing
from probemb.data.boxes.proposals import Proposals, grid_proposals, read_proposals, read_region_proposals
from probemb.data.failures import BadSample
from probemb.errors import UserError
from probemb.evaluation.analyses.localisation import Localised, localise
from probemb.evaluation.predictors import assess
from probemb.evaluation.rankings import TITLES, fitting
from probemb.evaluation.uncertainty import evenly
from probemb.metrics import uncertainty_bins
from probemb.metrics.localisation import KS, THRESHOLD, recall_at, summarise
from probemb.models import DualEncoder
from probemb.reports.figures import Chart
from probemb.reports.pages import Card, Cell, Figure, Page, Picture, Table, thumbnail, verdict
from probemb.reports.text import correlations, number, percent, plus_minus
from zeroshot.evaluations.runner import claim, finish, left_out, open_model, pair_options, pair_rankings, settings
from zeroshot.localisation import LocalisationConfig

UNTYPED = "all"
WRITE = "python -m tools.write_regions --proposals"
METRICS = {f"r@{k}": f"R@{k}" for k in KS}
EXAMPLES = 12  # of phrases that are found, and of phrases that are not
SIDE = 240  # pixels of an example's longer side
OUTLINES = {"next": "#ffd23f", "meant": "#ffffff", "right": "#2fbf71", "wrong": "#ff5a36"}


def evaluate(config: LocalisationConfig) -> None:
    """Find data and proposals, load the model, localise, and write the results. Raises UserError."""
    rankings = pair_rankings(config.rankings)
    data = find_phrases(config.data, config.split, config.images, config.sample)
    if config.regions is not None:
        proposals = read_region_proposals(config.regions, data, config.top)
    elif config.proposals is None:
        proposals = grid_proposals(data, config.grid.scales, config.grid.ratios, config.grid.step)
    else:
        proposals = read_proposals(config.proposals, data, config.top)
    out = claim(config, "localisation")
    embedder = open_model(config)
    model, device = embedder.model, embedder.device
    check_inputs(model, proposals)
    own = dict.fromkeys([model.ranking, *(["mean"] if model.n_embeddings == 1 else [])])
    rankings = fitting(rankings or list(own), model, bool(rankings))
    about = (
        f"{len(data):,} images, {len(data.phrases):,} phrases, {proposals.total / len(data):,.0f} proposals an image "
        f"({proposals.source})"
    )
    print(f"{about}, on {device.name} in {device.precision}", flush=True)
    options = pair_options(embedder, config.samples)
    found = localise(embedder, data, proposals, rankings, options, config.several)
    first = next(iter(found.first_overlaps))
    hit = recall_at(found.first_overlaps[first], 1).double()
    bins = uncertainty_bins(found.u, hit) if model.probabilistic else None
    results = {
        **settings(config, embedder, data.split),
        "probabilistic": model.probabilistic,
        "images": len(found.image.unique()),
        "images_left_out": left_out(found.bad),
        "phrases": len(found.rows),
        "phrases_without_box": data.without_box,
        "proposals": {"source": proposals.source, "total": proposals.total, "dropped": proposals.dropped},
        "rows": summary(found),
        "types": by_type(found, [data.phrases[row].kind or UNTYPED for row in found.rows], first),
        "uncertainty": asdict(bins) if bins else None,
        "predictors": assess(found.scores, hit, found.image),
    }
    tables = make_tables(results)
    examples = []
    for title, right in (("Found first:", True), ("Not found first:", False)):
        places: dict[int, int] = {}  # the first phrase of each image
        for place in (hit == right).nonzero().flatten().tolist():
            places.setdefault(data.phrases[found.rows[place]].image, place)
        shown = [list(places.values())[i] for i in evenly(len(places), EXAMPLES)]
        cards = [example(data, proposals, found, first, place, results) for place in shown]
        examples += [title, [one for one in cards if one]]
    page = Page("Phrase localisation", f"{config.model} on {config.data}: {about}", sections(results, tables, examples))
    finish(out, "localisation", results, page, tables)


def check_inputs(model: DualEncoder, proposals: Proposals) -> None:
    """Refuse crops for a model that reads regions, the reverse, and regions of another width. Raises UserError."""
    wanted = getattr(model.image_tower, "region_shape", None)
    given = proposals.features and proposals.features.shape
    if wanted is None and given is not None:
        what, remedy = "pixels", "Leave --regions out, or name a model that reads regions."
    elif wanted is not None and (given is None or wanted[1] != given[1]):
        what = f"regions of {wanted[1]} numbers"
        remedy = f"Name such features of the proposals with --regions; `{WRITE}` writes them."
    else:
        return
    has = "crops of images, which are pixels" if given is None else f"regions of {given[1]} numbers"
    raise UserError(f"The model reads {what}, and {proposals.source} has {has}.", remedy)


def summary(found: Localised) -> list[dict]:
    """A row for each ranking, then guessing, then the upper bound; each metric with "value" and "se"."""
    outcomes = {
        TITLES[name]: (name, {f"r@{k}": recall_at(overlaps, k) for k in KS})
        for name, overlaps in found.first_overlaps.items()
    }
    outcomes["guessing"] = (None, {f"r@{k}": found.chance[:, i] for i, k in enumerate(KS)})
    outcomes["upper bound of the proposals"] = (None, {f"r@{k}": found.best_overlap >= THRESHOLD for k in KS})
    return [
        {"ranking": name, "title": title, **summarise(hits, found.image)} for title, (name, hits) in outcomes.items()
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
        rows.append({"type": kind, "phrases": int(some.sum()), **summarise(outcomes, found.image, some)})
    return sorted(rows, key=lambda row: -row["phrases"])


# ----------------------------------------------------------------------------------------------------------- output


def make_tables(results: dict) -> list[Table]:
    """Recall by ranking and by type of phrase, and what each score of a phrase knows."""
    rows: list = [(row["title"], *(plus_minus(row[name]) for name in METRICS)) for row in results["rows"]]
    rows.insert(-2, ())
    title = f"phrase localisation, {results['phrases']:,} phrases in {results['images']:,} images, percent"
    tables = [Table(("ranked by", *METRICS.values()), rows, title)]
    rows = [
        (row["type"], f"{row['phrases']:,}", *(plus_minus(row[key]) for key in (*METRICS, "guessing", "upper_bound")),
         *([number(row["u"]["value"])] if results["probabilistic"] else []))
        for row in results["types"]
    ]  # fmt: skip
    headings = ("type", "phrases", *METRICS.values(), "guessing", "upper bound")
    headings = (*headings, "mean u") if results["probabilistic"] else headings
    tables.append(Table(headings, rows, f"by type, ranked by {results['rows'][0]['title']}"))
    rows = [
        (row["title"], plus_minus(row["r@1"], 1, 3, signed=True),
         *(percent(row["halves"][key]) if row["halves"] else "" for key in ("certain", "rest")),
         plus_minus(row["gain"], 1, 3, signed=True))
        for row in results["predictors"]
    ]  # fmt: skip
    headings = ("score, higher means less certain", "Spearman with R@1", "certain half", "the rest", "gain of refusing")
    title = "what each score of a phrase knows of R@1; gain: 0 at random, 1 at best"
    return [*tables, *([Table(headings, rows, title)] if rows else [])]


def sections(results: dict, tables: list[Table], examples: list) -> list:
    """The sections of the page."""
    figures = []
    if bins := results["uncertainty"]:
        chart = Chart("uncertainty", x_label="uncertainty of the phrase", y_label="R@1, %").bins(bins, "phrases")
        figures.append(Figure(chart, "Uncertainty against recall", correlations(bins)))
    left = f"{len(results['images_left_out'])} images could not be read and are left out."
    return [
        ("Recall", [
            f"Found at k: one of the first k proposals has an IoU of at least {THRESHOLD} with the phrase's box. "
            f"{results['phrases_without_box']:,} phrases have no box and are left out. "
            f"{left if results['images_left_out'] else ''} Guessing: the first k proposals drawn at random. Upper "
            "bound: the phrases for which any proposal is right.", tables[0],
        ]),
        ("By type of phrase", ["A phrase of several types counts for each of them.", tables[1]]),
        ("Uncertainty", [figures, *tables[2:]]),
        ("Examples", ["White: meant; green, red: ranked first, right or wrong; yellow: second and third.", *examples]),
    ]  # fmt: skip


def example(
    data: PhraseDataset, proposals: Proposals, found: Localised, ranking: str, place: int, results: dict
) -> Card | None:
    """The picture of a phrase with its boxes drawn on it, or None if the file has changed since."""
    phrase = data.phrases[found.rows[place]]
    try:
        picture = data.images.open(phrase.image).convert("RGB")
    except BadSample:
        return None
    width, height = data.sizes[phrase.image]
    scale = (picture.width / width, picture.height / height) * 2
    overlap = float(found.first_overlaps[ranking][place, 0])
    first = [proposals.boxes[phrase.image][i] for i in found.first[ranking][place].tolist() if i >= 0]
    boxes = [(box, "next") for box in reversed(first[1:3])] + [(box, "meant") for box in phrase.boxes]
    boxes += [(enclosing(phrase.boxes), "meant")] * (len(phrase.boxes) > 1)
    draw = ImageDraw.Draw(picture)
    for box, kind in [*boxes, (first[0], verdict(overlap >= THRESHOLD))]:
        outline = [float(end) * by for end, by in zip(box, scale)]
        draw.rectangle(outline, outline=OUTLINES[kind], width=max(1, round(max(picture.size) / 110)))
    u = f", u = {number(float(found.u[place]))}" if results["probabilistic"] else ""
    about = f"{phrase.kind + ', ' if phrase.kind else ''}IoU {overlap:.2f}{u}"
    return Card(f"“{phrase.text}”", [Picture(thumbnail(picture, SIDE), phrase.text)], [Cell(about)])
