"""Uncertainty against the quality of retrieval, erased pixels and words, and true ambiguity. Source: PCME++ §4.

N images, M captions; queries of "images" are images (image to text), those of "captions" are captions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from probemb.data.captions.find import CaptionDataset
from probemb.data.failures import BadSample
from probemb.evaluation.analyses.set_algebra import geometric_sigma, own_inclusion
from probemb.evaluation.embed_pairs import EmbeddedPairs, true_ambiguity
from probemb.evaluation.embedding import Embedder
from probemb.gaussian import Gaussian
from probemb.metrics import average_ranks, pearson, rejection_curve, uncertainty_bins

ERASED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # shares of pixels or regions, and of words
# Scalar measures of uncertainty, values of `--uncertainty`; the last two order items alike.
MEASURES: dict[str, Callable[[Gaussian], Tensor]] = {
    "sum": Gaussian.uncertainty,
    "log-det": Gaussian.log_det,
    "geometric-mean": geometric_sigma,
}
PROJECTED = 60  # images, with their captions
EXAMPLES = 8


def findings(
    embedder: Embedder,
    captions: CaptionDataset,
    pairs: EmbeddedPairs,
    per_query: dict[str, dict[str, Tensor]],
    tops: dict[str, Tensor],
    erased: int,
    measure: str = "sum",
) -> dict:
    """The uncertainty part of results.json.

    Args:
        per_query: as for `quality`; tops: of `evaluate_rankings`.
        erased: number of images, and of captions, to erase parts of.
        measure: of uncertainty, a key of MEASURES.

    Returns:
        "quality"; "ambiguity_spearman" for the synthetic world; "length_spearman", of a caption's u with its number of
        words; "erased" unless that is 0; "extremes".
    """
    u = MEASURES[measure]
    found: dict = {"quality": quality(pairs, per_query, u)}
    if captions.scenes is not None:
        ambiguity = true_ambiguity(captions, pairs.kept)
        found["ambiguity_spearman"] = spearman(u(pairs.texts), ambiguity)
    texts = [text for i in pairs.kept for text in captions.captions[i]]
    words = torch.tensor([float(len(text.split())) for text in texts])
    found["length_spearman"] = spearman(u(pairs.texts), words)
    if erased:
        chosen = [pairs.kept[row] for row in evenly(len(pairs.kept), erased)]
        found["erased"] = erase(embedder, captions, chosen, measure=u)
    distinct = {text: row for row, text in reversed(list(enumerate(texts)))}  # the first row of each text
    rows_of = {"images": range(len(pairs.images)), "captions": list(distinct.values())}
    found["extremes"] = {
        side: {
            which: [{"row": rows[place], "retrieved": tops[side][rows[place]].tolist()} for place in places]
            for which, places in extremes(u(items)[list(rows)]).items()
        }
        for (side, rows), items in zip(rows_of.items(), (pairs.images, pairs.texts))
    }
    return found


def quality(
    pairs: EmbeddedPairs,
    per_query: dict[str, dict[str, Tensor]],
    measure: Callable[[Gaussian], Tensor] = Gaussian.uncertainty,
) -> dict:
    """Ten bins and the rejection curve of every metric.

    Args:
        per_query: side -> metric -> (N,) or (M,), NaN for queries that a benchmark leaves out.

    Returns:
        side -> metric -> {"bins", "rejection"}, None where there are too few queries.
    """
    found: dict = {}
    for side, metrics in per_query.items():
        u = measure(getattr(pairs, "images" if side == "images" else "texts"))
        found[side] = {}
        for name, values in metrics.items():
            bins = uncertainty_bins(u, values, cut_over_all=True)
            curve = rejection_curve(u, values)
            found[side][name] = {
                "bins": asdict(bins) if bins else None,
                "rejection": asdict(curve) if curve else None,
            }
    return found


def spearman(a: Tensor, b: Tensor) -> float | None:
    """Rank correlation; None if one of the two is constant."""
    return pearson(average_ranks(a.double()), average_ranks(b.double()))


def evenly(n: int, wanted: int) -> list[int]:
    """At most `wanted` indices below n at equal distances."""
    wanted = min(n, wanted)
    return sorted({round(i * (n - 1) / max(1, wanted - 1)) for i in range(wanted)})


def erase_pixels(pixels_BCHW: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A grey square over a share of each normalised image, at a random place. Grey is 0, the mean colour."""
    out = pixels_BCHW.clone()
    height, width = out.shape[2:]
    h, w = round(height * share**0.5), round(width * share**0.5)
    for image in out:
        top = int(torch.randint(height - h + 1, (), generator=generator))
        left = int(torch.randint(width - w + 1, (), generator=generator))
        image[:, top : top + h, left : left + w] = 0
    return out


