"""Composed retrieval: queries of several images and texts, and the images that have all that they ask for.

    python -m zeroshot.composed --model runs/mpc --data data/scenes/compositions            # make_scenes --compositions
    python -m zeroshot.composed --model runs/mpc --data data/scenes/compositions --k 2,3,4 --rankings density
    python -m zeroshot.composed --model runs/coco --data annotations/instances_train2017.json --lists data/coco_text/mpc
    python -m zeroshot.composed --model runs/tirg --data data/fashion200k

The model was trained with `finetune --method mpc` or a rival. Prints R@5, R@10 and R-Precision of queries of images,
mixtures and texts, for combinations that were trained on and such that were not, and how well the composition's
uncertainty tells combinations that occur in no image; of Fashion200k R@1, 10 and 50. Writes results.json and
report.html. Source: MPC §4, Tables 1 to 3, Fig. 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config, to_dict
from probemb.errors import UserError, nearest
from zeroshot.crops import COMPOSED_GENERATOR, ComposedConfig

if TYPE_CHECKING:
    from probemb.evaluation.embedding import EmbeddedImages, Embedder
    from probemb.models import DualEncoder
    from probemb.models.composers import Composer
    from zeroshot.questions import Asked, Questions, Trained

PROG = "python -m zeroshot.composed"
DESCRIPTION = (
    "Composed retrieval: R@5, R@10 and R-Precision of queries of several images and texts, and the feasibility of "
    "combinations; prints tables and writes results.json and report.html."
)
OUTPUTS = ("results.json", "report.html")
RANKINGS = ("cosine", "density")
NO_VARIANCE = (
    "The composer '{}' composes points: its compositions have no density and no uncertainty. Feasibility is scored by "
    "the distance of the parts alone, as in the paper."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; wrong options are refused before the model is loaded."""
    config = parse_config(ComposedConfig, PROG, DESCRIPTION, argv)
    rankings = check(config)
    from probemb.cli.results import claim_files, results_folder
    from zeroshot.questions import find_questions, training_of, with_training

    trained = training_of(config.model)
    config = with_training(config, trained)
    questions = find_questions(config, trained)
    out = results_folder(config.out, config.model, "composed", "zeroshot-results/composed")
    claim_files(out, OUTPUTS, COMPOSED_GENERATOR)
    evaluate(config, trained, questions, rankings, out)
    return 0


def check(config: ComposedConfig) -> list[str]:
    """The rankings of --rankings, or an empty list; refuses options that are missing or wrong."""
    for option, what in (("model", "a run with a composer"), ("data", "images with concepts")):
        if not getattr(config, option):
            raise UserError(f"--{option} is missing.", f"Name {what}: `{PROG} --model runs/mpc --data PATH`.")
    given = [] if config.rankings is None else config.rankings.split(",")
    names = list(dict.fromkeys(name.strip() for name in given))
    for name in names:
        if name not in RANKINGS:
            raise UserError(f"There is no ranking '{name}'.{nearest(name, RANKINGS)}", "Choose cosine or density.")
    if config.k is not None:
        from zeroshot.questions import parts_asked

        parts_asked(config.k)
    return names


def evaluate(
    config: ComposedConfig, trained: Trained, questions: Sequence[Questions], rankings: Sequence[str], out: Path
) -> None:
    """Load the model, embed gallery and queries, and write the results into `out`."""
    from probemb.cli.device import choose_device
    from probemb.cli.progress import progress
    from probemb.cli.results import write_json
    from probemb.data.image_loader import describe_bad
    from probemb.evaluation.composed import embed_queries
    from probemb.evaluation.embedding import Embedder
    from probemb.models import load_model
    from zeroshot.questions import Asked, training_counts
    from zeroshot.reports.composed import write_report

    device = choose_device(config.device, config.precision)
    model, tokenizer, transforms = load_model(config.model, device.name, config.resize)
    rankings = rankings_of(model, rankings)
    embedder = Embedder(
        model, tokenizer, transforms.evaluate, device, config.batch_size, config.text_batch_size, config.workers,
        config.max_bad, progress,
    )  # fmt: skip
    first = questions[0]
    print(
        f"{config.model} ({name_of(model)}) on {first.data.source}, {len(first.data):,} images, "
        f"{sum(len(one.queries) for one in questions):,} queries, on {device.name} in {device.precision}",
        flush=True,
    )
    gallery = embedder.images(first.data.images)
    if gallery.bad:
        print(describe_bad(gallery.bad), flush=True)
    asked = [Asked(one, embed_queries(embedder, one.data, one.queries)) for one in questions]
    results = {
        "config": to_dict(config),
        "device": device.name,
        "precision": device.precision,
        **describe(embedder, trained, gallery, asked, rankings, training_counts(config, first.data)),
    }
    print_tables(results)
    write_json(out / OUTPUTS[0], results, COMPOSED_GENERATOR)
    write_report(out / OUTPUTS[1], results, gallery, asked, model.composer)
    print(f"\nwritten: {out / OUTPUTS[0]}, {out / OUTPUTS[1]}", flush=True)


