"""`python -m zeroshot.uncertainty`: what a model's uncertainty is worth, every score on the same queries.

N images, M captions, C classes, P prompts of a class, D dimensions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from probemb.conformal import evaluate_sets
from probemb.data.captions.judgements import read_judgements
from probemb.data.image_loader import describe_bad
from probemb.data.labelled import Images, ZeroShotSet, find_classes, find_unlabelled
from probemb.errors import UserError
from probemb.evaluation.confidence import (
    BASELINES,
    MEASURES,
    SAME,
    Confidence,
    Task,
    U,
    compare,
    fitted_confidences,
    measure,
    unlabelled_confidences,
    verdict,
)
from probemb.evaluation.embedding import Embedder, centre, centres, embed_classes, embed_pairs, true_ambiguity
from probemb.evaluation.judgements import accepted_shares, judged_pairs
from probemb.evaluation.uncertainty import PARTS, drawn, probe
from probemb.metrics.selective import nearest_is_of_class, retrieval_levels
from probemb.metrics.uncertainty import rejection_curve
from probemb.progress import progress
from probemb.reports.pages import Block, Cell, Figure, Page, Table, line_figure, rejection_figure
from probemb.reports.text import between, number, percent, plus_minus
from zeroshot.evaluations import runner
from zeroshot.evaluations.imagenet import softmax_scale
from zeroshot.uncertainty import UncertaintyConfig

FEW = 20  # right or wrong answers, below which the page warns
PAIRS = 1 << 24  # of queries and gallery items; of more queries some are drawn
QUERIES = {"captions": "captions → images", "images": "images → captions", "classes": "images → classes"}
QUESTIONS = (  # the queries and the measure that answer each
    ("Which captions fail to find their image?", "captions", "auroc"),
    ("What risk is left once the least certain captions are refused?", "captions", "aurc"),
    ("Which captions fit many images?", "captions", "ambiguity"),
    ("Which captions do people accept for many images?", "captions", "acceptance"),
    ("Which images fail to find a caption?", "images", "auroc"),
    ("Which classifications are wrong?", "classes", "auroc"),
    ("What risk is left once the least certain classifications are refused?", "classes", "aurc"),
    ("Which images have a nearest neighbour of another class?", "classes", "r_auroc"),
    ("Which images show none of the classes?", "classes", "ood_auroc"),
)
CHARTED = (U, "probit softmax", "adapter's softmax", "max softmax", "entropy", "logistic regression with u")
NOTES = (
    "± is half of the 95 % interval over resampled items, the same for all scores of a group; green is better and red "
    "worse than the group's best score that needs neither labels nor variances, by a paired interval without zero. "
    "Scores with labels are few-shot: fitted on one half of the queries and applied to the other, both ways round. The "
    "adapter's softmax was fitted on pairs that finetune.adapt held out."
)  # fmt: skip
TERMS = (
    "Scores: u is the sum of an item's variances; max softmax, margin, entropy and DOCTOR are of the softmax over the "
    "gallery, energy of its logits; MCM is the largest probability at temperature 1; probit softmax and match "
    "probability include the variances. Measures: AUROC, FPR95 and AURC of telling wrong first answers from right ones "
    "(E-AURC: above the least possible AURC); R-AUROC, of a nearest neighbour of another class; OOD, of images of no "
    "class; ECE, the mean gap between probability and accuracy; Spearman with true ambiguity, or with the share that "
    "people accept; −S·R², 1 if right answers fall evenly over levels of the score."
)  # fmt: skip


def evaluate(config: UncertaintyConfig) -> None:
    """Answer every question that the data allow. Raises UserError."""
    needs = [name for name in ("ood", "class_names", "templates", "class_conditional") if getattr(config, name)]
    if needs and not config.classes:
        option = f"--{needs[0].replace('_', '-')}"
        raise UserError(f"{option} needs labelled images.", f"Name them with --classes, or leave {option} out.")
    captions = runner.open_captions(config)
    judgements = None if config.judgements is None else read_judgements(config.judgements, captions)
    ood = find_unlabelled(config.ood, config.exif) if config.ood else None
    if labelled := config.classes:
        labelled = find_classes(config.classes, config.class_names, config.templates, config.exif)
    run, outcomes = runner.start(config, "uncertainty"), {}
    embedder = run.embedder
    pairs = centres(embed_pairs(embedder, captions))
    if captions.truth is not None:
        outcomes["ambiguity"] = true_ambiguity(pairs.data)
    if judgements is not None:
        judgements = judgements.among(torch.tensor(captions.owner()), pairs.kept)
        outcomes["acceptance"] = accepted_shares(judged_pairs(judgements, 0), len(pairs.texts))
    words = torch.tensor([len(text.split()) for text in pairs.data.flat()], dtype=torch.float64)
    scale, source = softmax_scale(embedder.model)
    of_images = {"scale": scale or 1.0, "model": embedder.model.match_model}
    of_texts, adapter = dict(of_images), getattr(embedder.model, "adapter", None)
    if adapter is not None:
        for about, fitted, side in zip((of_images, of_texts), adapter.temperature, (adapter.image, adapter.text)):
            about |= {"temperature": fitted, "epistemic": getattr(side, "epistemic", None)}
    n, m = len(pairs.images), len(pairs.texts)
    rows, columns = (drawn(k, max(1, PAIRS // other)).sort().values for k, other in ((m, n), (n, m)))
    group = pairs.owner[rows].unique(return_inverse=True)[1]
    by_caption = Task(pairs.texts[rows], pairs.images, pairs.owner[rows], group, **of_texts)
    own = pairs.owner == columns[:, None]
    by_image = Task(pairs.images[columns], pairs.texts, own, torch.arange(len(columns)), **of_images)
    of_captions = {key: x[rows] for key, x in outcomes.items()}
    results: dict[str, Any] = {
        "images": n, "captions": m, "scale": {"value": scale, "source": source},
        "adapter_parameters": adapter and sum(x.numel() for x in adapter.state_dict().values()),
        "queries": {
            "captions": answered(config, by_caption, of_captions, length=words[rows]),
            "images": answered(config, by_image, {}),
        },
        "sets": {"captions": sets_of(config, by_caption)},
        "inputs": probe(embedder, pairs, words, config.probes) if embedder.model.probabilistic else None,
    }  # fmt: skip
    if labelled:
        results["queries"]["classes"], results["sets"]["classes"] = classify(config, embedder, of_images, labelled, ood)
    run.finish(results, make_page(config, results), pairs.bad, captions.split)


def sets_of(config: UncertaintyConfig, task: Task, *more: bool) -> list[dict]:
    """The prediction sets of a task with one true answer each."""
    variants, about = task.variants(), (task.truth, task.group, config.alpha, config.splits)
    with progress("prediction sets", config.splits * len(variants)) as advance:
        return evaluate_sets(variants, *about, *more, advance=advance)


def answered(
    config: UncertaintyConfig, task: Task, outcomes: Mapping[str, Tensor], length: Tensor | None = None,
    nearest: Tensor | None = None, ood: Task | None = None,
) -> dict:  # fmt: skip
    """Every score's measures of telling right answers from wrong ones, with its levels and rejection curve."""
    scores = unlabelled_confidences(task)
    if length is not None:
        scores["length"] = Confidence(length)
    scores |= fitted_confidences(task, scores, config.vilu)
    known = None if ood is None else unlabelled_confidences(ood)
    with progress("scores, resampled", len(scores)) as advance:
        rows = compare(measure(task, scores, outcomes, config.levels, nearest, known, advance), scores)
    for row in rows:
        u = -scores[row["score"]].values
        levels = retrieval_levels(u, task.right, torch.ones(1, len(u)), config.levels)
        row |= {"levels": {key: x[0].tolist() for key, x in levels.items()}, "refusing": rejection_curve(u, task.right)}
    right = {name: task.are_right(logits.argmax(1)).double().mean().item() for name, logits in task.logits.items()}
    return {"items": len(task.right), "gallery": len(task.gallery), "right": right, "rows": rows}


