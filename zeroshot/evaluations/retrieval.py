"""`python -m zeroshot.retrieval`: embed pairs, rank them in every way, and see what their uncertainty is worth.

N images, M captions. "images" are queries of image → text, "captions" of text → image.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from probemb.data.captions.dataset import CaptionDataset
from probemb.data.captions.find import find_captions
from probemb.data.captions.judgements import Judgements, read_judgements
from probemb.data.compositions.find import read_objects
from probemb.data.image_loader import describe_bad
from probemb.errors import UserError
from probemb.evaluation import retrieval
from probemb.evaluation.embedding import EmbeddedPairs, Embedder, centres, embed_pairs
from probemb.evaluation.judgements import (
    caption_acceptance,
    evaluate_rankings_of_pairs,
    judged_pairs,
    match_calibration,
)
from probemb.evaluation.rankings import (
    RANKINGS,
    RankingOptions,
    Tolerance,
    check_factory,
    fitting,
    ranking_names,
    title_of,
)
from probemb.evaluation.uncertainty import MEASURES, PARTS, findings, generality, projection, signs
from probemb.metrics.retrieval import TITLES as METRICS
from probemb.models import DualEncoder, networks_of
from probemb.models.match import Ensemble
from probemb.progress import progress
from probemb.reports import pages
from probemb.reports.figures import BLUE, ORANGE, Chart
from probemb.reports.pages import Block, Card, Cell, Figure, Page, Table, picture_of, verdict
from probemb.reports.text import between, correlations, number, percent
from zeroshot.evaluations import runner
from zeroshot.retrieval import RetrievalConfig

SHOWN = "own captions: R@1"  # the metric of bins and curves that are drawn; results.json has all
BINNED = (SHOWN, "COCO 1K: R@1")  # the second as in PCME++ Fig. 3: each query within its own fold
DIRECTIONS = {"images": ("i2t", "image → text"), "captions": ("t2i", "text → image")}
JUDGED = {"average_precision": "AP", "roc_auc": "ROC AUC", "average_precision_halves": "AP, mean of halves"}
INCLUDED = {"image lies in its own caption": "lies_in", "image lies in another image's caption": "lies_in_other"}


def evaluate(config: RetrievalConfig) -> None:
    """Check the options against the data, load the model, embed, rank, and write the results. Raises UserError."""
    rankings = ranking_names(config.rankings)
    if (config.tolerance.i2t is None) != (config.tolerance.t2i is None):
        raise UserError("One weight of tolerance is given without the other.", "Give both, or none to choose them.")
    captions = runner.open_captions(config)
    check_factory(config.factory, rankings, min(len(captions), captions.n_captions))
    selection = find_selection(config, captions)
    wanted = retrieval.choose_benchmarks(config.benchmarks, captions, config.instances is not None)
    objects = read_objects(config.instances, captions.image_ids) if "pmrp" in wanted else None
    judgements = None if config.judgements is None else read_judgements(config.judgements, captions)
    if judgements is not None:
        judged_pairs(judgements)  # refuses a file that orders nothing
    second = [] if config.second is None else [config.second]
    names = [config.model, *(networks_of(config.model)[1:] if config.second == "auto" else second)]
    run = runner.start(config, "retrieval", names)
    embedder, model = run.embedder, run.embedder.model
    rankings = fitting(rankings, model, config.rankings is not None)
    pairs = embed_pairs(embedder, captions, with_tokens="attention" in rankings)
    if pairs.bad and wanted not in ([], ["pmrp"]):
        if config.benchmarks is not None:
            raise UserError(f"{describe_bad(pairs.bad)}. COCO's benchmarks need all images.", "Fetch them again.")
        wanted = [name for name in wanted if name == "pmrp"]
    tolerance = choose(config, embedder, pairs, selection) if "tolerance" in rankings else None
    options = RankingOptions(
        *model.match_model.numbers, config.samples, config.factory, config.candidates,
        embedder.device.name, tolerance or Tolerance(), model.attention, pairs.tokens,
    )  # fmt: skip
    objects = None if objects is None else objects[pairs.kept]
    rows, per_query, tops = retrieval.evaluate_rankings(pairs, rankings, options, wanted, objects, progress)
    single, found, generalities, judged = centres(pairs), {}, None, None
    if model.probabilistic:
        found = findings(embedder, single, per_query, tops, config.erased, config.uncertainty)
        found["sign"] = signs(single, {side: values[SHOWN] for side, values in per_query.items()})
        generalities = generality(single)
    if judgements is not None:
        judgements = judgements.among(torch.tensor(captions.owner()), pairs.kept)
        judged = evaluate_judgements(judgements, pairs, rankings, options, model)
    results = {
        "models": names,
        "probabilistic": model.probabilistic,
        "images": len(pairs.images),
        "captions": len(pairs.texts),
        "unknown_words": runner.unknown_notice(embedder.tokenizer, captions.flat(), "captions"),
        "benchmarks": wanted,
        "rows": rows,
        "tolerance": {} if tolerance is None else {tolerance.chosen.split()[0]: asdict(tolerance)},
        "projection": projection(single),
        "uncertainty": found,
        "generality": generalities,
        "judgements": judged,
    }
    run.finish(results, make_page(config, results, pairs), pairs.bad, captions.split)


def find_selection(config: RetrievalConfig, evaluated: CaptionDataset) -> CaptionDataset | None:
    """The data of --select-data without pictures that are evaluated too, or None. Raises UserError: too many are."""
    if config.select_data is None:
        return None
    images = config.images if Path(config.select_data) == Path(config.data) else None
    found = find_captions(config.select_data, config.select_split, images, exif=config.exif)
    rows, notices = runner.unseen_rows(found.images, evaluated.images, config.workers)
    print(*notices, sep="\n", flush=True)
    return found.only(rows)


def choose(
    config: RetrievalConfig, embedder: Embedder, pairs: EmbeddedPairs, selection: CaptionDataset | None
) -> Tolerance:
    """The given weights, or the best ones on the selection, or without one on the evaluated pairs (an oracle)."""
    if config.tolerance.i2t is not None:
        return Tolerance(config.tolerance.i2t, config.tolerance.t2i)
    chosen = retrieval.ORACLE
    if selection is not None:
        pairs = embed_pairs(embedder, selection)
        chosen = f"chosen on {selection.split or Path(config.select_data).name}"
    positives, device = retrieval.known_positives(pairs), embedder.device.name
    of, metric = (retrieval.TRUE, "map_at_r") if retrieval.TRUE in positives else (retrieval.OWN, "recall")
    there = pairs._replace(images=pairs.images.to(device), texts=pairs.texts.to(device))
    return retrieval.choose_tolerance(there, positives[of], metric, chosen=chosen, of=of)


def evaluate_judgements(
    judgements: Judgements, pairs: EmbeddedPairs, rankings: Sequence[str], options: RankingOptions,
    model: DualEncoder | Ensemble,
) -> dict:  # fmt: skip
    """The "judgements" of results.json. Raises UserError: people agree on all pairs."""
    judged = judged_pairs(judgements)
    found, scores = evaluate_rankings_of_pairs(pairs, judged, rankings, options)
    sampled, closed = scores.get("match-probability"), model.match_model.form == "csd"
    calibrated = model.probabilistic and model.match_model.matches and (closed or sampled is not None)
    return {
        "pairs": len(judged.label),
        "accepted": int(judged.label.sum()),
        "images": len(judged.image.unique()),
        "captions": len(judged.caption.unique()),
        "own_left_out": int(judgements.own.sum()),
        "not_in_the_data": judgements.unknown,
        "resamples": len(judged.clusters[0][1]) - 1,
        **found,
        "calibration": match_calibration(pairs, judged, options, sampled, closed) if calibrated else None,
        "acceptance": caption_acceptance(pairs, judged) if model.probabilistic else None,
    }


def make_page(config: RetrievalConfig, results: dict, pairs: EmbeddedPairs) -> Page:
    """The report."""
    found, models = results["uncertainty"], results["models"]
    how = {title_of(row): row["how"] for row in results["rows"]}
    sections: list[tuple[str, list[Block]]] = [
        ("Rankings", [
            *results["unknown_words"],
            "Similarities are the means of both models." if len(models) > 1 else "",
            rank_table(results), "; ".join(f"{title}: {text}" for title, text in how.items()),
        ]),
        ("Human judgements", judgement_blocks(results["judgements"]) if results["judgements"] else []),
        ("Variance as a tolerance", tolerance_blocks(results["tolerance"])),
        ("Inclusion as generality", generality_table(results["generality"])),
        ("What u measures", [
            f"{runner.ABOUT_U} Here u is {MEASURES[config.uncertainty][0]}; findings use the first ranking.",
            *finding_lines(found), found["sign"]["warning"] or "",
        ] if found else ["The model predicts no uncertainty."]),
    ]  # fmt: skip
    if found:
        erased = [
            pages.line_figure(f"erased-{what}", f"erased {PARTS.get(what, what)}, %", "mean uncertainty",
                              {"": ([100 * x for x in one["shares"]], one["uncertainty"])})
            for what, one in found.get("erased", {}).items()
        ]  # fmt: skip
        sections += [
            ("Uncertainty against recall", [quality_figures(found["quality"])]),
            ("Uncertainty against what is erased", [erased]),
            *extreme_sections(config, found["extremes"], pairs),
        ]
    sections.append(("Means in a plane", [projection_figure(results["projection"], pairs)]))
    split = f" ({pairs.data.split})" if pairs.data.split else ""
    size = f"{results['images']:,} images, {results['captions']:,} captions"
    return Page("Image-text retrieval", f"{' and '.join(models)} on {config.data}{split}: {size}", sections)


def rank_table(results: dict) -> Table:
    """Two lines for each kind of positives and ranking."""
    rows: list = []
    for i, row in enumerate(results["rows"]):
        if i and results["rows"][i - 1]["positives"] != row["positives"]:
            rows.append(())
        for way, title in DIRECTIONS.values():
            cells = [percent(row[way][m]) if m in row[way] else "" for m in METRICS]
            last, own = way == "t2i", way == "t2i" and row["positives"] == retrieval.OWN
            cost = (f"{row['ms_per_query']:.3g}", f"{row['numbers_per_item']:,}") if own else ("", "")
            total = f"{row['rsum']:.1f}" if last and "rsum" in row else ""
            rows.append((row["positives"], title_of(row), title, *cells, total, *cost))
    headings = ("positives", "ranked by", "direction", *METRICS.values(), "RSUM", "ms/query", "numbers")
    title = f"retrieval, {results['images']:,} images and {results['captions']:,} captions, percent"
    return Table(headings, rows, title, left=3)


def judgement_blocks(found: dict) -> list[Block]:
    """Every ranking against human judgements, and lines and charts on calibration and acceptance."""
    versus = f"AP of halves − that of {RANKINGS[found['reference']].title}"
    rows = [
        (row["title"], *(between(row.get(metric)) for metric in JUDGED),
         between(row["difference"].get("average_precision_halves"), signed=True))
        for row in found["rows"]
    ]  # fmt: skip
    title = (
        f"human judgements, {found['pairs']:,} pairs that are not the caption's own image, {found['accepted']:,} "
        f"accepted, {found['not_in_the_data']:,} others not in the data; intervals of 95 %"
    )
    charts, lines = [], []
    calibration = dict(found["calibration"] or {})
    constant = calibration.pop("constant", None)
    for name, both in calibration.items():
        curves = {"the model's own": both["raw"], "refitted": both["refitted"]}
        labels = ("match probability, %", "human acceptance rate, %")
        charts += pages.reliability_figure(f"reliability-{name.replace(' ', '-')}", curves, *labels, name)
        lines += [
            f"match probability ({name}), {of}: ECE {one['ece']:.4f}, Brier score {one['brier']:.4f} (of the mean rate "
            f"for every pair {constant['brier']:.4f})"
            for of, one in curves.items()
            if one
        ]
    if acceptance := found["acceptance"]:
        lines.append(
            "uncertainty of captions against human acceptance, the share of their judged images: Spearman "
            f"{between(acceptance['spearman'], signed=True)} over {acceptance['captions']:,} captions"
        )
    return [Table(("ranked by", *JUDGED.values(), versus), rows, title), charts, *lines]


def tolerance_blocks(found: dict) -> list[Block]:
    """The choice of the weights of tolerance, and the curve over them."""
    blocks: list[Block] = []
    for one in (one for one in found.values() if one["curve"]):
        what, curve = f"{retrieval.CHOSEN_BY[one['metric']]} of {one['positives']}", one["curve"]
        weights = f"u of captions times {one['i2t']:g}, of images times {one['t2i']:g}"
        curves = {name: (curve["lambda"], [100 * y for y in curve[way]]) for way, name in DIRECTIONS.values()}
        figure = pages.line_figure("tolerance", "weight of the gallery's u", f"{what}, %", curves)
        blocks += [f"tolerance, {one['chosen']}: {weights}, the best by {what}", [figure]]
    return blocks


def finding_lines(found: dict) -> list[str]:
    """The main correlations of u."""
    lines = [
        f"uncertainty of {side} against {name.removeprefix('own captions: ')}: {correlations(metrics[name]['bins'])}"
        for side, metrics in found["quality"].items()
        for name in BINNED
        if name in metrics and metrics[name]["bins"]
    ]
    against = {"captions against their number of words": found["length_spearman"]}
    if "ambiguity_spearman" in found:
        against["captions against their true ambiguity"] = found["ambiguity_spearman"]
    for what, one in found.get("erased", {}).items():
        against[f"erased {PARTS.get(what, what)} against their share"] = one["spearman"]
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


def quality_figures(quality: dict) -> list[Figure]:
    """R@1 in bins of uncertainty, and of the queries that are left when the most uncertain ones are refused."""
    figures = []
    for side, metrics in quality.items():
        for i, name in enumerate(name for name in BINNED if name in metrics):
            labels = f"uncertainty of the {side}", f"{name}, %"
            figures += pages.bin_figure(f"recall-{i}-of-{side}", metrics[name]["bins"], side, *labels, side)
        curve = {"uncertainty": metrics[SHOWN]["rejection"]}
        figures += pages.rejection_figure(f"rejection-{side}", curve, "R@1 of the others, %", f"{side}, refused")
    return figures


def projection_figure(found: dict, pairs: EmbeddedPairs) -> list[Figure]:
    """Means of some images and captions in a plane; a larger mark is more uncertain."""
    names = {"captions": pairs.data.flat(), "images": [place.name for place in pairs.data.images.places]}
    every = [float(u) for side in DIRECTIONS for u in found[side]["uncertainty"]]
    low, high = min(every), max(every)
    chart = Chart("means", x_label="first direction", y_label="second direction")
    for side, colour, marker in (("captions", ORANGE, "^"), ("images", BLUE, "o")):
        points = []
        for row, x, y, u in zip(*(found[side][key].tolist() for key in ("rows", "x", "y", "uncertainty"))):
            note = f"{names[side][row][:120]}: u = {number(u)}"
            points.append((x, y, 2 + 4 * (u - low) / ((high - low) or 1), note))
        chart.cloud(points, side, colour, marker)
    rows = len(found["images"]["rows"])
    note = f"{found['method']} of {rows} images and their captions. A larger mark is more uncertain."
    return [Figure(chart, note=note)]


def extreme_sections(config: RetrievalConfig, found: dict, pairs: EmbeddedPairs) -> list[tuple[str, list[Block]]]:
    """The queries of the largest and of the smallest u with what they retrieve first, green for an own one."""
    measure, one = MEASURES[config.uncertainty][1], centres(pairs)
    u = {"images": measure(one.images), "captions": measure(one.texts)}
    data, texts = pairs.data, pairs.data.flat()

    def pictures(row: int, kind: str) -> list:
        return picture_of(data.images, row, f"{data.images.places[row].name}: {kind}", kind)

    def card(side: str, row: int, retrieved: Sequence[int]) -> Card:
        about = f"u = {float(u[side][row]):#.4g}"
        if side == "captions":
            shown = [one for i in retrieved for one in pictures(i, verdict(pairs.owner[row] == i))]
            return Card(f"{texts[row]} ({about})", shown)
        lines = [Cell(texts[c], verdict(pairs.owner[c] == row)) for c in retrieved]
        return Card(f"{about}. {data.captions[row][0]}", pictures(row, lines[0].kind), lines)

    return [
        (
            f"{which.capitalize()} uncertain {side}",
            [[card(side, one["row"], [i for i in one["retrieved"] if i >= 0]) for one in found[side][which]]],
        )
        for side in DIRECTIONS
        for which in ("most", "least")
    ]
