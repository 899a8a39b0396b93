"""`python -m zeroshot.retrieval --judgements FILE`: rankings against human judgements, and against another model.

The scores of the judged pairs are kept beside the results, in SCORES, so that another model can later be compared with
them by the paired bootstrap (`--compare FOLDER`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from probemb.data.captions.dataset import CaptionDataset
from probemb.data.captions.judgements import Judgements, read_judgements
from probemb.errors import UserError
from probemb.evaluation.calibration import accepted_shares, caption_acceptance, match_calibration
from probemb.evaluation.embed_pairs import EmbeddedPairs
from probemb.evaluation.judgements import (
    CROSS_FITTED,
    JudgedPairs,
    Resampled,
    differences,
    evaluate_rankings_of_pairs,
    judged_pairs,
    ranking_metrics,
)
from probemb.evaluation.rankings import TITLES, RankingOptions
from probemb.files import replace_file
from probemb.models import DualEncoder
from probemb.models.ensemble import Ensemble
from probemb.reports.figures import BLUE, GREY, ORANGE, Chart
from probemb.reports.pages import Block, Figure, Table
from probemb.reports.text import between
from zeroshot.retrieval import RetrievalConfig

SCORES = "judgements.safetensors"
KNOWN = {*TITLES, CROSS_FITTED}
HEADINGS = {"average_precision": "AP", "roc_auc": "ROC AUC", "average_precision_halves": "AP, mean of halves"}
DRAWN = 20  # pairs of a bin that is drawn; the share of fewer says little
CALIBRATED = {"raw": "the model's own", "refitted": "refitted"}


class HumanJudgements(NamedTuple):
    """The judgements of the data, and the scores of another model to compare with."""

    judgements: Judgements
    other: OtherScores | None

    def held(self, pairs: EmbeddedPairs, captions: CaptionDataset) -> Judgements:
        """Those of the embedded pairs."""
        return self.judgements.among(torch.tensor(captions.owner()), pairs.kept)


class OtherScores(NamedTuple):
    """Scores of another model by ranking, (P,) each; the digest of the pairs; the models' names; the file."""

    scores: dict[str, Tensor]
    pairs: str
    models: list[str]
    file: Path


def read_judged(config: RetrievalConfig, captions: CaptionDataset) -> HumanJudgements | None:
    """Read the files of --judgements and --compare; None without --judgements.

    Raises UserError: files that cannot be read, or pairs of which none can be put in order.
    """
    if config.judgements is None:
        return None
    judgements = read_judgements(config.judgements, captions)
    judged_pairs(judgements)
    return HumanJudgements(judgements, None if config.compare is None else load_scores(Path(config.compare)))


def evaluate_judgements(
    given: HumanJudgements | None, pairs: EmbeddedPairs, captions: CaptionDataset, rankings: Sequence[str],
    options: RankingOptions, model: DualEncoder | Ensemble, models: Sequence[str], out: Path,
) -> dict | None:  # fmt: skip
    """The "judgements" of results.json; writes SCORES into `out`, or removes an earlier one if nothing is judged.

    Raises UserError: people agree on all pairs; the results to compare with are of other pairs.
    """
    if given is None:
        (out / SCORES).unlink(missing_ok=True)
        return None
    held = given.held(pairs, captions)
    judged = judged_pairs(held)
    found, scores, metrics = evaluate_rankings_of_pairs(pairs, judged, rankings, options)
    results = {
        "pairs": len(judged),
        "accepted": int(judged.label.sum()),
        "images": len(judged.image.unique()),
        "captions": len(judged.caption.unique()),
        "own_left_out": int(held.own.sum()),
        "not_in_the_data": held.unknown,
        "resamples": len(judged.clusters[0][1]) - 1,
        **found,
        "calibration": None,
        "acceptance": None,
        "compared": None if given.other is None else compared(given.other, judged, metrics),
    }
    sampled, closed = scores.get("match-probability"), model.match_form == "csd"
    if model.probabilistic and model.predicts_matches and (closed or sampled is not None):
        results["calibration"] = match_calibration(pairs, judged, options, sampled, closed)
    if model.probabilistic:
        results["acceptance"] = caption_acceptance(pairs, judged)
    about = {"generator": "probemb retrieval", "pairs": judged.digest(), "models": json.dumps(list(models))}
    tensors = {name: score.contiguous() for name, score in scores.items()}
    replace_file(out / SCORES, lambda aside: save_file(tensors, aside, about))
    return results