def classify(
    config: UncertaintyConfig, embedder: Embedder, about: dict, data: ZeroShotSet, ood: Images | None
) -> tuple[dict, list[dict]]:
    """The answers and the prediction sets of labelled images. Raises UserError."""
    found, unknown = embed_classes(embedder, data), None
    bad = found.bad
    task = Task(found.images, centre(found.prompts), found.labels, torch.arange(len(found.labels)), **about)
    if ood is not None:
        other, _, unread = embedder.images(ood, "OOD images")
        bad = [*bad, *unread]
        unknown = replace(task, queries=other, truth=None, group=torch.arange(len(other)))
    nearest = nearest_is_of_class(found.images.mean, task.truth)
    if bad:
        print(describe_bad(bad), flush=True)
    lost = [{"name": name, "reason": reason} for name, reason in bad]
    about = {"images_left_out": lost, "ood_images": unknown and len(unknown.queries)}
    sets = sets_of(config, task, config.class_conditional, True)
    return answered(config, task, {}, nearest=nearest, ood=unknown) | about, sets


def make_page(config: UncertaintyConfig, results: dict) -> Page:
    """One chart and a sentence for each question, then the tables."""
    queries, sets = results["queries"], results["sets"]
    lines = [told(queries[of]["rows"], text, key) for text, of, key in QUESTIONS if of in queries]
    few = [few_line(of, found) for of, found in queries.items()]
    figures = [figure for side in queries for figure in charts(side, queries[side])]
    sections: list[tuple[str, list[Block]]] = [
        ("In short", [figures[:1], *few, *lines, *(calibration_line(of, one) for of, one in queries.items()),
                      *(size_line(config, of, rows) for of, rows in sets.items()), *input_lines(results["inputs"])]),
        ("Every score on the same items", [NOTES, TERMS, score_table(queries)]),
        ("Prediction sets", [
            f"Sets that should hold the truth for {100 * (1 - config.alpha):g} % of items; {config.splits} splits; "
            "the band holds 95 % of splits. Half of the items calibrate; 30 % of these choose a temperature, k_reg and "
            "λ, the others the threshold. An image's captions count as one item. Smaller: than with the means alone. "
            "Top k, one whole number for all, may hold more; transported, which sees the tested images, guarantees "
            "nothing.",
            "Each class has a threshold, so that the band does not apply; those of few images are in all sets."
            if config.class_conditional else "", set_table(sets)]),
        ("Refusing, and levels of uncertainty", [figures[1:]]),
    ]  # fmt: skip
    size = f"{results['images']:,} images, {results['captions']:,} captions"
    size += f"; {results['adapter_parameters']:,} parameters added" if results["adapter_parameters"] else ""
    return Page("The worth of an uncertainty", f"{config.model} on {config.data}: {size}", sections)


