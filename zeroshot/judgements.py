"""`python -m zeroshot.retrieval --judgements FILE`: rankings against people's judgements, and against another model.

The scores of the judged pairs are kept beside the results, in SCORES, so that another model can later be compared with
them by the paired bootstrap (`--compare FOLDER`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
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
from zeroshot.config import RETRIEVAL_GENERATOR, RetrievalConfig

if TYPE_CHECKING:
    from probemb.models.dual_encoder import DualEncoder
    from probemb.models.ensemble import Ensemble

SCORES = "judgements.safetensors"
KNOWN = {*TITLES, CROSS_FITTED}


class Judged(NamedTuple):
    """The judgements of the data, and the scores of another model to compare with."""

    judgements: Judgements
    other: OtherScores | None


def read_judged(config: RetrievalConfig, captions: CaptionDataset) -> Judged | None:
    """Read the files of --judgements and --compare; None without --judgements.

    Raises UserError: --compare alone, files that cannot be read, or pairs of which none can be put in order.
    """
    if config.judgements is None:
        if config.compare is not None:
            raise UserError("--compare is given without --judgements.", "Name the judgements to compare on as well.")
        return None
    judgements = read_judgements(config.judgements, captions)
    judged_pairs(judgements)
    return Judged(judgements, None if config.compare is None else load_scores(Path(config.compare)))


def evaluate_judgements(
    given: Judged | None, pairs: EmbeddedPairs, captions: CaptionDataset, rankings: Sequence[str],
    options: RankingOptions, model: DualEncoder | Ensemble, models: Sequence[str], out: Path,
) -> dict | None:  # fmt: skip
    """The "judgements" of results.json; writes SCORES into `out`, or removes an earlier one if nothing is judged.

    Raises UserError: people agree on all pairs; the results to compare with are of other pairs.
    """
    if given is None:
        (out / SCORES).unlink(missing_ok=True)
        return None
    held = given.judgements.among(torch.tensor(captions.owner()), pairs.kept)
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
    save_scores(out / SCORES, scores, judged, models)
    return results


def shares_of_yes(given: Judged | None, pairs: EmbeddedPairs, captions: CaptionDataset) -> Tensor | None:
    """(M,) `accepted_shares` of all captions; None without judgements."""
    if given is None:
        return None
    held = given.judgements.among(torch.tensor(captions.owner()), pairs.kept)
    return accepted_shares(judged_pairs(held, 0), len(pairs.texts))


# ------------------------------------------------------------------------------------------- scores of other models


def save_scores(file: Path, scores: dict[str, Tensor], judged: JudgedPairs, models: Sequence[str]) -> None:
    """Write the scores of every ranking, (P,) float32 each."""
    from safetensors.torch import save_file

    about = {"generator": RETRIEVAL_GENERATOR, "pairs": judged.digest(), "models": json.dumps(list(models))}
    replace_file(file, lambda aside: save_file({name: s.contiguous() for name, s in scores.items()}, aside, about))


class OtherScores(NamedTuple):
    """Scores of another model by ranking, (P,) each; the digest of the pairs; the models' names; the file."""

    scores: dict[str, Tensor]
    pairs: str
    models: list[str]
    file: Path


def load_scores(path: Path) -> OtherScores:
    """Scores that `save_scores` wrote, from the file or its folder.

    Raises UserError: no such file, or damaged scores.
    """
    from safetensors import SafetensorError, safe_open

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
