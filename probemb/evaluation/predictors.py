"""Scores that say how ambiguous a query is or how likely its answer is wrong, and tests of what each of them knows.

Every score is high for a query that it calls uncertain; the signs are fixed before any data are seen. The scores need
the query, the gallery and nothing else. Q queries, N gallery items, K candidates of each query, D dimensions.

The match probability is the model's own (`models.match`). A point model has no u and, except for SigLIP's, no match
probability; its entropy is that of the softmax of its cosines at its own temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from probemb.data.captions.dataset import CaptionDataset
from probemb.distances import csd, squared_euclidean
from probemb.evaluation.embed_pairs import EmbeddedPairs, true_ambiguity
from probemb.evaluation.scores import match_probability_scores
from probemb.gaussian import Gaussian
from probemb.metrics.prediction import SIGNIFICANT, halves, rank_correlation, rejection_gain
from probemb.models.match import MatchModel, in_gallery

NEIGHBOURS = 10  # whose means' spread is measured
BLOCK_ELEMENTS = 1 << 22  # pairs whose probabilities are held at a time
TITLES = {
    "u": "u",
    "expected-matches": "expected matches",
    "entropy": "entropy of matches",
    "spread": f"spread of closest {NEIGHBOURS}",
    "distance": "distance of closest",
    "margin": "lead of closest, negated",
}


def candidate_scores(distance_QK: Tensor, log_p_QK: Tensor | None, model: MatchModel) -> dict[str, Tensor]:
    """The scores that follow from distances and match probabilities of candidates alone, (Q,) each.

    Args:
        distance_QK: squared distance of the means, in any order; infinite for a candidate that was not found.
        log_p_QK: log of the match probability, likewise; None of a model without.

    Returns:
        "expected-matches" and "entropy" as far as the model has them; "distance"; "margin", 0 for a single candidate.
    """
    found = {}
    if log_p_QK is not None:
        found["expected-matches"] = log_p_QK.exp().sum(1)
        found["entropy"] = torch.special.entr(log_softmax(log_p_QK, 1).exp()).sum(1)
    elif model.temperature is not None:  # unit vectors: the cosine is 1 - distance / 2
        found["entropy"] = torch.special.entr(log_softmax(-model.temperature / 2 * distance_QK, 1).exp()).sum(1)
    closest = distance_QK.topk(min(2, distance_QK.shape[1]), largest=False).values
    lead = closest[:, -1] - closest[:, 0]
    return found | {"distance": closest[:, 0], "margin": -lead.nan_to_num(0.0, posinf=0.0)}


def spread(means_QKD: Tensor) -> Tensor:
    """Mean squared distance of K means from their centre, (Q,)."""
    return (means_QKD - means_QKD.mean(1, keepdim=True)).square().sum(-1).mean(1)


@torch.no_grad()
def query_scores(queries: Gaussian, gallery: Gaussian, model: MatchModel) -> dict[str, Tensor]:
    """Every score of every query against the whole gallery, (Q,) each on the CPU, in the order of TITLES.

    The neighbours of "spread" are the closest by CSD, or by the means of a point model. Holds a block of pairs.
    """
    queries, gallery, parts = queries.float(), gallery.float(), []
    u_gallery, step = gallery.uncertainty(), max(1, BLOCK_ELEMENTS // max(1, len(gallery)))
    log_odds = _log_odds(queries, gallery, model)
    for start in range(0, len(queries), step):
        block = queries[start : start + step]
        u = block.uncertainty()
        apart = squared_euclidean(block.mean, gallery.mean)
        distance = apart + u[:, None] + u_gallery
        ranked = distance if model.probabilistic else apart
        closest = ranked.topk(min(NEIGHBOURS, len(gallery)), largest=False).indices
        closest = closest.sort(1).values  # so that the same neighbours have the same spread, to the bit
        scores = {"u": u} if model.probabilistic else {}
        log_p = logsigmoid(log_odds(slice(start, start + step), distance)) if model.matches else None
        scores |= candidate_scores(apart, log_p, model) | {"spread": spread(gallery.mean[closest])}
        parts.append({name: scores[name].cpu() for name in TITLES if name in scores})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _log_odds(queries: Gaussian, gallery: Gaussian, model: MatchModel) -> Callable[[slice, Tensor], Tensor]:
    """(rows of the queries, their CSD) -> the log-odds of a match, (rows, N)."""
    if model.form != "samples":
        return lambda rows, csd: model.shift - model.scale * csd
    signs = 1, -1  # 1 - p has the form of p, so that neither rounds to 0 where the other is close to 1
    match, other = (match_probability_scores(queries, gallery, s * model.scale, s * model.shift) for s in signs)
    tiny = torch.finfo(torch.float32).tiny
    return lambda rows, csd: match(rows).clamp_min(tiny).log() - other(rows).clamp_min(tiny).log()


@torch.no_grad()
def match_of_first(queries: Gaussian, gallery: Gaussian, model: MatchModel) -> Tensor:
    """The largest probability of any item to be the one that matches, (Q,); see `models.match.in_gallery`."""
    queries, gallery, parts = queries.float(), gallery.float(), []
    log_odds, step = _log_odds(queries, gallery, model), max(1, BLOCK_ELEMENTS // max(1, len(gallery)))
    for start in range(0, len(queries), step):
        distance = csd(queries[start : start + step], gallery)
        parts.append(in_gallery(log_odds(slice(start, start + step), distance)).amax(1).cpu())
    return torch.cat(parts)


def evaluate_predictors(
    pairs: EmbeddedPairs,
    captions: CaptionDataset,
    correct: Mapping[str, Tensor],
    model: MatchModel,
    device: str = "cpu",
    accepted_share: Tensor | None = None,
) -> dict:
    """The table of both directions.

    Args:
        correct: "images" -> (N,), "captions" -> (M,): whether the first answer of each query is right.
        accepted_share: (M,) as for `assess`.

    Returns:
        {"match_probability": the formula, "match_of_first": {"mean", "right"}: the mean match of a caption's closest
        image among all and the share that is right, None without match probability; "captions": rows of `assess` for
        text -> image, "images": for image -> text, "warning": one line if u runs against recall, else None}.
    """
    images, texts = pairs.images.to(device), pairs.texts.to(device)
    ambiguity = None if captions.scenes is None else true_ambiguity(captions, pairs.kept)
    first = None
    if model.matches:
        right = correct["captions"].double().mean()
        first = {"mean": match_of_first(texts, images, model).mean().item(), "right": right.item()}
    found = {
        "match_probability": model.describe(),
        "match_of_first": first,
        "captions": assess(
            query_scores(texts, images, model), correct["captions"], pairs.owner, ambiguity, accepted_share
        ),
        "images": assess(query_scores(images, texts, model), correct["images"]),
    }
    return found | {"warning": warning(found)}


def assess(
    scores: Mapping[str, Tensor],
    correct: Tensor,
    cluster: Tensor | None = None,
    ambiguity: Tensor | None = None,
    accepted_share: Tensor | None = None,
) -> list[dict]:
    """Measure how well each score predicts whether its queries are answered right.

    Args:
        scores: name -> (Q,).
        correct: (Q,) whether the first answer is right, as numbers.
        cluster: (Q,) queries that depend on each other, such as the captions of an image.
        ambiguity: (Q,) the share of all images that a query fits.
        accepted_share: (Q,) the share of the judged images that people accept, NaN where there are none.

    Returns:
        For each score {"score", "ambiguity", "accepted_share", "r@1": Spearman's {"value", "se"}; "halves":
        {"certain", "rest", "difference"}; "gain": of the rejection curve, 0 at random and 1 at best}; None where
        something is unknown or constant. A score that knows something has positive correlations with ambiguity and
        accepted_share, a negative one with r@1, and a positive difference and gain.
    """
    rows = []
    for name, score in scores.items():
        row = {"score": name, "title": TITLES[name]}
        for key, outcome in (("ambiguity", ambiguity), ("accepted_share", accepted_share), ("r@1", correct)):
            found = None if outcome is None else rank_correlation(score, outcome, cluster)
            row[key] = None if found is None else asdict(found)
        for key, measure in (("halves", halves), ("gain", rejection_gain)):
            found = measure(score, correct, cluster)
            row[key] = None if found is None else asdict(found)
        rows.append(row)
    return rows


def runs_against_recall(row: dict) -> bool:
    """True if a row of `assess` significantly has the wrong sign: what it calls certain is found less often."""
    correlation, parts = row["r@1"], row["halves"]
    turned = correlation is not None and correlation["value"] > SIGNIFICANT * correlation["se"]
    return turned or (parts is not None and parts["difference"]["value"] < -SIGNIFICANT * parts["difference"]["se"])


def warning(found: Mapping) -> str | None:
    """One line if u runs against recall in a direction, and what to do; None if not, or without u.

    Args:
        found: "captions" and "images" as `evaluate_predictors` returns them.
    """
    told = []
    for side in ("captions", "images"):
        for row in found[side]:
            if row["score"] == "u" and runs_against_recall(row):
                correlation, parts = row["r@1"], row["halves"]
                text = f"{side}: Spearman with R@1 {correlation['value']:+.3f} ± {correlation['se']:.3f}"
                if parts:
                    text += f", R@1 {parts['certain']:.1%} in the certain half, {parts['rest']:.1%} in the other"
                told.append(text)
    if not told:
        return None
    return (
        f"warning: u runs against recall here ({'; '.join(told)}), so refusing by u keeps the worse answers; "
        "finetune so that u keeps its sign (docs/concepts.md)"
    )