def accepted_share_of_captions(
    given: HumanJudgements | None, pairs: EmbeddedPairs, captions: CaptionDataset
) -> Tensor | None:
    """(M,) `accepted_shares` of all captions; None without judgements."""
    return given and accepted_shares(judged_pairs(given.held(pairs, captions), 0), len(pairs.texts))


def load_scores(path: Path) -> OtherScores:
    """Scores of another evaluation, from SCORES or its folder. Raises UserError: no such file, or damaged scores."""
    file = path / SCORES if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path} holds no scores of judged pairs.", f"Name results with {SCORES}, of --judgements.")
    try:
        with safe_open(file, "pt") as opened:
            about = opened.metadata() or {}
            scores = {name: opened.get_tensor(name).float() for name in opened.keys() if name in KNOWN}  # noqa: SIM118
        models = [str(name) for name in json.loads(about["models"])]
        if not scores or not all(len(s.shape) == 1 and torch.isfinite(s).all() for s in scores.values()):
            raise ValueError("there are no finite scores of any ranking")
        return OtherScores(scores, about["pairs"], models, file)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        what = f"{file} holds no scores of judged pairs: {str(error)[:200]}."
        raise UserError(what, "Evaluate that model again with --judgements.") from None


def compared(other: OtherScores, judged: JudgedPairs, metrics: dict[str, Resampled]) -> dict:
    """Differences of every ranking from every ranking of another model.

    Returns:
        "with", "models"; "reference": the other model's ranking that tables show; "differences": ranking -> other
        ranking -> metric -> {"value", "low", "high"}.

    Raises UserError: the scores are of other pairs.
    """
    if other.pairs != judged.digest() or any(s.shape != judged.label.shape for s in other.scores.values()):
        raise UserError(
            f"{other.file} scores other judged pairs.",
            "Evaluate both models with the same --judgements, --data and --split.",
        )
    theirs = {name: ranking_metrics(name, each, judged) for name, each in other.scores.items()}
    return {
        "with": str(other.file),
        "models": other.models,
        "reference": "mean" if "mean" in theirs else next(iter(theirs)),
        "differences": {
            name: {their: differences(mine, values) for their, values in theirs.items()}
            for name, mine in metrics.items()
        },
    }


# ----------------------------------------------------------------------------------------------------------- output


def judgement_blocks(found: dict) -> list[Block]:
    """Tables of every ranking and of the comparison, charts, and lines on calibration and acceptance."""
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
    blocks: list[Block] = [Table(("ranked by", *HEADINGS.values(), versus), rows, title)]
    if other := found["compared"]:
        titles = {row["ranking"]: row["title"] for row in found["rows"]}
        rows = [
            (titles[name], *(between(row[other["reference"]].get(metric), signed=True) for metric in HEADINGS))
            for name, row in other["differences"].items()
        ]
        title = f"difference from {' and '.join(other['models'])} by {TITLES[other['reference']]}"
        blocks.append(Table(("ranked by", *HEADINGS.values()), rows, title))
    blocks.append(
        [reliability(name, both) for name, both in (found["calibration"] or {}).items() if name != "constant"]
    )
    return [
        *blocks, *lines(found),
        f"Intervals resample images and captions {found['resamples']:,} times. The candidates were proposed by "
        "retrieval models, so the pairs are no random sample. Weights of the tolerance and refits of the match "
        "probability are chosen on one half of the judged images, by a hash of their names, and measured on the other.",
    ]  # fmt: skip


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
            told.append(
                f"the mean acceptance rate, {both['share']:.3f}, for every pair: Brier score {both['brier']:.4f}"
            )
            continue
        parts = [
            f"{title} ECE {both[key]['ece']:.4f}, Brier score {both[key]['brier']:.4f}"
            for key, title in CALIBRATED.items()
            if both[key]
        ]
        told.append(f"match probability ({name}) against the human acceptance rate: {'; '.join(parts)}")
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
