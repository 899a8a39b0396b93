"""Measure on a validation set which score tells wrong answers, and how precise those below each of its values are.

Every caption of the validation set is a query (every image for an index of captions). The answer is correct if the
query's own item is among the K closest of the validation set; other fitting items make a query ambiguous. Queries of
two and three texts are composed captions of one image.

Scores come from the index itself, as those of a query do. One is chosen, by the area under the rejection curve for
queries of one part; its sign is fixed beforehand. Tests and bounds allow for the choice among all of them (Bonferroni).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from probemb.errors import UserError
from tools.search.calibration import BETTER, CHANCE, WORSE, Calibration
from tools.search.wish import Wish

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.data.captions.find import CaptionDataset
    from probemb.evaluation.embed_pairs import EmbeddedPairs
    from probemb.gaussian import Gaussian
    from tools.search.query import Searcher

MAX_TEXTS = 3  # of a query
RIVALS = ("validation", "index")
SAME = 2e-3  # distances closer than this may be the same item, with its mean in float16 and not
SLICE = 4096  # queries at a time


def calibrate(searcher: Searcher, data: str, rivals: str = "validation", within: int = 1, show=None) -> Calibration:
    """Measure on images with captions.

    Args:
        data: as `find_captions` takes it.
        rivals: "validation", or "index" to rank the items of the index too, as wrong answers.
        within: K; an answer is correct if the query's own item is among the K closest.
        show: as `probemb.cli.progress.progress`.

    Raises:
        UserError: the data cannot be read or is smaller than `within`, or unknown rivals.
    """
    from probemb.cli.progress import silent
    from probemb.data.captions.find import find_captions
    from probemb.errors import nearest
    from probemb.evaluation.embed_pairs import embed_pairs
    from probemb.metrics import precision_curve
    from probemb.metrics.selective import CONFIDENCE

    if rivals not in RIVALS:
        raise UserError(f"There are no rivals '{rivals}'.{nearest(rivals, RIVALS)}", f"Use {' or '.join(RIVALS)}.")
    weights, captions = searcher.index.weights or "", find_captions(data, exif=True)
    if not 1 <= within <= len(captions):
        raise UserError(f"--within is {within}, and {data} has {len(captions):,} images.", "Give a number up to that.")
    embedded = embed_pairs(replace(searcher.encoder.embedder, workers=None, show=show or silent), captions)
    owner, tolerance = embedded.owner.tolist(), best_tolerance(searcher, captions, embedded)
    places = list(range(len(embedded.images)))
    if searcher.index.kind == "text":
        kind, queries, gallery, asked, holds = "image", embedded.images, embedded.texts, places, owner
    else:
        kind, queries, gallery, asked, holds = "text", embedded.texts, embedded.images, owner, places
    measured = {}
    for parts in range(1, MAX_TEXTS + 1):
        groups = caption_groups(asked, parts)
        if groups:
            measured[parts] = measure(searcher, queries, gallery, groups, asked, holds, rivals, within)
    tests = {parts: assess_scores(*one) for parts, one in measured.items()}
    score = choose_score(tests[1])
    curves = {}
    for parts, (scores, correct, _) in measured.items():
        bounds = 1 - (1 - CONFIDENCE) / len(scores)  # the score was chosen among them on the same queries
        curves[parts] = replace(precision_curve(scores[score], correct, confidence=bounds), confidence=CONFIDENCE)
    return Calibration(kind, curves, weights, str(data), len(gallery), rivals, within, score, tests, tolerance)


def best_tolerance(searcher: Searcher, captions: CaptionDataset, embedded: EmbeddedPairs) -> float | None:
    """The weight of the gallery's variances with the best mAP@R of all true matches; None if they are not all known."""
    from probemb.evaluation.benchmarks import MAX_EXACT_PAIRS, TRUE, known_positives
    from probemb.evaluation.tolerance import choose_tolerance

    if captions.scenes is None or len(embedded.images) * len(embedded.texts) > MAX_EXACT_PAIRS:
        return None
    found = choose_tolerance(embedded, known_positives(embedded, captions)[TRUE])
    return found.i2t if searcher.index.kind == "text" else found.t2i