def erase_regions(regions_BRF: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A share of each image's regions, rounded to whole ones and drawn at random, made zeros; at least one stays."""
    out = regions_BRF.clone()
    for image in out:
        there = (image != 0).any(-1).nonzero().flatten()
        gone = max(0, min(round(share * len(there)), len(there) - 1))
        image[there[torch.randperm(len(there), generator=generator)[:gone]]] = 0
    return out


def prefix(text: str, share: float) -> str:
    """The text without a share of its words, rounded to whole words, at its end."""
    words = text.split()
    return " ".join(words[: len(words) - round(share * len(words))])


def erase_words(text: str, share: float, generator: torch.Generator) -> str:
    """The text without a share of its words, rounded to whole words, chosen at random."""
    words = text.split()
    kept = len(words) - round(share * len(words))
    chosen = torch.randperm(len(words), generator=generator)[:kept].sort().values.tolist()
    return " ".join(words[i] for i in chosen)


def erase(
    embedder: Embedder,
    captions: CaptionDataset,
    chosen: Sequence[int],
    shares: Sequence[float] = ERASED,
    measure: Callable[[Gaussian], Tensor] = Gaussian.uncertainty,
) -> dict:
    """Uncertainty against the share of erased pixels, or regions, and words.

    Args:
        chosen: indices of the images to erase parts of, and of their first captions.

    Returns:
        "pixels", or "regions" of images that are precomputed regions, "words", and "ends" (the last words, which leaves
        a prefix): {"shares", "uncertainty" (mean at each share), "items", "spearman" over single items, of uncertainty
        against share}; "ends" also has "lies_in", the share of shortened captions that lie in their prefix (inclusion).
    """
    read = []
    for i in chosen:
        try:
            read.append(embedder.transform(captions.images.open(i)))
        except BadSample:  # the file has changed
            continue
    texts = [captions.captions[i][0] for i in chosen]
    whole = embedder.model.normalized(torch.stack(read))
    side, erase_part = ("regions", erase_regions) if whole.ndim == 3 else ("pixels", erase_pixels)
    uncertainty: dict[str, list[Tensor]] = {side: [], "words": [], "ends": []}
    lies_in, full = [], embedder.tokens(embedder.tokenizer(texts))
    with embedder.show("erased", len(shares) * (len(whole) + 2 * len(texts))) as advance:
        for share in shares:
            draw = torch.Generator().manual_seed(0)
            batches = erase_part(whole, share, draw).split(embedder.batch_size)
            uncertainty[side].append(measure(embedder.pixels(batches, advance)))
            tokens = embedder.tokenizer([erase_words(text, share, draw) for text in texts])
            uncertainty["words"].append(measure(embedder.tokens(tokens, advance)))
            prefixes = [prefix(text, share) for text in texts]
            ends = embedder.tokens(embedder.tokenizer(prefixes), advance)
            uncertainty["ends"].append(measure(ends))
            cut = torch.tensor([len(a.split()) < len(b.split()) for a, b in zip(prefixes, texts)])
            lies_in.append(float((own_inclusion(full, ends)[cut] > 0).double().mean()) if cut.any() else None)
    found = {
        what: {
            "shares": list(shares),
            "uncertainty": [float(u.double().mean()) for u in values],
            "items": len(values[0]),
            "spearman": spearman(torch.cat(values), torch.tensor(shares).repeat_interleave(len(values[0]))),
        }
        for what, values in uncertainty.items()
    }
    found["ends"]["lies_in"] = lies_in
    return found


def projection(pairs: EmbeddedPairs, n_images: int = PROJECTED) -> dict:
    """Means of some images and their captions in a plane, by scikit-learn's t-SNE.

    Returns:
        "method", "images" and "captions": rows, "x", "y", "uncertainty".
    """
    rows = torch.tensor(evenly(len(pairs.images), n_images))
    columns = torch.isin(pairs.owner, rows).nonzero().flatten()
    points = torch.cat([pairs.images.mean[rows], pairs.texts.mean[columns]]).float()
    plane, method = _plane(points)
    out: dict = {"method": method}
    for name, index, gaussian, part in (
        ("images", rows, pairs.images, plane[: len(rows)]),
        ("captions", columns, pairs.texts, plane[len(rows) :]),
    ):
        out[name] = {"rows": index, "x": part[:, 0], "y": part[:, 1], "uncertainty": gaussian[index].uncertainty()}
    return out


def _plane(points: Tensor) -> tuple[Tensor, str]:
    from sklearn.manifold import TSNE

    if len(points.unique(dim=0)) < 4:  # the start of t-SNE divides by their spread
        return torch.nn.functional.pad(points, (0, 2))[:, :2], "the first two dimensions"
    perplexity = min(30.0, max(2.0, (len(points) - 1) / 4))
    plane = TSNE(init="pca", random_state=0, perplexity=perplexity).fit_transform(points.numpy())
    return torch.from_numpy(plane), f"t-SNE (perplexity {perplexity:.0f})"


def extremes(uncertainty: Tensor, n: int = EXAMPLES) -> dict[str, list[int]]:
    """Rows of the most and of the least uncertain items, the most extreme first."""
    order = uncertainty.argsort(stable=True).tolist()
    n = min(n, len(order) // 2)
    return {"most": order[::-1][:n], "least": order[:n]}
