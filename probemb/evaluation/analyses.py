"""Analyses of embeddings: set algebra, ellipses in a plane, unions of crops, hierarchies of captions, continuity.

N items (images), M captions, D dimensions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import kendalltau
from torch import Tensor
from torch.nn.functional import normalize

from probemb.compose import compose
from probemb.data.boxes import CropTriplet, PhraseDataset, Proposals, crop_triplets
from probemb.data.captions.dataset import CaptionDataset
from probemb.distances import elk, inclusion
from probemb.errors import UserError
from probemb.evaluation.embedding import EmbeddedPairs, Embedder, exact_match
from probemb.evaluation.localisation import embedded_proposals
from probemb.evaluation.rankings import RankingOptions, scores_of
from probemb.evaluation.uncertainty import MEASURES, geometric_sigma, own_inclusion
from probemb.gaussian import Gaussian
from probemb.losses.noisy import caption_tfidf
from probemb.metrics.retrieval import blocks
from probemb.metrics.uncertainty import standard_error

CENTRAL = 0.9  # mass of the central interval that `coverage` asks about
BLOCK = 256  # pairs of crops and captions whose scores are computed at a time, with those of all pairs among them
STEPS, IMAGES = 50, 16  # of a walk through a hierarchy; images that walk at a time


# ------------------------------------------------------------------------------- set algebra. Source: PCME §4.4, Fig. 8
# The product of two normal densities is where both allow a point: their intersection. One normal lies in another if the
# other is wider around it.


def coverage(inner: Gaussian, outer: Gaussian, central: float = CENTRAL) -> Tensor:
    """The share of `inner`'s mass that lies in the central interval of `outer`, a mean over the dimensions, (N,)."""
    inner_mean, inner_std, outer_mean, outer_std = (x.double() for x in (inner.mean, inner.std, outer.mean, outer.std))
    half = math.sqrt(2) * torch.erfinv(torch.tensor(central, dtype=torch.float64)) * outer_std
    normal = torch.distributions.Normal(inner_mean, inner_std)
    return (normal.cdf(outer_mean + half) - normal.cdf(outer_mean - half)).mean(-1)


def mixing(mixed: Gaussian, first: Gaussian, second: Gaussian) -> dict:
    """Does the embedding of a mixed input cover the intersection of both inputs, row by row of (N, D), N at least 4?

    "covers_other": that of two rows before; "own_is_closest": of all N by expected likelihood; "between": its mean is
    closer to the intersection's than to either original's.
    """
    common, rows = compose(Gaussian.stack([first, second])).gaussian, torch.arange(len(mixed))
    to_common, to_a, to_b = ((mixed.mean - g.mean).norm(dim=-1) for g in (common, first, second))
    return _means(
        {
            "covers": coverage(common, mixed),
            "covers_other": coverage(common[rows.roll(2)], mixed),
            "own_is_closest": elk(mixed, common).argmin(1) == rows,
            "between": (to_common < to_a) & (to_common < to_b),
            "wider": geometric_sigma(mixed) > (geometric_sigma(first) + geometric_sigma(second)) / 2,
        }
    ) | {"chance": 1 / len(mixed), "pairs": len(mixed)}


def erasing(whole: Gaussian, erased: Sequence[Gaussian], shares: Sequence[float]) -> list[dict]:
    """Does an input (N, D) lie in the same input with a part erased? A row for each share. Source: PCME Fig. 7."""
    rows = []
    for share, g in zip(shares, erased):
        sigma = geometric_sigma(g)
        found = {"sigma": sigma, "wider": sigma > geometric_sigma(whole), "lies_in": own_inclusion(whole, g) > 0}
        found |= {"covers": coverage(whole, g), "covered": coverage(g, whole)}
        found |= {"covers_other": coverage(whole[torch.arange(len(whole)).roll(1)], g)}
        rows.append({"share": share, **_means(found)})
    return rows


def _means(values: dict[str, Tensor]) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    for name, value in values.items():
        out |= {name: float(value.double().mean()), f"{name}_se": standard_error(value)}
    return out


# ----------------------------------------------------------------------------- ellipses in a plane. Source: PCME Fig. 5


class Plane(NamedTuple):
    """A plane: origin (D,), axes (D, 2) with orthonormal columns, and its share of the variance of the means."""

    origin: Tensor
    axes: Tensor
    share: float