def name_of(model: DualEncoder) -> str:
    """Name of the model's composer."""
    return model.config["composer"]


def rankings_of(model: DualEncoder, given: Sequence[str]) -> Sequence[str]:
    """The given rankings, or else the cosine, and the density if the composer was trained for it.

    Raises UserError: the model has no composer, or compositions of points are to be ranked by a density.
    """
    from probemb.evaluation.composed import composer_of

    probabilistic = composer_of(model).probabilistic
    if "density" in given and not probabilistic:
        raise UserError(
            f"The composer '{name_of(model)}' composes points, which have no density to rank by.",
            "Use --rankings cosine.",
        )
    return given or list(dict.fromkeys(["cosine", model.composed_ranking]))


def describe(
    embedder: Embedder, trained: Trained, gallery: EmbeddedImages, asked: Sequence[Asked], rankings: Sequence[str],
    training_counts: Sequence[int],
) -> dict:  # fmt: skip
    """The content of results.json, less the settings. Metrics are shares in [0, 1]; errors over combinations.

    `training_counts`: training images of every concept.
    """
    composer, data = embedder.model.composer, asked[0].questions.data
    notes = list(dict.fromkeys(note for one in asked for note in one.questions.data.notes))
    if not composer.probabilistic:
        notes.append(NO_VARIANCE.format(name_of(embedder.model)))
    if not trained.known:
        notes.append("The model has no config.yaml: it is taken to be trained on pairs, in splits and lists of seed 0.")
    rows = [
        measure(gallery, one, ranking)
        for one in asked
        if one.questions.combinations != "infeasible"
        for ranking in rankings
    ]
    rows = [row for row in rows if row["kinds"]]
    if not rows:
        raise UserError(f"No query of {data.source} has an answer among the images that can be read.", "Use more data.")
    notes += [
        f"{row['left_out']:,} of the queries of {row['number']:,} {row['combinations']} combinations of {row['k']} are "
        "left out: a part cannot be read, or no correct image."
        for row in rows[:: len(rankings)]
        if row["left_out"]
    ]
    return {
        "composer": name_of(embedder.model),
        "probabilistic": composer.probabilistic,
        "trained": {"k": trained.parts, "setup": trained.setup, "seed": trained.seed, "known": trained.known},
        "source": data.source,
        "split": data.split,
        "images": len(gallery.kept),
        "images_left_out": [{"name": name, "reason": reason} for name, reason in gallery.bad],
        "notes": notes,
        "rows": rows,
        "feasibility": feasibility(composer, asked, training_counts),
    }


def measure(gallery: EmbeddedImages, asked: Asked, ranking: str) -> dict:
    """One set of queries by one ranking: of each kind the metrics, and what a random order would reach."""
    import torch

    from probemb.data.compositions.queries import KINDS
    from probemb.evaluation.composed import composed_outcomes, guessed
    from probemb.evaluation.feasibility import combinations_of
    from probemb.metrics.localisation import summarise

    questions, found = asked.questions, asked.found
    outcomes = composed_outcomes(gallery, questions.data, found, ranking, asked.ks, without_own=asked.changes)
    names = [f"r@{k}" for k in asked.ks] + ["r_precision"]
    per_query = {name: outcomes.per_query[name] for name in names}
    random = guessed(outcomes.targets, len(gallery.kept), asked.ks)
    combination, kinds = combinations_of(found.queries), {}
    for kind in ("all", *KINDS):
        some = torch.tensor([kind in ("all", one.kind) for one in found.queries]) & (outcomes.targets > 0)
        if some.any():
            kinds[kind] = {
                "queries": int(some.sum()),
                "targets": float(outcomes.targets[some].double().mean()),
                **summarise(per_query, combination, some),
                "guessing": {name: float(values[some].mean()) for name, values in random.items()},
            }
    return {
        "k": questions.k,
        "combinations": questions.combinations,
        "number": questions.number,
        "published": questions.queries is questions.data.queries,
        "left_out": len(questions.queries) - int((outcomes.targets > 0).sum()),
        "ranking": ranking,
        "metrics": names,
        "kinds": kinds,
    }


