"""`python -m zeroshot.retrieval`: embed pairs, rank them in every way, and see what their uncertainty is worth.

N images, M captions. "images" are queries of image → text, "captions" of text → image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from probemb.cli.progress import progress
from probemb.data.captions.find import CaptionDataset, find_captions
from probemb.data.compositions.coco import read_objects
from probemb.errors import UserError
from probemb.evaluation.analyses.containment import generality
from probemb.evaluation.benchmarks import (
    METRICS,
    OWN,
    TRUE,
    choose_benchmarks,
    evaluate_rankings,
    known_positives,
    refuse_too_many_exact_pairs,
)
from probemb.evaluation.calibration import accepted_shares
from probemb.evaluation.embed_pairs import EmbeddedPairs, centres, embed_pairs
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.judgements import judged_pairs
from probemb.evaluation.predictors import evaluate_predictors
from probemb.evaluation.rankings import RankingOptions, check_factory, fitting, ranking_names, title_of
from probemb.evaluation.tolerance import CSD, ORACLE, Tolerance, choose_tolerance
from probemb.evaluation.tolerance import METRICS as CHOSEN_BY
from probemb.evaluation.uncertainty import MEASURES, findings, projection
from probemb.models import networks_of
from probemb.models.match import MatchModel
from probemb.reports.figures import BLUE, GREY, ORANGE, Chart
from probemb.reports.pages import Block, Card, Cell, Figure, Page, Table, line_figure, picture_of, verdict
from probemb.reports.text import between, correlations, number, percent, plus_minus
from probemb.search import refuse_small_gallery
from zeroshot.evaluations.judgements import evaluate_judgements, judgement_blocks, read_judged
from zeroshot.evaluations.runner import (
    ABOUT_U,
    claim,
    finish,
    left_out,
    open_captions,
    open_model,
    settings,
    unknown_notice,
    unseen_rows,
)
from zeroshot.retrieval import RetrievalConfig

SHOWN = "own captions: R@1"  # the metric of bins and curves that are drawn; the table has all
BINNED = (SHOWN, "COCO 1K: R@1")  # the second as in PCME++ Fig. 3: each query within its own fold
DIRECTIONS = {"images": ("i2t", "image → text"), "captions": ("t2i", "text → image")}
OUTCOMES = {"ambiguity": "true ambiguity", "accepted_share": "human acceptance", "r@1": "R@1"}
INCLUDED = {"image lies in its own caption": "lies_in", "image lies in another image's caption": "lies_in_other"}
ERASED = {
    "pixels": "Images, a grey square over them",
    "regions": "Images, regions left out",
    "words": "Captions, words left out",
    "ends": "Captions, their ends left out",
}


def evaluate(config: RetrievalConfig) -> None:
    """Check the options against the data, load the model, embed, rank, and write the results. Raises UserError."""
    rankings = ranking_names(config.rankings)
    check_factory(config.factory, rankings)
    check_tolerance(config, rankings)
    captions = open_captions(config)
    if any(name.startswith("faiss") for name in rankings):
        refuse_small_gallery(config.factory, min(len(captions), captions.n_captions))
    refuse_too_many_exact_pairs(captions)
    selection = find_selection(config, captions)
    benchmarks = choose_benchmarks(config.benchmarks, captions, config.instances is not None)
    objects = read_objects(config.instances, captions.image_ids) if "pmrp" in benchmarks else None
    judged = read_judged(config, captions)
    out = claim(config, "retrieval")

    second = [] if config.second is None else [config.second]
    names = [config.model, *(networks_of(config.model)[1:] if config.second == "auto" else second)]
    embedder = open_model(config, names)
    model, device = embedder.model, embedder.device
    rankings = fitting(rankings, model, config.rankings is not None)
    check_tolerance(config, rankings)  # a model without variances does not rank by it
    if len(names) > 1:
        alone = " (--no-second: the first alone)" if config.second == "auto" else ""
        print(f"{' and '.join(names)} are evaluated together, by the mean of their similarities{alone}", flush=True)
    pairs = embed_pairs(embedder, captions, with_tokens="attention" in rankings)
    bad = left_out(pairs.bad)
    if bad:
        benchmarks = without_lost_images(config, benchmarks)
    tolerance = choose(config, embedder, captions, pairs, selection) if "tolerance" in rankings else None
    options = RankingOptions(
        *model.match_numbers(), config.samples, config.factory, config.candidates, device.name,
        tolerance or CSD, model.attention, pairs.tokens,
    )  # fmt: skip
    rows, per_query, tops = evaluate_rankings(pairs, captions, rankings, options, benchmarks, objects, progress)
    probabilistic = getattr(model, "probabilistic", True)
    one, correct = centres(pairs), {side: values[SHOWN] for side, values in per_query.items()}
    judged = None if judged is None else judged.among(torch.tensor(captions.owner()), pairs.kept)
    accepted = None if judged is None else accepted_shares(judged_pairs(judged, 0), len(pairs.texts))
    results = {
        **settings(config, embedder, captions.split),
        "models": names,
        "probabilistic": probabilistic,
        "images": len(pairs.images),
        "captions": len(pairs.texts),
        "images_left_out": bad,
        "unknown_words": unknown_notice(embedder.tokenizer, captions.flat(), "captions"),
        "benchmarks": benchmarks,
        "rows": rows,
        "tolerance": {} if tolerance is None else {tolerance.chosen.split()[0]: asdict(tolerance)},
        "projection": projection(one),
        "uncertainty": findings(embedder, captions, one, per_query, tops, config.erased, config.uncertainty)
        if probabilistic
        else {},
        "generality": generality(one, captions) if probabilistic else None,
        "judgements": None if judged is None else evaluate_judgements(judged, pairs, rankings, options, model),
        "predictors": evaluate_predictors(one, captions, correct, MatchModel.of(model), device.name, accepted),
    }
    page, shown = make_page(config, results, pairs, captions)
    finish(out, "retrieval", results, page, shown)


def without_lost_images(config: RetrievalConfig, benchmarks: list[str]) -> list[str]:
    """The benchmarks that work with missing images. Raises UserError if others were named."""
    lost = [name for name in benchmarks if name != "pmrp"]
    if lost and config.benchmarks is not None:
        raise UserError(f"Images are left out, so {', '.join(lost)} cannot be measured.", "Fetch those images again.")
    return [name for name in benchmarks if name not in lost]


# ------------------------------------------------------------------------------- weights of the ranking `tolerance`


def check_tolerance(config: RetrievalConfig, rankings: Sequence[str]) -> None:
    """Refuse weights, or data to choose them on, that no ranking uses. Raises UserError."""
    given = config.tolerance.i2t is not None or config.select_data is not None
    if given and "tolerance" not in rankings:
        raise UserError(
            f"The weights of tolerance are not used: the rankings are {', '.join(rankings)}.",
            "Leave its options out, or add it to --rankings if the model predicts variances.",
        )


def find_selection(config: RetrievalConfig, evaluated: CaptionDataset) -> CaptionDataset | None:
    """The data of --select-data without pictures that are evaluated too, or None. Raises UserError: too many are."""
    if config.select_data is None:
        return None
    images = config.images if Path(config.select_data) == Path(config.data) else None
    found = find_captions(config.select_data, config.select_split, images, exif=config.exif)
    remedy = "Choose the weights of tolerance on other images, such as --select-split val."
    rows, notices = unseen_rows(found.images, evaluated.images, config.workers, remedy)
    if notices:
        print(notices[0], flush=True)
        found = found.only(rows)
    refuse_too_many_exact_pairs(found)
    return found


def choose(
    config: RetrievalConfig, embedder: Embedder, captions: CaptionDataset, pairs: EmbeddedPairs,
    selection: CaptionDataset | None,
) -> Tolerance:  # fmt: skip
    """The given weights, or the best ones on the selection, or without one on the evaluated pairs (an oracle)."""
    if config.tolerance.i2t is not None:
        return Tolerance(config.tolerance.i2t, config.tolerance.t2i)
    chosen = ORACLE
    if selection is not None:
        captions, pairs = selection, embed_pairs(embedder, selection)
        chosen = f"chosen on {selection.split or Path(config.select_data).name}"
    positives, device = known_positives(pairs, captions), embedder.device.name
    of, metric = (TRUE, "map_at_r") if TRUE in positives else (OWN, "recall")
    there = pairs._replace(images=pairs.images.to(device), texts=pairs.texts.to(device))
    return choose_tolerance(there, positives[of], metric, chosen=chosen, of=of)


# ----------------------------------------------------------------------------------------------------------- output


def make_page(
    config: RetrievalConfig, results: dict, pairs: EmbeddedPairs, captions: CaptionDataset
) -> tuple[Page, list[Block]]:
    """The report, and the blocks of it that the console shows."""
    found, rows, models = results["uncertainty"], results["rows"], results["models"]
    ranked, known = rank_table(results), predictor_blocks(results["predictors"])
    judged = judgement_blocks(results["judgements"]) if results["judgements"] else []
    tolerance, general = tolerance_blocks(results["tolerance"]), generality_table(results["generality"])
    about, unknown = finding_lines(found) if found else ["The model predicts no uncertainty."], results["unknown_words"]
    how = "; ".join(f"{title}: {how}" for title, how in {title_of(row): row["how"] for row in rows}.items())
    split = f" ({results['config']['split']})" if results["config"]["split"] else ""
    together = "; similarities are the means of both models" if len(models) > 1 else ""
    lost = len(results["images_left_out"])
    sections: list[tuple[str, list[Block]]] = [
        ("Rankings", [f"{lost} images could not be read and are left out." if lost else "", ranked, how]),
        ("Human judgements", judged),
        ("What each score of a query knows", known),
        ("Variance as a tolerance", tolerance),
    ]
    if found:
        measure = f"Here u is the {config.uncertainty} of an item; findings use the first ranking."
        sections += [
            ("What u measures", [ABOUT_U, measure, *about, *unknown]),
            ("Uncertainty against recall", [quality_figures(found["quality"])]),
            ("Inclusion as generality", general),
            ("Uncertainty against what is erased", [erased_figures(found.get("erased", {}))]),
            ("Most and least uncertain", extreme_blocks(config, found["extremes"], pairs, captions)),
        ]
    sections.append(("Means in a plane", [projection_figure(results["projection"], captions, pairs, bool(found))]))
    page = Page(
        f"Image-text retrieval{' and uncertainty' if found else ''}",
        f"{' and '.join(models)} on {config.data}{split}: {results['images']:,} images, {results['captions']:,} "
        f"captions{together}",
        sections,
    )  # fmt: skip
    return page, [ranked, *tolerance, *about, *unknown, *general, *judged, *known]


def rank_table(results: dict) -> Table:
    """Two lines for each kind of positives and ranking."""
    rows: list = []
    for i, row in enumerate(results["rows"]):
        if i and results["rows"][i - 1]["positives"] != row["positives"]:
            rows.append(())
        for way, title in DIRECTIONS.values():
            cells = [percent(row[way][m]) if m in row[way] else "" for m in METRICS]
            last, own = way == "t2i", way == "t2i" and row["positives"] == OWN
            cost = (f"{row['ms_per_query']:.3g}", f"{row['numbers_per_item']:,}") if own else ("", "")
            total = f"{row['rsum']:.1f}" if last and "rsum" in row else ""
            rows.append((row["positives"], title_of(row), title, *cells, total, *cost))
    headings = ("positives", "ranked by", "direction", *METRICS.values(), "RSUM", "ms/query", "numbers")
    title = f"retrieval, {results['images']:,} images and {results['captions']:,} captions, percent"
    return Table(headings, rows, title, left=3)


def tolerance_blocks(found: dict) -> list[Block]:
    """The choice of the weights of tolerance, and the curve over them."""
    blocks: list[Block] = []
    for one in (one for one in found.values() if one["curve"]):
        what, curve = f"{CHOSEN_BY[one['metric']]} of {one['positives']}", one["curve"]
        weights = f"u of captions times {one['i2t']:g}, of images times {one['t2i']:g}"
        curves = {name: (curve["lambda"], [100 * y for y in curve[way]]) for way, name in DIRECTIONS.values()}
        figure = line_figure("tolerance", "weight of the gallery's u", f"{what}, %", curves)
        blocks += [f"tolerance, {one['chosen']}: {weights}, the best by {what}", [figure]]
    return blocks


def finding_lines(found: dict) -> list[str]:
    """The main correlations of u."""

    lines = [
        f"uncertainty of {side} against {name.removeprefix('own captions: ')}: "
        f"{correlations(metrics[name]['bins']).removesuffix('.')}; area under the rejection curve "
        "{area:.3f} (at random {random:.3f}, at best {oracle:.3f})".format(**metrics[name]["rejection"])
        for side, metrics in found["quality"].items()
        for name in BINNED
        if name in metrics and metrics[name]["bins"]
    ]
    against = {"captions against their number of words": found["length_spearman"]}
    if "ambiguity_spearman" in found:
        against["captions against their true ambiguity"] = found["ambiguity_spearman"]
    against |= {f"erased {what} against their share": one["spearman"] for what, one in found.get("erased", {}).items()}
    return lines + [
        f"uncertainty of {what}: Spearman {'undefined' if value is None else f'{value:+.3f}'}"
        for what, value in against.items()
    ]


def generality_table(found: dict | None) -> list[Table]:
    """Inclusion as a measure of generality."""
    if found is None:
        return []
    rows = [(title, f"{found['own']['pairs']:,}", between(found["own"][key])) for title, key in INCLUDED.items()]
    if nested := found["nested"]:
        title = "caption lies in the one that is true of more images"
        rows.append((title, f"{nested['pairs']:,}", between(nested["lies_in"])))
        rows.append(("the same, ROC AUC of the direction", "", between(nested["roc_auc"])))
    return [Table(("inclusion", "pairs", "share, 95 %"), rows, "inclusion as generality")]


def predictor_blocks(found: dict) -> list[Block]:
    """A table with a line for each score and direction, and the warning."""
    every = [row for side in DIRECTIONS for row in found[side]]
    outcomes = {key: title for key, title in OUTCOMES.items() if any(row[key] for row in every)}
    rows: list = []
    for side in ("captions", "images"):
        for i, row in enumerate(found[side]):
            halves = [percent(row["halves"][key]) if row["halves"] else "" for key in ("certain", "rest")]
            values = [plus_minus(row[key], 1, 3, signed=True) for key in (*outcomes, "gain")]
            rows.append(("" if i else DIRECTIONS[side][1], row["title"], *values[:-1], *halves, values[-1]))
        rows.append(())
    headings = ("queries", "score, higher means less certain", *outcomes.values(), "certain half", "the rest", "gain")
    title = "what each score of a query knows: Spearman, R@1 in percent, gain of refusing (0 at random, 1 at best)"
    return [Table(headings, rows, title, left=2), *([found["warning"]] if found["warning"] else [])]


def quality_figures(quality: dict) -> list[Figure]:
    """R@1 in bins of uncertainty, and of the queries that are left when the most uncertain ones are refused."""
    figures = []
    for name in BINNED:
        for side, metrics in quality.items():
            if name in metrics and (bins := metrics[name]["bins"]):
                of = "" if name == SHOWN else f" of {name.partition(':')[0]}"
                slug = f"recall{of.replace(' ', '-').lower()}-of-{side}"
                chart = Chart(slug, x_label=f"uncertainty of the {side}", y_label=f"R@1{of}, %").bins(bins, side)
                figures.append(Figure(chart, f"{side.capitalize()} as queries{of}", correlations(bins)))
    for side, metrics in quality.items():
        if curve := metrics[SHOWN]["rejection"]:
            xs, ys = [100 * x for x in curve["refused"]], [100 * y for y in curve["score"]]
            chart = Chart(
                f"rejection-{side}", x_label="most uncertain queries refused, %", y_label="R@1 of the others, %"
            )
            chart.line(xs, [100 * curve["random"]] * len(xs), "random", GREY, dashed=True)
            chart.line(xs, ys, "uncertainty", BLUE)
            figures.append(Figure(chart, f"{side.capitalize()} as queries"))
    return figures


def erased_figures(erased: dict) -> list[Figure]:
    """Uncertainty against the share that is erased."""
    return [
        line_figure(
            f"erased-{what}", f"erased {what}, %", "mean uncertainty",
            {"": ([100 * share for share in values["shares"]], values["uncertainty"])}, ERASED[what],
        )
        for what, values in erased.items()
    ]  # fmt: skip


def projection_figure(found: dict, captions: CaptionDataset, pairs: EmbeddedPairs, sized: bool) -> list[Figure]:
    """Means of some images and captions in a plane; a larger mark is more uncertain."""
    texts = [text for i in pairs.kept for text in captions.captions[i]]
    every = [float(u) for side in DIRECTIONS for u in found[side]["uncertainty"]]
    low, high = min(every), max(every)
    chart = Chart("means", x_label="first direction", y_label="second direction")
    for side, colour, marker in (("captions", ORANGE, "^"), ("images", BLUE, "o")):
        points = []
        for row, x, y, u in zip(*(found[side][key].tolist() for key in ("rows", "x", "y", "uncertainty"))):
            label = texts[row] if side == "captions" else captions.images.places[pairs.kept[row]].name
            size, about = (2 + 4 * (u - low) / ((high - low) or 1), f": u = {number(u)}") if sized else (3, "")
            points.append((x, y, size, f"{label[:120]}{about}"))
        chart.cloud(points, side, colour, marker)
    note = f"{found['method']} of {len(found['images']['rows'])} images and their captions."
    return [Figure(chart, note=note + (" A larger mark is more uncertain." if sized else ""))]


def extreme_blocks(config: RetrievalConfig, found: dict, pairs: EmbeddedPairs, captions: CaptionDataset) -> list[Block]:
    """The queries of the largest and of the smallest u, with what they retrieve first."""
    measure = MEASURES[config.uncertainty]
    one = centres(pairs)
    u, texts = (measure(one.images), measure(one.texts)), [text for i in pairs.kept for text in captions.captions[i]]

    def picture(row: int, kind: str) -> list:
        i = pairs.kept[row]
        return picture_of(captions.images, i, f"{captions.images.places[i].name}: {kind}", kind)

    def image_card(query: dict) -> Card:
        row = query["row"]
        lines = [Cell(texts[c], verdict(pairs.owner[c] == row)) for c in query["retrieved"] if c >= 0]
        own = captions.captions[pairs.kept[row]][0]
        return Card(f"u = {float(u[0][row]):#.4g}. {own}", picture(row, lines[0].kind), lines)

    def text_card(query: dict) -> Card:
        row = query["row"]
        shown = [one for i in query["retrieved"] if i >= 0 for one in picture(i, verdict(pairs.owner[row] == i))]
        return Card(f"{texts[row]} (u = {float(u[1][row]):#.4g})", shown)

    blocks: list[Block] = ["Green: an own caption, or the own image; red: another one."]
    for side, card in (("images", image_card), ("captions", text_card)):
        for which in ("most", "least"):
            blocks += [f"{which.capitalize()} uncertain {side}:", [card(query) for query in found[side][which]]]
    return blocks
