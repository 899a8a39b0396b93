"""`python -m zeroshot.composed`: sets of composed queries, their retrieval, and the feasibility of combinations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import yaml

from probemb.compose import Composer
from probemb.data.compositions.dataset import KINDS, Compositions, Query
from probemb.data.compositions.find import MAX_K, find_compositions
from probemb.errors import UserError, names_of
from probemb.evaluation import composed
from probemb.evaluation.embedding import EmbeddedImages
from probemb.evaluation.uncertainty import evenly
from probemb.metrics.retrieval import ranking as closest
from probemb.reports.figures import GREY, PALETTE, Chart
from probemb.reports.pages import Card, Cell, Figure, Page, Picture, Table, line_figure, picture_of, verdict
from probemb.reports.text import percent, plus_minus
from zeroshot.composed import ComposedConfig
from zeroshot.evaluations import runner

RANKINGS = ("cosine", "density")
PER_COMBINATION = 10  # queries; the paper has 10,000 for 1,000
FASHION_KS = (1, 10, 50)
NAMES = {"r@1": "R@1", "r@5": "R@5", "r@10": "R@10", "r@50": "R@50", "r_precision": "R-P"}
EXAMPLES, DEPTH = 3, 6  # of every set and kind of query; images that are shown


@dataclass(frozen=True)
class QuerySet:
    """`number` combinations of k parts, their queries and, once embedded, `found`.

    combinations: "seen" in the training, "unseen", "infeasible" (in no image), or "changes" of an attribute of an
    image, which is then no answer itself.
    """

    k: int
    combinations: str
    data: Compositions
    queries: list[Query]
    number: int
    found: composed.ComposedQueries | None = None


def evaluate(config: ComposedConfig) -> None:
    """Make the queries, load the model, embed gallery and queries, and write the results. Raises UserError."""
    rankings = [] if config.rankings is None else names_of(config.rankings, RANKINGS, "ranking")
    trained = training_of(config.model)
    config = replace(config, **{key: one for key, one in trained.items() if getattr(config, key, 0) in (None, "auto")})
    config = replace(config, k=str(config.k))
    sets = find_queries(config, trained)
    run, data = runner.start(config, "composed"), sets[0].data
    embedder = run.embedder
    composer, name = composed.composer_of(embedder.model), embedder.model.config["composer"]
    if "density" in rankings and not composer.probabilistic:
        what = f"The composer '{name}' composes points, which have no density to rank by."
        raise UserError(what, "Use --rankings cosine.")
    rankings = rankings or list(dict.fromkeys(["cosine", embedder.model.composed_ranking]))
    gallery = embedder.images(data.images)
    sets = [replace(one, found=composed.embed_queries(embedder, one.data, one.queries)) for one in sets]
    feasible = [one for one in sets if one.combinations != "infeasible"]
    rows = [row for one in feasible for ranking in rankings if (row := measure(gallery, one, ranking))["kinds"]]
    if not rows:
        raise UserError(f"No query of {data.source} has an answer among the images that can be read.", "Use more data.")
    results = {
        "composer": name,
        "probabilistic": composer.probabilistic,
        "trained": trained,
        "source": data.source,
        "split": data.split,
        "images": len(gallery.kept),
        "notes": notes(sets, rows[:: len(rankings)], composer, name, trained),
        "rows": rows,
        "feasibility": infeasible_rows(composer, sets, training_counts(config, data)),
    }
    changes = "The query's own image is left out of the ranking." if rows[0]["combinations"] == "changes" else ""
    page = Page(
        "Composed retrieval",
        f"{config.model} ({name}) on {data.source}{f' ({data.split})' if data.split else ''}, "
        f"{len(gallery.kept):,} images",
        [
            ("Retrieval", [
                "R-P is the share of the R correct images among the first R. Published: the queries of MPC's lists.",
                changes, *results["notes"], retrieval_table(results), by_parts(rows),
            ]),
            ("Feasibility", [
                "Can the composition tell that its parts are never together? “all” is the mean of the kinds.",
                feasibility_table(results["feasibility"]), roc_figures(composer, sets),
            ] if results["feasibility"] else []),
            *(
                (f"Examples, k = {one.k}, {one.combinations}, by {rankings[0]}; green: correct",
                 [examples(gallery, one, rankings[0])])
                for one in feasible
            ),
        ],
    )  # fmt: skip
    run.finish(results, page, gallery.bad, config.split)


def training_of(model: str) -> dict:
    """ "k", "setup", "seed" and "lists" of a run's composed queries from its config.yaml; defaults if not "known"."""
    path, names = Path(model), {"parts": "k", "setup": "setup", "seed": "seed", "lists": "lists"}
    found = {"k": 2, "setup": "seen", "seed": 0, "lists": None, "known": False}
    for file in (path / "config.yaml", path.parent / "config.yaml"):
        if path.exists() and file.is_file():
            compose = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("compose") or {}
            given = {names[key]: one for key, one in compose.items() if key in names and one is not None}
            return found | given | {"known": bool(compose)}
    return found