def feasibility(composer: Composer, asked: Sequence[Asked], training_counts: Sequence[int]) -> dict | None:
    """AUC of each score against infeasible combinations, of the seen and of the unseen ones; None without any."""
    from probemb.evaluation.feasibility import TITLES, measure_feasibility
    from zeroshot.questions import feasibility_sets

    never, sets = feasibility_sets(asked)
    if never is None:
        return None
    found = {name: measure_feasibility(composer, one.found, never.found, training_counts) for name, one in sets.items()}
    return {
        "infeasible": {"combinations": never.questions.number, "queries": len(never.found.queries)},
        "rows": [
            {"score": score, "title": TITLES[score], "feasible": name, "kinds": kinds}
            for name, scores in found.items()
            for score, kinds in scores.items()
        ],
    }


# ------------------------------------------------------------------------------------------------------- output


def print_tables(results: dict) -> None:
    """Retrieval by number of parts, combinations and kind of query, then feasibility; in percent."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # four metrics of Fashion200k with their errors
    for note in results["notes"]:
        console.print(f"note: {note}", highlight=False)
    console.print(retrieval_table(results))
    if results["feasibility"]:
        console.print(feasibility_table(results["feasibility"]))
    else:
        console.print("feasibility: not measured, the data has no infeasible combinations for this setup", style="dim")


def retrieval_table(results: dict):
    """A line for each number of parts, set, kind of query and ranking."""
    from rich.table import Table

    from zeroshot.questions import NAMES

    metrics = results["rows"][0]["metrics"]
    table = Table(title=f"composed retrieval among {results['images']:,} images, {results['composer']}, percent")
    for heading in ("k", "combinations", "queries of", "number", "ranked by"):
        table.add_column(heading, justify="right" if heading in ("k", "number") else "left")
    for name in metrics:
        table.add_column(NAMES[name], justify="right")
    table.add_column("guessing R-P", justify="right")
    for row in results["rows"]:
        for i, (kind, one) in enumerate(row["kinds"].items()):
            start = ("", "") if i else (str(row["k"]), f"{row['number']:,} {row['combinations']}")
            cells = [share(one[name]) for name in metrics]
            random = f"{100 * one['guessing']['r_precision']:.2f}"
            last = i + 1 == len(row["kinds"])
            table.add_row(*start, kind, f"{one['queries']:,}", row["ranking"], *cells, random, end_section=last)
    return table


def feasibility_table(found: dict):
    """A line for each score, ROC AUC in percent by kind of query."""
    from rich.table import Table

    kinds = list(dict.fromkeys(kind for row in found["rows"] for kind in row["kinds"]))
    number = found["infeasible"]["combinations"]
    table = Table(title=f"feasibility: ROC AUC against {number:,} infeasible combinations, percent; 50 by chance")
    table.add_column("feasible")
    table.add_column("score of infeasibility")
    for kind in kinds:
        table.add_column(kind, justify="right")
    previous = None
    for row in found["rows"]:
        if previous not in (None, row["feasible"]):
            table.add_section()
        cells = [share(row["kinds"][kind]) if kind in row["kinds"] else "" for kind in kinds]
        table.add_row("" if previous == row["feasible"] else row["feasible"], row["title"], *cells)
        previous = row["feasible"]
    return table


def share(estimate: dict) -> str:
    """{"value", "se"} in percent: "51.20 ± 0.43"."""
    return f"{100 * estimate['value']:.2f} ± {100 * estimate['se']:.2f}"


if __name__ == "__main__":
    run_command(main)