class Ellipses(NamedTuple):
    """N ellipses: centre (N, 2); radii (N, 2), half axes, the longer one first; its angle (N,) in radians."""

    centre: Tensor
    radii: Tensor
    angle: Tensor


def plane_of(mean_ND: Tensor) -> Plane:
    """The plane of the two largest principal components of the means; the space itself for D = 2."""
    points = mean_ND.double()
    if points.shape[1] == 2:
        return Plane(points.new_zeros(2), torch.eye(2, dtype=points.dtype), 1.0)
    origin = points.mean(0)
    _, values, rows = torch.linalg.svd(points - origin, full_matrices=True)
    axes = rows[:2].T
    axes = axes * torch.where(axes.gather(0, axes.abs().argmax(0, keepdim=True)) < 0, -1.0, 1.0)  # signs are arbitrary
    total = float(values.square().sum())
    return Plane(origin, axes, float(values[:2].square().sum()) / total if total else 1.0)


def ellipses(g: Gaussian, plane: Plane, level: float = 0.5) -> Ellipses:
    """Those that hold `level` of every item's mass in the plane; within r deviations it is 1 - exp(-r² / 2)."""
    centre = (g.mean.double() - plane.origin) @ plane.axes
    covariance = torch.einsum("dp,nd,dq->npq", plane.axes, g.var.double(), plane.axes)
    values, vectors = torch.linalg.eigh(covariance)  # ascending
    radius = math.sqrt(-2 * math.log1p(-level))
    longer = vectors[:, :, 1]
    return Ellipses(centre, radius * values.clamp_min(0).sqrt().flip(1), torch.atan2(longer[:, 1], longer[:, 0]))


# ---------------------------------------------- unions of crops. Source: Probabilistic VSE++/VSRN §4.6, Fig. 2, Table 4
# Crops A and B and their union C = A ∪ B, whose caption joins both with "and". A union shows more, so more captions fit
# it: as an image it should be more uncertain. Its caption says more, so fewer images fit it: as a text, less uncertain.

ITEMS = ("A", "B", "C")
SIDES = ("images", "captions")
TASKS = ("crop A", "crop C", "caption A", "caption C")  # queries; the own one of A and C has to be chosen: Table 4


@dataclass(frozen=True)
class EmbeddedTriplets:
    """Embeddings of n triplets of one area threshold: item -> Gaussian (n, D), or (n, K, D), in the order of ITEMS."""

    images: dict[str, Gaussian]
    captions: dict[str, Gaussian]
    triplets: list[CropTriplet]


def embed_triplets(
    embedder: Embedder, data: PhraseDataset, thresholds: Sequence[float]
) -> tuple[dict[float, EmbeddedTriplets], list[tuple[str, str]]]:
    """The triplets of every area threshold that has any, and (name, reason) of unreadable images. UserError."""
    found = {threshold: crop_triplets(data, threshold) for threshold in thresholds}
    every = list(chain.from_iterable(found.values()))
    if not every:
        what = f"No image of {data.source} has two regions of less than {max(thresholds):.0%} of its area."
        raise UserError(what, "Raise the largest of --areas, or take images with more regions.")
    boxes: list[dict] = [{} for _ in range(len(data))]  # as ordered sets
    for one in every:
        boxes[one.image] |= dict.fromkeys(one.boxes)
    bad: list[tuple[str, str]] = []
    proposals = Proposals([list(some) for some in boxes])
    crops = {  # image -> box -> Gaussian (D,)
        image: {box: embedded[row] for row, box in enumerate(boxes[image])}
        for image, embedded, _ in embedded_proposals(embedder, data, proposals, boxes, bad, "crops")
    }
    captions = list(dict.fromkeys(text for one in every for text in one.captions))
    place, texts, out = {text: row for row, text in enumerate(captions)}, embedder.texts(captions), {}
    for threshold, triplets in found.items():
        if kept := [one for one in triplets if one.image in crops]:
            images = {x: Gaussian.stack([crops[t.image][t.boxes[i]] for t in kept]) for i, x in enumerate(ITEMS)}
            said = {x: texts[torch.tensor([place[t.captions[i]] for t in kept])] for i, x in enumerate(ITEMS)}
            out[threshold] = EmbeddedTriplets(images, said, kept)
    if not out:
        raise UserError(f"No image of {data.source} with two regions could be read.", "Repair the data.")
    return out, bad