def find_queries(config: ComposedConfig, trained: dict) -> list[QuerySet]:
    """All sets, of which the same images are the gallery. Raises UserError: a wrong --k; no data, or too little."""
    numbers = sorted({int(word) if word.strip().isdecimal() else 0 for word in config.k.split(",")})
    if numbers[0] < 2 or numbers[-1] > MAX_K:
        raise UserError(f"--k is '{config.k[:100]}'.", f"Give numbers from 2 to {MAX_K}, such as 2 or 2,3,4.")
    result = []
    for k in numbers:
        setup = config.setup if k == trained["k"] else "seen"  # queries of another length are new to both setups
        data = find_data(config, config.split, k, setup)
        if not len(data.tuples):
            queries = data.queries or data.sampled_queries(config.queries, config.seed)
            return [QuerySet(2, "changes", data, queries, len({query.concepts for query in queries}))]
        asked: list[tuple[str, np.ndarray, list[Query] | None]] = [("unseen", data.tuples, data.queries)]
        if k == trained["k"] and setup == "seen":
            asked = [("seen", data.tuples, data.queries), ("unseen", answerable(data, data.unseen), None)]
        elif k == trained["k"]:
            training = find_data(config, "train", k, setup)
            asked = [("seen", answerable(data, training.tuples), None), *asked]
        for name, tuples, published in [*asked, ("infeasible", data.infeasible, None)]:
            number = min(config.queries, PER_COMBINATION * len(tuples))
            queries = published or data.sampled_queries(number, config.seed, tuples)
            result.append(QuerySet(data.k, name, data, queries, len({query.concepts for query in queries})))
    return [one for one in result if one.queries]


def find_data(config: ComposedConfig, split: str, k: int, setup: str) -> Compositions:
    """The data of a split. Raises UserError."""
    where = {"images": config.images, "lists": config.lists, "seed": config.seed}
    return find_compositions(config.data, split, k, setup=setup, **where)


def answerable(data: Compositions, tuples: np.ndarray) -> np.ndarray:
    """Combinations that this split has targets and image queries of."""
    usable = [bool(len(data.targets(row))) and all(len(data.crops[one]) for one in row) for row in tuples]
    return tuples[np.array(usable, dtype=bool)]


def training_counts(config: ComposedConfig, data: Compositions) -> list[int]:
    """Number of images of the training split that have each concept of `data`."""
    if not len(data.tuples):
        return []
    training = find_data(config, "train", data.k, config.setup)
    number = {concept: i for i, concept in enumerate(training.concepts)}
    return [len(training.targets([number[concept]])) for concept in data.concepts]


def notes(sets: Sequence[QuerySet], rows: Sequence[dict], composer: Composer, name: str, trained: dict) -> list[str]:
    """Remarks on the numbers."""
    told = list(dict.fromkeys(note for one in sets for note in one.data.notes))
    if not composer.probabilistic:
        told.append(f"The composer '{name}' composes points: no density, and no feasibility by uncertainty.")
    if not trained["known"]:
        told.append("The model has no config.yaml: it is taken to be trained on pairs, in splits and lists of seed 0.")
    return told + [
        f"{row['left_out']:,} of the queries of {row['number']:,} {row['combinations']} combinations of {row['k']} are "
        "left out: a part cannot be read, or no correct image."
        for row in rows
        if row["left_out"]
    ]


def measure(gallery: EmbeddedImages, asked: QuerySet, ranking: str) -> dict:
    """One set of queries by one ranking."""
    changes = asked.combinations == "changes"
    ks = FASHION_KS if changes else composed.KS
    kinds = composed.measure_composed(gallery, asked.data, asked.found, ranking, ks, without_own=changes)
    return {
        "k": asked.k,
        "combinations": asked.combinations,
        "number": asked.number,
        "published": asked.queries is asked.data.queries,
        "left_out": len(asked.queries) - (kinds["all"]["queries"] if kinds else 0),
        "ranking": ranking,
        "metrics": [*(f"r@{k}" for k in ks), "r_precision"],
        "kinds": kinds,
    }


def feasibility_sets(sets: Sequence[QuerySet]) -> tuple[QuerySet | None, dict[str, QuerySet]]:
    """The infeasible set, if there is one, and the feasible sets of as many parts by name."""
    never = next((one for one in sets if one.combinations == "infeasible"), None)
    return never, {one.combinations: one for one in sets if never and one is not never and one.k == never.k}


def infeasible_rows(composer: Composer, sets: Sequence[QuerySet], counts: Sequence[int]) -> dict | None:
    """AUC of each score against infeasible combinations, of the seen and of the unseen ones; None without any."""
    never, others = feasibility_sets(sets)
    rows = [
        {"score": score, "title": composed.TITLES[score], "feasible": name, "kinds": kinds}
        for name, one in others.items()
        for score, kinds in composed.measure_feasibility(composer, one.found, never.found, counts).items()
    ]
    return never and {"infeasible": {"combinations": never.number, "queries": len(never.found.queries)}, "rows": rows}