def assess_scores(scores: dict[str, Tensor], correct: Tensor, image: Tensor) -> dict[str, dict]:
    """Test for each score if refusing by it gains anything; see `Calibration.tests`.

    Args:
        scores: name -> (Q,); correct: (Q,) bool; image: (Q,) that a query belongs to.
    """
    from probemb.metrics.prediction import rejection_gain
    from probemb.metrics.selective import CONFIDENCE

    enough = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / len(scores))
    tests = {}
    for name, score in scores.items():
        found = rejection_gain(score, correct, image)
        z = 0.0 if found is None else found.z  # all answers are right, or all are wrong
        verdict = BETTER if z > enough else WORSE if z < -enough else CHANCE
        tests[name] = {"gain": found.value if found else 0.0, "se": found.se if found else 0.0, "verdict": verdict}
    return tests


def choose_score(tests: dict[str, dict]) -> str:
    """The score with the largest gain of those that beat chance; without one the first, which is u if there is a u."""
    better = [name for name, test in tests.items() if test["verdict"] == BETTER]
    return max(better, key=lambda name: tests[name]["gain"], default=next(iter(tests)))


def caption_groups(owner: Sequence[int], parts: int, seed: int = 0) -> list[list[int]]:
    """Rows of captions in disjoint groups of `parts`, each of one image."""
    of_image: dict[int, list[int]] = {}
    for row, image in enumerate(owner):
        of_image.setdefault(image, []).append(row)
    draw = random.Random(seed)
    groups = []
    for rows in of_image.values():
        rows = rows if parts == 1 else draw.sample(rows, len(rows))
        groups += [rows[start : start + parts] for start in range(0, len(rows) - parts + 1, parts)]
    return groups


def measure(
    searcher: Searcher, queries: Gaussian, gallery: Gaussian, groups: list[list[int]], asked: Sequence[int],
    holds: Sequence[int], rivals: str, within: int,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:  # fmt: skip
    """Composed queries; `groups` are rows of `queries`, all of the same length.

    Args:
        asked: image of each query part.
        holds: image of each gallery item.

    Returns:
        scores of every query, name -> (G,); whether its answer is correct, (G,) bool; its image, (G,).
    """
    import torch

    from probemb.gaussian import Gaussian
    from probemb.search import build_index, search

    weighed = ("tolerance", searcher.index.weight) if searcher.index.form == "tolerance" else ()
    own = build_index(gallery, "Flat", *weighed)
    rows, wanted, images = torch.tensor(groups), torch.tensor(asked), torch.tensor(holds)  # rows: (G, parts)
    scores: list[dict[str, Tensor]] = []
    correct = []
    for part in rows.split(SLICE):
        parts = Gaussian(queries.mean[part.T], queries.log_var[part.T])  # (parts, G, D)
        query = searcher.compose(parts).gaussian
        distance, found = search(own, query, min(within, len(own)))
        hit = images[found] == wanted[part[:, :1]]
        rank = torch.where(hit, torch.arange(hit.shape[1]), within).min(1).values
        if rivals == "index":
            k = min(max(within, Wish.top), len(searcher.index))  # as many candidates as a query has
            mean = searcher.index.form == "mean"
            closer = (searcher.look(query, k, searcher.own_weight) if mean else search(searcher.index, query, k))[0]
            at = distance.gather(1, rank.clamp_max(hit.shape[1] - 1)[:, None])
            rank = rank + (closer < at - SAME).sum(1)
        correct.append(rank < within)
        scores.append(searcher.scores(query))
    every = {name: torch.cat([part[name] for part in scores]) for name in scores[0]}
    return every, torch.cat(correct), wanted[rows[:, 0]]