def told(rows: Sequence[dict], question: str, key: str) -> str:
    """One sentence on the best of the model's own scores by a measure, or of the others; "" where nothing has it."""
    known = [row for row in rows if key in row]
    best, own, fitted = (
        max(some, key=lambda row: MEASURES[key][1] * row[key]["value"], default=None)
        for some in (
            [row for row in known if not row["labels"] and not row["own"]],
            [row for row in known if not row["labels"] and row["own"]],
            [row for row in known if row["labels"]],
        )
    )
    if best is None:
        return ""
    text, free = f"{question} {MEASURES[key][0]}: ", f"{best['score']} {between(best[key])}"
    if own:
        than = "not told apart from" if verdict(own, key) == SAME else f"{verdict(own, key)} than"
        apart = between(own[key]["differences"][best["score"]], signed=True)
        text += f"{own['score']} {between(own[key])}, {than} the best without labels or variances, {free}: {apart}"
    else:
        level = [row["score"] for row in known if row is not best and not row["labels"] and verdict(row, key) == SAME]
        text += free + (f", not told apart from {', '.join(level)}" if level else "")
    return text + (f"; with {fitted['labels']:,} labels, {fitted['score']} {between(fitted[key])}." if fitted else ".")


def few_line(of: str, found: dict) -> str:
    """A warning where almost all answers are right, or wrong; else ""."""
    right = round(found["right"]["means"] * found["items"])
    fewer, kind = min((right, "right"), (found["items"] - right, "wrong"))
    if fewer >= FEW:
        return ""
    share = f"{fewer:,} of {found['items']:,} first answers ({QUERIES[of]}) are {kind}"
    return f"Only {share}: too few to tell scores apart, whatever the intervals say."


def calibration_line(of: str, found: dict) -> str:
    """ECE and NLL before and after a temperature, and of the probit softmax."""
    rows = [row for row in found["rows"] if "ece" in row and "nll" in row]
    told = (f"{row['score']} {between(row['ece'])} (NLL {row['nll']['value']:.3f})" for row in rows)
    queries = f"{QUERIES[of]}, {found['items']:,} among {found['gallery']:,}"
    text = f"Are the probabilities of the first answers right ({queries})? ECE: "
    return f"{text}{'; '.join(told)}." if rows else ""