def union_uncertainty(found: EmbeddedTriplets) -> dict:
    """Mean uncertainty of A, B and C under every measure and side, "difference": C less A, paired, and "larger": the
    share of triplets in which C is the more uncertain one of both. Of several embeddings of an item their mean."""
    out: dict = {measure: {} for measure in MEASURES}
    for measure, side in product(MEASURES, SIDES):
        items = getattr(found, side).items()
        u = {item: MEASURES[measure][1](g).reshape(len(g), -1).mean(1).double() for item, g in items}
        u |= {"difference": u["C"] - u["A"], "larger": (u["C"] > u["A"]).double() + 0.5 * (u["C"] == u["A"]).double()}
        out[measure][side] = {name: _estimate(values) for name, values in u.items()}
    return out


def binary_selection(found: EmbeddedTriplets, ranking: str, options: RankingOptions) -> dict:
    """Share of the triplets in which a query scores its own item above the other one of A and C; ties are half."""

    def scores(crop: str, caption: str) -> Tensor:  # (n,) of crop i with caption i
        images, captions = found.images[crop], found.captions[caption]
        parts = [scores_of(ranking, images[rows], captions[rows], options) for rows in blocks(len(images), 1, BLOCK)]
        return torch.cat([part(slice(None)).diagonal() for part in parts]).cpu().double()

    aa, ac, ca, cc = (scores(crop, caption) for crop in "AC" for caption in "AC")
    right = {task: 0.5 * (margin.sign() + 1) for task, margin in zip(TASKS, (aa - ac, cc - ca, aa - ca, cc - ac))}
    right["mean"] = torch.stack(list(right.values())).mean(0)
    return {task: _estimate(values) for task, values in right.items()}


def _estimate(values: Tensor) -> dict:
    """Mean of values (n,) and its standard error; one triplet an image, so they are independent."""
    return {"value": float(values.mean()), "se": standard_error(values)}


# -------------------------- hierarchies of captions. Source: HierarCaps (Alper and Averbuch-Elor, ECCV 2024); ProLIP §4
# L captions of each image from general to specific, T = N L. Captions are numbered: equal texts have equal numbers.


def hierarchy_walk(
    images_ND: Tensor, texts_TD: Tensor, numbers_T: Tensor, roots_ND: Tensor, steps: int = STEPS
) -> list[Tensor]:
    """Numbers of the captions closest to points on the way from an image's closest caption towards its root."""
    share, found = torch.arange(steps)[:, None] / steps, []
    for image, root in zip(images_ND.split(IMAGES), roots_ND.split(IMAGES)):
        start = texts_TD[(image @ texts_TD.T).argmax(1)][:, None]
        way = normalize(start - (start - root[:, None]) * share.to(start), dim=-1)
        found += [rows.unique() for rows in numbers_T[(way @ texts_TD.T).argmax(-1).cpu()]]
    return found


def within_radius(
    images_ND: Tensor, texts_TD: Tensor, numbers_T: Tensor, root_D: Tensor, steps: int = STEPS
) -> list[Tensor]:
    """Numbers of the captions closest to an image among those within each of the radii around the root."""
    radius, order = (texts_TD - root_D).norm(dim=-1).sort(stable=True)
    limits = torch.linspace(float(radius[0]), float(radius[-1]), steps, dtype=radius.dtype, device=radius.device)
    last = torch.searchsorted(radius, limits + 1e-9, right=True) - 1  # of each radius
    texts, numbers, found = texts_TD[order], numbers_T[order.cpu()], []
    for image in images_ND.split(IMAGES):
        found += [rows.unique() for rows in numbers[(image @ texts.T).cummax(1).indices[:, last].cpu()]]
    return found


def hierarchy_score(found: Sequence[Tensor], numbers_NL: Tensor) -> dict[str, float]:
    """Means over images of the precision and recall of the captions found for each, and "any"."""
    rows = [
        (torch.isin(seen, own).double().mean(), torch.isin(own, seen).double().mean(), torch.isin(seen, own).any())
        for seen, own in zip(found, numbers_NL)
    ]
    return dict(zip(("precision", "recall", "any"), torch.tensor(rows, dtype=torch.float64).mean(0).tolist()))


