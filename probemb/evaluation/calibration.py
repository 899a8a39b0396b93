"""The match probability and the captions' uncertainty against people's judgements.

P judged pairs that are not the caption's own image.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from probemb.evaluation.embed_pairs import EmbeddedPairs
from probemb.evaluation.judgements import JudgedPairs, judged_scores
from probemb.evaluation.rankings import RankingOptions
from probemb.evaluation.uncertainty import spearman
from probemb.metrics import estimate, fit_logistic, reliability

LEAST = 10  # judged images of a caption whose acceptance is counted
CLOSED, SAMPLED = "closed form", "sampled"


def match_calibration(
    pairs: EmbeddedPairs,
    judged: JudgedPairs,
    options: RankingOptions,
    sampled: Tensor | None = None,
    closed: bool = True,
) -> dict:
    """Match probabilities against the share of people who say yes, raw and after a refit of two parameters.

    The closed form is sigmoid(-a CSD + b) (PCME++ Eq. 2), with the model's own a and b. The refit, sigmoid(slope *
    logit + intercept), is cross-fitted: each half of the judged images by the parameters of the other half.

    Args:
        sampled: (P,), PCME's match probabilities, if known.
        closed: whether a and b are of the closed form, not of a model that was trained on samples.

    Returns:
        "closed form" and "sampled": {"raw" and "refitted": `Reliability` as a dict, "parameters": for each half
        {"slope", "intercept"}}; "constant": {"share", "brier"} of the mean share for every pair. "refitted" is None if
        one half has no pairs of both labels.
    """
    logits = {}
    if closed:
        logits[CLOSED] = options.shift + options.scale * judged_scores(pairs, judged, "csd", options).double()
    if sampled is not None:
        logits[SAMPLED] = torch.logit(sampled.double(), eps=1e-6)
    found: dict = {name: _calibration(logit, judged) for name, logit in logits.items()}
    mean = judged.share.mean()
    found["constant"] = {"share": float(mean), "brier": float((judged.share - mean).square().mean())}
    return found


def _calibration(logit: Tensor, judged: JudgedPairs) -> dict:
    found: dict = {"raw": asdict(reliability(logit.sigmoid(), judged.share)), "refitted": None, "parameters": None}
    if not judged.divisible:
        return found
    probability, parameters = torch.empty_like(logit), []
    for here, other in zip(judged.halves, judged.halves[::-1]):
        slope, intercept = fit_logistic(logit[other], judged.share[other])
        probability[here] = torch.sigmoid(slope * logit[here] + intercept)
        parameters.append({"slope": slope, "intercept": intercept})
    return found | {"refitted": asdict(reliability(probability, judged.share)), "parameters": parameters}


def accepted_shares(judged: JudgedPairs, n_captions: int, least: int = LEAST) -> Tensor:
    """(M,) float64, the share of each caption's judged images that a majority accepts, NaN for fewer than `least`."""
    n_judged = torch.bincount(judged.caption, minlength=n_captions).double()
    share = torch.bincount(judged.caption, weights=judged.label.double(), minlength=n_captions) / n_judged
    return share.masked_fill(n_judged < least, torch.nan)


def caption_acceptance(pairs: EmbeddedPairs, judged: JudgedPairs, least: int = LEAST) -> dict | None:
    """Spearman of a caption's u with the share of its judged images that a majority accepts.

    Args:
        least: judged images of a caption that is counted.

    Returns:
        {"spearman": {"value", "low", "high"}, "captions", "least"}, the interval by resampling images and captions,
        centred on the value; None for fewer than three captions.
    """
    u, known = pairs.texts.uncertainty().double(), accepted_shares(judged, len(pairs.texts), least).isfinite()
    if known.sum() < 3:
        return None
    (image, of_images), (caption, of_captions) = judged.clusters
    captions, values = judged.caption.unique(), []
    for image_weight, caption_weight in zip(of_images.double(), of_captions):
        weight = image_weight[image]
        share = torch.bincount(caption, weight * judged.label) / torch.bincount(caption, weight)
        counted = (caption_weight * (known[captions] & share.isfinite())).long()
        value = spearman(*(x.repeat_interleave(counted) for x in (u[captions], share)))
        values.append(torch.nan if value is None else value)
    values_R = torch.tensor(values, dtype=torch.float64)
    # Drawing images makes the shares noisier than they are, and so every correlation weaker.
    values_R[1:] += values_R[0] - values_R[1:].nanmean()
    return {"spearman": estimate(values_R), "captions": int(known.sum()), "least": least}