def size_line(config: UncertaintyConfig, of: str, rows: Sequence[dict]) -> str:
    """The smallest sets without and with the variances."""
    sets = [row for row in rows if row["score"] in ("LAC", "APS", "RAPS")]
    plain, own = (
        min((row for row in sets if (row["by"] == "means") == by_means), default=None, key=lambda row: row["size"])
        for by_means in (True, False)
    )
    top = next(row for row in rows if row["score"] == "top k")
    text = f"How many results hold the right one for {100 * (1 - config.alpha):g} % of queries ({QUERIES[of]})? "
    text += f"{number(top['size'])} if always as many, {number(plain['size'])} on average by {plain['score']}"
    if own:
        apart, less = own["smaller"], own["smaller"]["value"]
        text += f"; with the variances, {number(own['size'])} by {own['score']} of {own['by']}: "
        fewer = f"{number(abs(less))} {'fewer' if less > 0 else 'more'} than without them"
        text += SAME if apart["low"] <= 0 <= apart["high"] else fewer
    return f"{text}."


def input_lines(found: dict | None) -> list[str]:
    """Sentences on what u responds to."""
    if found is None:
        return []
    lines = [f"u of captions against their number of words: Spearman {plus_minus(found['length'], 1, 3, signed=True)}."]
    if found["larger_of_nested"]:
        lines.append(
            f"Share of pairs of captions whose more general one has the larger u: {between(found['larger_of_nested'])}."
        )
    if test := found["crop"]:
        lines.append(f"When cropped, {plus_minus(test['share'])} % of {test['images']:,} images have a larger u.")
    rises = [
        f"{PARTS.get(what, what)} {one['spearman']:+.3f}"
        for what, one in (found["erased"] or {}).items() if one["spearman"]
    ]  # fmt: skip
    return lines + ([f"u against the share that is erased, Spearman: {', '.join(rises)}."] if rises else [])


def score_table(queries: Mapping[str, dict]) -> Table:
    """All scores of all queries by every measure."""
    every = [row for found in queries.values() for row in found["rows"]]
    keys = [key for key in MEASURES if any(key in row for row in every)]
    apart = [f"AURC − {name}'s" for name in BASELINES]
    cells: list = []
    for of, found in queries.items():
        for row in found["rows"]:
            values = [cell(row, key) for key in keys]
            labels = f"{row['labels']:,}" if row["labels"] else "none"
            values += [cell(row, "aurc", name) for name in BASELINES]
            cells.append((of, row["score"], labels, *values))
        cells.append(())
    right = ", ".join(f"{QUERIES[of]} {percent(found['right']['means'])} %" for of, found in queries.items())
    headings = ("queries", "score", "labels needed", *(MEASURES[key][0] for key in keys), *apart)
    return Table(headings, cells, f"first answers right: {right}", left=2)


def cell(row: dict, key: str, than: str | None = None) -> Cell:
    """A measure with half of its interval, marked against the best free score; than: its difference to another one."""
    found = row.get(key) if than is None else row[key]["differences"].get(than)
    if not found:
        return Cell("")
    kind = {"better": "up", "worse": "down", SAME: ""}[verdict(row, key, than)]
    return Cell(f"{found['value']:{'.3f' if than is None else '+.3f'}} ±{(found['high'] - found['low']) / 2:.3f}", kind)


def set_table(sets: Mapping[str, Sequence[dict]]) -> Table:
    """Coverage and size of prediction sets."""
    cells: list = []
    for of, rows in sets.items():
        for row in rows:
            gap = percent(row["class_gap"]) if of == "classes" else ""
            cells.append((
                of, row["score"], row["by"], percent(row["coverage"]),
                *("–".join(map(percent, pair)) for pair in ((row["least"], row["most"]), row["band"])),
                f"{100 * row['inside']:.0f}", number(row["size"]), between(row.get("smaller"), signed=True),
                percent(row["empty"]), gap,
            ))  # fmt: skip
        cells.append(())
    headings = ("queries", "sets by", "of", "coverage %", "least–most", "band", "inside %", "mean size", "smaller")
    return Table((*headings, "empty %", "class gap %"), cells, "prediction sets", left=3)


def charts(side: str, found: dict) -> list[Figure]:
    """R@1 or accuracy of what is left when the least certain are refused, and of equal groups."""
    rows = {row["score"]: row for row in found["rows"] if row["score"] in CHARTED}
    curves = {name: row["refusing"] for name, row in rows.items()}
    levels = {
        name: (range(1, len(row["levels"]["r@1"]) + 1), [100 * x for x in row["levels"]["r@1"]])
        for name, row in rows.items()
    }
    right = "right answers among the others, %"
    return [
        *rejection_figure(f"refusing-{side}", curves, right, QUERIES[side]),
        line_figure(f"levels-{side}", "level, from certain to uncertain", "right answers, %", levels, QUERIES[side]),
    ]