def including_roots(images: Gaussian, texts: Gaussian, root_D: Tensor) -> Tensor:
    """Between the root and the caption that includes each image the most, at unit length, (N, D)."""
    best = torch.cat([inclusion(images[rows], texts).argmax(1) for rows in blocks(len(images), 1, IMAGES)])
    return normalize(texts.mean[best] + root_D, dim=-1)


def level_correlation(values_NL: Tensor) -> float:
    """Mean over images of Kendall's tau-b between a value of its captions and their level, from general to specific."""
    found = [kendalltau(range(len(values)), values).statistic for values in values_NL.numpy()]
    return float(np.nan_to_num(found).mean())  # of equal values it is 0


# ---------------------------------------------------------------------------- semantic continuity. Source: jWAE, Fig. 2
# Likeness of two images is the cosine of their captions' tf-idf, which no model has seen as such; where the
# true matches are known it is the share of an image's captions that are true of the other. S steps.


class Walk(NamedTuple):
    """S steps from one image to another: rows of the nearest image and caption to each, and that image's cosine."""

    start: int
    end: int
    images: list[int]
    captions: list[int]
    cosines: list[float]


def likeness_of(data: CaptionDataset) -> Tensor:
    """Similarity of the meanings of images, by their captions alone, (N, N) in [0, 1]."""
    if data.truth is not None:
        owner, n = torch.tensor(data.owner()), len(data)
        true_NN = torch.zeros(n, n).index_add_(1, owner, exact_match(data).float())
        return true_NN.div_(torch.bincount(owner, minlength=n)).T.contiguous()
    together = [" ".join(texts) for texts in data.captions]
    rows = normalize(torch.from_numpy(caption_tfidf(together).toarray()), dim=1)
    return (rows @ rows.T).clamp(0, 1)


def nearest_images(codes_ND: Tensor, k: int) -> Tensor:
    """By the cosine, (N, k)."""
    unit = normalize(codes_ND.float(), dim=1)
    return (unit @ unit.T).fill_diagonal_(-2).topk(k, 1).indices


def walk_between(pairs: EmbeddedPairs, start: int, end: int, steps: int) -> Walk:
    """Even steps on the straight line between two images' codes, and what is nearest by the cosine. In between neither
    end counts, nor its captions: half-way they are equally near, so that rounding would choose.
    """
    images, texts = (normalize(x.mean.float(), dim=1) for x in (pairs.images, pairs.texts))
    share = torch.linspace(0, 1, steps)[:, None]
    codes = normalize((1 - share) * images[start] + share * images[end], dim=1)
    to_images, to_texts = codes @ images.T, codes @ texts.T
    to_images[1:-1, [start, end]] = -2
    to_texts[1:-1, (pairs.owner == start) | (pairs.owner == end)] = -2
    best, of_texts = to_images.max(1), to_texts.argmax(1)
    return Walk(start, end, best.indices.tolist(), of_texts.tolist(), best.values.tolist())


def of_neighbours(likeness: Tensor, near: Tensor) -> dict:
    """Mean likeness of an image to its neighbours (N, k), beside all other images and the k most similar ones."""
    n, k = near.shape
    others = likeness.clone().fill_diagonal_(-1)
    return {
        "k": k,
        "likeness": likeness.gather(1, near).mean().item(),
        "random": (likeness.sum() - likeness.diagonal().sum()).item() / (n * (n - 1)),
        "most": others.topk(k, 1).values.mean().item(),
    }


def of_walks(likeness: Tensor, walks: Sequence[Walk]) -> dict:
    """Means over walks; "consecutive": likeness of the nearest images of two steps in a row that differ."""
    steps = [(a, b) for one in walks for a, b in zip(one.images, one.images[1:]) if a != b]
    return {
        "walks": len(walks),
        "consecutive": sum(float(likeness[a, b]) for a, b in steps) / len(steps) if steps else None,
        "to_start": torch.stack([likeness[one.start, one.images] for one in walks]).mean(0).tolist(),
        "to_end": torch.stack([likeness[one.end, one.images] for one in walks]).mean(0).tolist(),
        "images": sum(len(set(one.images)) for one in walks) / len(walks),
        "cosine": torch.tensor([one.cosines for one in walks]).mean(0).tolist(),
    }
