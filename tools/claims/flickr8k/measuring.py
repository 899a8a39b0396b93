"""Measurements of `tools.claims` on a training on photographs, from its kept embeddings.

N images, M captions, D dimensions, P judged pairs.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from probemb.data.captions.find import CaptionDataset
from probemb.evaluation.embed_pairs import EmbeddedPairs
from probemb.evaluation.rankings import (
    RankingOptions,
    both_directions,
    depth_for,
    make_ranker,
    own_captions,
    rank_all,
)
from probemb.evaluation.tolerance import Tolerance, choose_tolerance
from probemb.gaussian import Gaussian
from probemb.metrics import Positives, rsum
from probemb.metrics.coco import package_metrics
from tools.claims.embeddings import Pair


def rsum_of(images: Gaussian, texts: Gaussian, dataset: CaptionDataset, name: str) -> float:
    """RSUM of the own captions under a ranking, in percent."""
    return retrieval(images, texts, own_positives(dataset), name)["rsum"]


def own_positives(dataset: CaptionDataset) -> Positives:
    """Every image with its own captions."""
    return own_captions(torch.tensor(dataset.owner()), len(dataset))


def retrieval(images: Gaussian, texts: Gaussian, positives: Positives, name: str, **options) -> dict:
    """{"i2t": metrics, "t2i": metrics, "rsum": in percent}."""
    ranker = make_ranker(name, images, texts, RankingOptions(**options))
    ranked = rank_all(ranker, len(images), len(texts), depth_for([positives]))
    return both_directions(ranked, positives)


def measure(parts: dict[str, Pair], datasets: dict[str, CaptionDataset], about: dict) -> dict:
    """Everything but the judgements, as plain numbers.

    Args:
        parts: "validation", "test" and maybe "coco".
        about: "probabilistic", "sampled" (PCME: rank by the match probability too), "scale", "shift".

    Returns:
        "retrieval": ranking -> {"i2t", "t2i", "rsum"} on the test split; "own": the ranking with the best RSUM on the
        validation split; "tolerance": its weights and how they were chosen; "refusal", "coco".
    """
    (images, texts), positives = parts["test"], own_positives(datasets["test"])
    rankings = {"mean": partial(retrieval, name="mean")}
    found: dict = {}
    if about["probabilistic"]:
        rankings["csd"] = partial(retrieval, name="csd")
        if about["sampled"]:
            scalars = {"scale": about["scale"], "shift": about["shift"]}
            rankings["match-probability"] = partial(retrieval, name="match-probability", **scalars)
        tolerance = tolerance_by_validation(parts["validation"], datasets["validation"])
        found["tolerance"] = asdict(tolerance)
        rankings["tolerance"] = partial(retrieval, name="tolerance", tolerance=tolerance)
        found["refusal"] = {name: refusal(images, texts, positives, name) for name in ("csd", "mean")}
        found["mean_u"] = {"images": _spread(images.uncertainty()), "captions": _spread(texts.uncertainty())}
    found["retrieval"] = {name: rank(images, texts, positives) for name, rank in rankings.items()}
    if "coco" in parts:
        found["coco"] = coco(parts["coco"], datasets["coco"], rankings)
    return found


def tolerance_by_validation(pair: Pair, dataset: CaptionDataset) -> Tolerance:
    """The weights of the ranking "tolerance" with the best recalls of own captions."""
    pairs = EmbeddedPairs(*pair, torch.tensor(dataset.owner()), list(range(len(dataset))), [])
    return choose_tolerance(
        pairs, own_positives(dataset), "recall", chosen="chosen on validation images", of="own captions"
    )


def _spread(u: Tensor) -> dict[str, float]:
    return {"mean": float(u.double().mean()), "std": float(u.double().std())}


def refusal(images: Gaussian, texts: Gaussian, positives: Positives, name: str) -> dict:
    """R@1 under a ranking of all queries, of the certain half by u, and of the other half; {"captions", "images"}."""
    ranked = rank_all(make_ranker(name, images, texts), len(images), len(texts), (1, 1))
    tops = ranked.i2t, ranked.t2i
    sides = (("images", images, tops[0], positives), ("captions", texts, tops[1], positives.transposed()))
    found = {}
    for side, gaussian, top, match in sides:
        hit, order = match.hits(top)[:, 0].double(), gaussian.uncertainty().argsort(stable=True)
        certain, uncertain = order[: len(order) // 2], order[len(order) // 2 :]
        found[side] = {"all": float(hit.mean()), "certain": float(hit[certain].mean()),
                       "uncertain": float(hit[uncertain].mean())}  # fmt: skip
    return found


def coco(pair: Pair, dataset: CaptionDataset, rankings: dict) -> dict:
    """Own captions, CxC and ECCV Caption on the images that there are: ranking -> truth -> metrics."""
    own = own_positives(dataset)
    truths = {"own": (own, own), **published_positives(dataset)}
    found: dict = {}
    for name, rank in rankings.items():
        ways = {truth: (rank(*pair, i2t)["i2t"], rank(*pair, t2i)["t2i"]) for truth, (i2t, t2i) in truths.items()}
        found[name] = {truth: {"i2t": i2t, "t2i": t2i, "rsum": rsum(i2t, t2i)} for truth, (i2t, t2i) in ways.items()}
    return found


def published_positives(dataset: CaptionDataset) -> dict[str, tuple[Positives, Positives]]:
    """CxC's and ECCV Caption's matches that fall inside the data; none for data without COCO's ids.

    Both are of images as queries, (N, M): the first has the matches of the benchmark's images, the second those of its
    captions. Queries that a benchmark does not have are left without a match, and so out of its means.
    """
    if dataset.caption_ids is None:
        return {}
    package = package_metrics()
    rows = {
        "i2t": {int(name): row for row, name in enumerate(dataset.image_ids)},
        "t2i": {name: row for row, name in enumerate(one for ids in dataset.caption_ids for one in ids)},
    }
    found = {}
    for name, truth in (("cxc", package.cxc_gts), ("eccv", package.eccv_gts)):
        both = []
        for way, other in (("i2t", "t2i"), ("t2i", "i2t")):
            pairs = [
                (rows[way][int(query)], rows[other][int(item)])
                for query, items in truth[way].items()
                if int(query) in rows[way]
                for item in items
                if int(item) in rows[other]
            ]
            query, item = torch.tensor(pairs).view(-1, 2).T
            both.append(Positives.from_pairs(query, item, len(rows[way]), len(rows[other])))
        if all(len(positives.keys) for positives in both):
            found[name] = both[0], both[1].transposed()
    return found