def retrieval_table(results: dict) -> Table:
    """Retrieval by number of parts, combinations and kind of query, in percent."""
    metrics, rows = results["rows"][0]["metrics"], []
    for row in results["rows"]:
        set_of = f"{row['number']:,} {row['combinations']}{', published' if row['published'] else ''}"
        for kind, one in row["kinds"].items():
            rows.append((
                str(row["k"]), set_of, kind, row["ranking"], f"{one['queries']:,}",
                *(plus_minus(one[name]) for name in metrics), f"{one['targets']:.1f}",
                percent(one["guessing"]["r_precision"]),
            ))  # fmt: skip
        rows.append(())
    headings = ("k", "combinations", "queries of", "ranked by", "number", *(NAMES[name] for name in metrics),
                "targets", "guessing R-P")  # fmt: skip
    title = f"composed retrieval among {results['images']:,} images, {results['composer']}, percent"
    return Table(headings, rows, title, left=4)


def feasibility_table(found: dict) -> Table:
    """AUC of every score, in percent."""
    kinds = list(dict.fromkeys(kind for row in found["rows"] for kind in row["kinds"]))
    rows = [
        (row["feasible"], row["title"], *(plus_minus(row["kinds"].get(kind)) for kind in kinds))
        for row in found["rows"]
    ]
    number = found["infeasible"]["combinations"]
    title = f"feasibility: ROC AUC against {number:,} infeasible combinations, percent; 50 by chance"
    return Table(("feasible", "score of infeasibility", *kinds), rows, title, left=2)


def by_parts(rows: Sequence[dict]) -> list[Figure]:
    """R-Precision against k, by kind of query, of the first set of each k; nothing for a single k."""
    first: dict[int, dict] = {}
    for row in rows:
        first.setdefault(row["k"], row["kinds"])
    if len(first) < 2:
        return []
    curves = {}
    for kind in KINDS:
        if ks := [k for k, kinds in first.items() if kind in kinds]:
            found = [first[k][kind]["r_precision"] for k in ks]
            curves[kind] = (ks, *([100 * one[key] for one in found] for key in ("value", "se")))
    return [line_figure("parts", "parts of a query", "R-Precision, %", curves, "By the number of parts")]


def roc_figures(composer: Composer, sets: Sequence[QuerySet]) -> list[Figure]:
    """ROC curves of the scores against infeasible combinations, of seen and unseen ones, means of kinds; MPC Fig. 5."""
    never, others = feasibility_sets(sets)
    figures = []
    for name, one in others.items():
        chart = Chart(f"roc-{name}", x_label=f"{name} combinations refused, %", y_label="infeasible ones refused, %")
        chart.line([0, 100], [0, 100], "chance", GREY, dashed=True)
        scores = composed.feasibility_strata(composer, one.found, never.found).items()
        for (score, strata), colour in zip(((score, strata) for score, strata in scores if strata), PALETTE):
            wrong, right = (100 * rates for rates in composed.mean_roc_curve(list(strata.values())))
            title = composed.TITLES[score].partition(",")[0]
            chart.line(wrong.tolist(), right.tolist(), title, colour, notes=[""] * len(wrong))
        figures.append(Figure(chart, f"Infeasible against {name} combinations"))
    return figures


def examples(gallery: EmbeddedImages, asked: QuerySet, ranking: str) -> list[Card]:
    """Some queries of every kind at equal distances: their parts, and the first images of their ranking."""
    counts, rows = composed.positives_of(asked.data, asked.found.queries, gallery.kept).counts.tolist(), []
    for kind in KINDS:
        answerable = [row for row, query in enumerate(asked.found.queries) if query.kind == kind and counts[row]]
        rows += [answerable[i] for i in evenly(len(answerable), EXAMPLES)]
    if not rows:
        return []
    some = asked.found.only(torch.tensor(rows))
    score = composed.ranked_by(gallery, some, ranking, without_own=asked.combinations == "changes")
    data, cards = asked.data, []
    for query, top, row in zip(some.queries, closest(score(slice(None)), DEPTH).tolist(), rows):
        correct = set(data.targets(query.concepts).tolist())
        pictures = []
        for part in query.parts:
            if part.is_image:
                pictures += picture_of(data.images, part.image, data.concepts[part.concept], box=part.box)
            else:
                pictures.append(Picture("", part.text))
        for image in (gallery.kept[place] for place in top):
            pictures += picture_of(data.images, image, data.named(data.held[image]), verdict(image in correct))
        about = f"{query.kind}: {data.named(query.concepts)}"
        cards.append(Card(about, pictures, [Cell(f"{counts[row]:,} images are correct")]))
    return cards
