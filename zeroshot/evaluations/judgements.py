"""`python -m zeroshot.retrieval --judgements FILE`: rankings against human judgements."""

from __future__ import annotations

from collections.abc import Sequence

from probemb.data.captions.dataset import CaptionDataset
from probemb.data.captions.judgements import Judgements, read_judgements
from probemb.evaluation.calibration import caption_acceptance, match_calibration
from probemb.evaluation.embed_pairs import EmbeddedPairs
from probemb.evaluation.judgements import evaluate_rankings_of_pairs, judged_pairs
from probemb.evaluation.rankings import TITLES, RankingOptions
from probemb.models import DualEncoder
from probemb.models.ensemble import Ensemble
from probemb.reports.figures import BLUE, GREY, ORANGE, Chart
from probemb.reports.pages import Block, Figure, Table
from probemb.reports.text import between
from zeroshot.retrieval import RetrievalConfig

HEADINGS = {"average_precision": "AP", "roc_auc": "ROC AUC", "average_precision_halves": "AP, mean of halves"}
DRAWN = 20  # pairs of a bin that is drawn; the share of fewer says little
CALIBRATED = {"raw": "the model's own", "refitted": "refitted"}


def read_judged(config: RetrievalConfig, captions: CaptionDataset) -> Judgements | None:
    """The judgements of --judgements, if given. Raises UserError: no such file, or no pairs to order."""
    if config.judgements is None:
        return None
    judgements = read_judgements(config.judgements, captions)
    judged_pairs(judgements)
    return judgements


def evaluate_judgements(
    judgements: Judgements, pairs: EmbeddedPairs, rankings: Sequence[str], options: RankingOptions,
    model: DualEncoder | Ensemble,
) -> dict:  # fmt: skip
    """The "judgements" of results.json. Raises UserError: people agree on all pairs."""
    judged = judged_pairs(judgements)
    found, scores = evaluate_rankings_of_pairs(pairs, judged, rankings, options)
    sampled, closed = scores.get("match-probability"), model.match_form == "csd"
    calibrated = model.probabilistic and model.predicts_matches and (closed or sampled is not None)
    return {
        "pairs": len(judged),
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


# ----------------------------------------------------------------------------------------------------------- output


def judgement_blocks(found: dict) -> list[Block]:
    """A table of every ranking, charts, and lines on calibration and acceptance."""
    versus = f"AP of halves − that of {TITLES[found['reference']]}"
    rows = [
        (row["title"], *(between(row.get(metric)) for metric in HEADINGS),
         between(row["difference"].get("average_precision_halves"), signed=True))
        for row in found["rows"]
    ]  # fmt: skip
    title = (
        f"human judgements, {found['pairs']:,} pairs that are not the caption's own image, {found['accepted']:,} "
        "accepted; intervals of 95 %"
    )
    charts = [reliability(name, both) for name, both in (found["calibration"] or {}).items() if name != "constant"]
    return [Table(("ranked by", *HEADINGS.values(), versus), rows, title), charts, *lines(found)]


def lines(found: dict) -> list[str]:
    """Results that are not in the tables."""
    told = [f"{found['not_in_the_data']:,} judged pairs are not in the data"] if found["not_in_the_data"] else []
    if tolerance := found["tolerance"]:
        chosen = "; ".join(
            f"captions {one['i2t']:g}, images {one['t2i']:g} on {one['images']} images" for one in tolerance["chosen"]
        )
        best = tolerance["oracle"]["best"]
        told += [
            f"tolerance, cross-fitted: weights of u, chosen by AP on the other half of the images: {chosen}",
            f"tolerance, an oracle: AP {best['average_precision']:.3f} over all pairs with weights chosen on them: "
            f"captions {best['i2t']:g}, images {best['t2i']:g}",
        ]
    for name, both in (found["calibration"] or {}).items():
        if name == "constant":
            told.append("the mean acceptance rate, {share:.3f}, for every pair: Brier score {brier:.4f}".format(**both))
            continue
        told += [
            f"match probability ({name}), {title}: ECE {both[key]['ece']:.4f} of the human acceptance rate, "
            f"Brier score {both[key]['brier']:.4f}"
            for key, title in CALIBRATED.items()
            if both[key]
        ]
    if acceptance := found["acceptance"]:
        told.append(
            "uncertainty of captions against human acceptance, the share of their judged images: Spearman "
            f"{between(acceptance['spearman'], signed=True)} over {acceptance['captions']:,} captions"
        )
    return told


def reliability(name: str, both: dict) -> Figure:
    """Human acceptance against the match probability, in bins of at least DRAWN pairs."""
    slug = f"reliability-{name.replace(' ', '-')}"
    chart = Chart(slug, x_label="match probability", y_label="human acceptance rate")
    chart.line([0, 1], [0, 1], "calibrated", GREY, dashed=True)
    for key, colour in (("raw", BLUE), ("refitted", ORANGE)):
        columns = [both[key][column] for column in ("predicted", "observed", "counts")] if both[key] else [[]]
        if bins := [row for row in zip(*columns) if row[2] >= DRAWN]:
            xs, ys, _ = zip(*bins)
            chart.line(xs, ys, CALIBRATED[key], colour, points=True)
    return Figure(chart, f"Match probability, {name}", f"Bins of at least {DRAWN} pairs.")
