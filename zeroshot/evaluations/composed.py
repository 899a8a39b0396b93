"""`python -m zeroshot.composed`: sets of composed queries, their retrieval, and the feasibility of combinations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import yaml

from probemb.data.compositions import KINDS, MAX_K, Compositions, Query, find_compositions
from probemb.data.failures import BadSample
from probemb.errors import UserError, nearest
from probemb.evaluation.composed import (
    KS,
    ComposedQueries,
    composed_outcomes,
    composer_of,
    embed_queries,
    guessed,
    positives_of,
    ranked_by,
)
from probemb.evaluation.embedding import EmbeddedImages
from probemb.evaluation.feasibility import (
    SCORES,
    TITLES,
    combinations_of,
    feasibility_strata,
    mean_roc_curve,
    measure_feasibility,
)
from probemb.evaluation.uncertainty import evenly
from probemb.metrics import closest_items
from probemb.metrics.localisation import summarise
from probemb.models.composers import Composer
from probemb.reports.figures import GREY, PALETTE, Chart
from probemb.reports.pages import Card, Cell, Figure, Page, Picture, Table, line_figure, picture_of, thumbnail, verdict
from probemb.reports.text import percent, plus_minus
from zeroshot.composed import ComposedConfig
from zeroshot.evaluations.runner import claim, finish, left_out, open_model, settings

Combinations = Literal["seen", "unseen", "infeasible", "changes"]
RANKINGS = ("cosine", "density")
PER_COMBINATION = 10  # queries; the paper has 10,000 for 1,000
FASHION_KS = (1, 10, 50)
NAMES = {"r@1": "R@1", "r@5": "R@5", "r@10": "R@10", "r@50": "R@50", "r_precision": "R-P"}
EXAMPLES, DEPTH, SIDE = 3, 6, 96  # of every set and kind of query; images that are shown; pixels of a longer side


@dataclass(frozen=True)
class QuerySet:
    """`number` combinations of k parts, their queries and, once embedded, `found`.

    combinations: "seen" in the training, "unseen", "infeasible" (in no image), or "changes" of an attribute of an
    image, which is then no answer itself.
    """

    k: int
    combinations: Combinations
    data: Compositions
    queries: list[Query]
    number: int
    found: ComposedQueries | None = None

    @property
    def ks(self) -> tuple[int, ...]:
        """K of R@K."""
        return FASHION_KS if self.combinations == "changes" else KS


def evaluate(config: ComposedConfig) -> None:
    """Make the queries, load the model, embed gallery and queries, and write the results. Raises UserError."""
    rankings = [] if config.rankings is None else list(dict.fromkeys(map(str.strip, config.rankings.split(","))))
    if wrong := next((name for name in rankings if name not in RANKINGS), None):
        raise UserError(f"There is no ranking '{wrong}'.{nearest(wrong, RANKINGS)}", "Choose cosine or density.")
    trained = training_of(config.model)
    config = replace(config, **{key: one for key, one in trained.items() if getattr(config, key, 0) in (None, "auto")})
    config = replace(config, k=str(config.k))
    sets = find_queries(config, trained)
    out, data = claim(config, "composed"), sets[0].data

    embedder = open_model(config)
    model, device = embedder.model, embedder.device
    composer, name = composer_of(model), model.config["composer"]
    if "density" in rankings and not composer.probabilistic:
        raise UserError(
            f"The composer '{name}' composes points, which have no density to rank by.", "Use --rankings cosine."
        )
    rankings = rankings or list(dict.fromkeys(["cosine", model.composed_ranking]))
    print(
        f"{config.model} ({name}) on {data.source}, {len(data):,} images, "
        f"{sum(len(one.queries) for one in sets):,} queries, on {device.name} in {device.precision}",
        flush=True,
    )
    gallery = embedder.images(data.images)
    sets = [replace(one, found=embed_queries(embedder, one.data, one.queries)) for one in sets]
    feasible = [one for one in sets if one.combinations != "infeasible"]
    rows = [row for one in feasible for ranking in rankings if (row := measure(gallery, one, ranking))["kinds"]]
    if not rows:
        raise UserError(f"No query of {data.source} has an answer among the images that can be read.", "Use more data.")
    results = {
        **settings(config, embedder, config.split),
        "composer": name,
        "probabilistic": composer.probabilistic,
        "trained": trained,
        "source": data.source,
        "split": data.split,
        "images": len(gallery.kept),
        "images_left_out": left_out(gallery.bad),
        "notes": notes(sets, rows[:: len(rankings)], composer, name, trained),
        "rows": rows,
        "feasibility": feasibility(composer, sets, training_counts(config, data)),
    }
    tables = make_tables(results)
    changes = "The query's own image is left out of the ranking." if rows[0]["combinations"] == "changes" else ""
    page = Page(
        "Composed retrieval",
        f"{config.model} ({name}) on {data.source}{f' ({data.split})' if data.split else ''}, "
        f"{len(gallery.kept):,} images",
        [
            ("Retrieval", [
                "R-P is the share of the R correct images among the first R. Published: the queries of MPC's lists.",
                changes, *results["notes"], tables[0], by_parts(rows, rows[0]["ranking"]),
            ]),
            ("Feasibility", [
                "Can the composition tell that its parts are never together? “all” is the mean of the kinds.",
                *tables[1:], roc_figures(composer, sets),
            ] if results["feasibility"] else []),
            ("Examples", [
                f"Ranked by {rows[0]['ranking']}; a green frame is a correct image.",
                *(block for one in feasible for block in examples(gallery, one, rows[0]["ranking"])),
            ]),
        ],
    )  # fmt: skip
    finish(out, "composed", results, page, [*results["notes"], *tables])


# ---------------------------------------------------------------------------------------------------------- queries


def training_of(model: str) -> dict:
    """ "k", "setup", "seed" and "lists" of a run's composed queries from its config.yaml; defaults if not "known".

    Raises UserError: the file is damaged.
    """
    usual, path = {"k": 2, "setup": "seen", "seed": 0, "lists": None, "known": False}, Path(model)
    file = next((one for one in (path / "config.yaml", path.parent / "config.yaml") if one.is_file()), None)
    if file is None or not path.exists():
        return usual
    try:
        compose = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("compose")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        raise UserError(f"{file} cannot be read.", "Name the model folder itself, or restore the file.") from None
    if not isinstance(compose, dict):
        return usual
    names = {"parts": "k", "setup": "setup", "seed": "seed", "lists": "lists"}
    found = usual | {names[key]: one for key, one in compose.items() if key in names and one is not None}
    if [type(found[key]) for key in ("k", "seed")] != [int, int] or found["setup"] not in ("seen", "unseen"):
        raise UserError(f"{file} has no usable settings of compose.", "Restore the run's file.")
    return found | {"known": True}


def find_queries(config: ComposedConfig, trained: dict) -> list[QuerySet]:
    """All sets, of which the same images are the gallery.

    Raises UserError: a wrong --k; no such data, or too little of it; --k for data that has no combinations.
    """
    words = [word.strip() for word in config.k.split(",")]
    numbers = sorted({int(word) if word.isascii() and word.isdecimal() else 0 for word in words})
    if numbers[0] < 2 or numbers[-1] > MAX_K:
        raise UserError(f"--k is '{config.k[:100]}'.", f"Give numbers from 2 to {MAX_K}, such as 2 or 2,3,4.")
    result = []
    for k in numbers:
        setup = config.setup if k == trained["k"] else "seen"  # queries of another length are new to both setups
        data = find_data(config, config.split, k, setup)
        if not len(data.tuples):
            if config.k != "2":
                raise UserError(f"{config.data} has changes of an attribute, and --k is {config.k}.", "Leave --k out.")
            queries = data.queries or data.sampled_queries(config.queries, config.seed)
            return [QuerySet(2, "changes", data, queries, len({query.concepts for query in queries}))]
        asked: list[tuple[Combinations, np.ndarray, list[Query] | None]] = [("unseen", data.tuples, data.queries)]
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
    where = {"images": config.images, "lists": config.lists, "sizes": config.sizes, "seed": config.seed}
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


# ------------------------------------------------------------------------------------------------------ measurements


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
    """One set of queries by one ranking: of each kind the metrics, and what a random order would reach."""
    found, changes = asked.found, asked.combinations == "changes"
    outcomes = composed_outcomes(gallery, asked.data, found, ranking, asked.ks, without_own=changes)
    names = [f"r@{k}" for k in asked.ks] + ["r_precision"]
    per_query = {name: outcomes.per_query[name] for name in names}
    by_chance = guessed(outcomes.targets, len(gallery.kept), asked.ks)
    combination, kinds = combinations_of(found.queries), {}
    for kind in ("all", *KINDS):
        some = torch.tensor([kind in ("all", one.kind) for one in found.queries]) & (outcomes.targets > 0)
        if some.any():
            kinds[kind] = {
                "queries": int(some.sum()),
                "targets": float(outcomes.targets[some].double().mean()),
                **summarise(per_query, combination, some),
                "guessing": {name: float(values[some].mean()) for name, values in by_chance.items()},
            }
    return {
        "k": asked.k,
        "combinations": asked.combinations,
        "number": asked.number,
        "published": asked.queries is asked.data.queries,
        "left_out": len(asked.queries) - int((outcomes.targets > 0).sum()),
        "ranking": ranking,
        "metrics": names,
        "kinds": kinds,
    }


def feasibility_sets(sets: Sequence[QuerySet]) -> tuple[QuerySet | None, dict[str, QuerySet]]:
    """The infeasible set, if there is one, and the feasible sets of as many parts by name."""
    never = next((one for one in sets if one.combinations == "infeasible"), None)
    return never, {one.combinations: one for one in sets if never and one is not never and one.k == never.k}


def feasibility(composer: Composer, sets: Sequence[QuerySet], counts: Sequence[int]) -> dict | None:
    """AUC of each score against infeasible combinations, of the seen and of the unseen ones; None without any."""
    never, others = feasibility_sets(sets)
    if never is None:
        return None
    return {
        "infeasible": {"combinations": never.number, "queries": len(never.found.queries)},
        "rows": [
            {"score": score, "title": TITLES[score], "feasible": name, "kinds": kinds}
            for name, one in others.items()
            for score, kinds in measure_feasibility(composer, one.found, never.found, counts).items()
        ],
    }


# ----------------------------------------------------------------------------------------------------------- output


def make_tables(results: dict) -> list[Table]:
    """Retrieval by number of parts, combinations and kind of query, then feasibility; in percent."""
    metrics, rows = results["rows"][0]["metrics"], []
    for row in results["rows"]:
        for kind, one in row["kinds"].items():
            set_of = f"{row['number']:,} {row['combinations']}{', published' if row['published'] else ''}"
            rows.append((
                str(row["k"]), set_of, kind, row["ranking"], f"{one['queries']:,}",
                *(plus_minus(one[name]) for name in metrics), f"{one['targets']:.1f}",
                percent(one["guessing"]["r_precision"]),
            ))  # fmt: skip
        rows.append(())
    headings = ("k", "combinations", "queries of", "ranked by", "number", *(NAMES[name] for name in metrics),
                "targets", "guessing R-P")  # fmt: skip
    title = f"composed retrieval among {results['images']:,} images, {results['composer']}, percent"
    tables = [Table(headings, rows, title, left=4)]
    if found := results["feasibility"]:
        kinds = list(dict.fromkeys(kind for row in found["rows"] for kind in row["kinds"]))
        rows = [
            (row["feasible"], row["title"], *(plus_minus(row["kinds"].get(kind)) for kind in kinds))
            for row in found["rows"]
        ]
        number = found["infeasible"]["combinations"]
        title = f"feasibility: ROC AUC against {number:,} infeasible combinations, percent; 50 by chance"
        tables.append(Table(("feasible", "score of infeasibility", *kinds), rows, title, left=2))
    return tables


def by_parts(rows: Sequence[dict], ranking: str) -> list[Figure]:
    """R-Precision against k, by kind of query, of the first set of each k; nothing for a single k."""
    first: dict[int, dict] = {}
    for row in rows:
        if row["ranking"] == ranking:
            first.setdefault(row["k"], row["kinds"])
    curves = {}
    for kind in KINDS:
        if ks := [k for k, kinds in first.items() if kind in kinds]:
            found = [first[k][kind]["r_precision"] for k in ks]
            curves[kind] = (ks, *([100 * one[key] for one in found] for key in ("value", "se")))
    if len(first) < 2:
        return []
    return [line_figure("parts", "parts of a query", "R-Precision, %", curves, "By the number of parts")]


def roc_figures(composer: Composer, sets: Sequence[QuerySet]) -> list[Figure]:
    """ROC curves of the scores against infeasible combinations, of seen and unseen ones, means of kinds; MPC Fig. 5."""
    never, others = feasibility_sets(sets)
    figures = []
    for name, one in others.items():
        chart = Chart(f"roc-{name}", x_label=f"{name} combinations refused, %", y_label="infeasible ones refused, %")
        chart.line([0, 100], [0, 100], "chance", GREY, dashed=True)
        scores = feasibility_strata(composer, one.found, never.found).items()
        for (score, strata), colour in zip(((score, strata) for score, strata in scores if strata), PALETTE):
            wrong, right = (100 * rates for rates in mean_roc_curve(list(strata.values())))
            title = SCORES[score].title.partition(",")[0]
            chart.line(wrong.tolist(), right.tolist(), title, colour, notes=[""] * len(wrong))
        figures.append(Figure(chart, f"Infeasible against {name} combinations"))
    return figures


def examples(gallery: EmbeddedImages, asked: QuerySet, ranking: str) -> list:
    """Some queries of every kind at equal distances: their parts, and the first images of their ranking."""
    counts, rows = positives_of(asked.data, asked.found.queries, gallery.kept).counts.tolist(), []
    for kind in KINDS:
        mine = [row for row, query in enumerate(asked.found.queries) if query.kind == kind and counts[row]]
        rows += [mine[i] for i in evenly(len(mine), EXAMPLES)]
    if not rows:
        return []
    some = asked.found.only(torch.tensor(rows))
    score = ranked_by(gallery, some, ranking, without_own=asked.combinations == "changes")
    closest = closest_items(score, len(rows), len(gallery.kept), DEPTH).tolist()
    cards = [example(gallery, asked.data, query, top) for query, top in zip(some.queries, closest)]
    return [f"k = {asked.k}, {asked.combinations}:", cards]


def example(gallery: EmbeddedImages, data: Compositions, query: Query, top: Sequence[int]) -> Card:
    """A query's parts, and what it found."""
    correct, pictures = set(data.targets(query.concepts).tolist()), [query_part(data, part) for part in query.parts]
    for image in (gallery.kept[place] for place in top):
        note = data.named(data.holds.of_image[image].tolist()) or data.images.places[image].name
        pictures += picture_of(data.images, image, note, verdict(image in correct), SIDE)
    about = f"{len(correct & set(gallery.kept)):,} images are correct"
    return Card(f"{query.kind}: {data.named(query.concepts)}", pictures, [Cell(about)])


def query_part(data: Compositions, part) -> Picture:
    """A part of a query: a picture, or its text."""
    if not part.is_image:
        return Picture("", part.text)
    try:
        return Picture(thumbnail(data.images.part(part.image, part.box), SIDE), data.concepts[part.concept])
    except BadSample:
        return Picture("", f"(an image of {data.concepts[part.concept]})")
