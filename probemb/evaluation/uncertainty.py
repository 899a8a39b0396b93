"""Evaluation of uncertainties: retrieval quality and its sign, erased inputs, true ambiguity, generality.

PCME++ §4. "images" are queries of image to text. N images, M captions, Q queries, P pairs, R resamples, D dimensions.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from probemb.data.captions.dataset import CaptionDataset
from probemb.data.failures import BadSample
from probemb.distances import inclusion
from probemb.evaluation.embedding import EmbeddedPairs, Embedder, exact_match, true_ambiguity
from probemb.gaussian import Gaussian
from probemb.metrics.bootstrap import clusters_of, estimate, pair_metrics
from probemb.metrics.retrieval import blocks
from probemb.metrics.uncertainty import (
    SIGNIFICANT,
    halves,
    rank_correlation,
    rejection_curve,
    spearman,
    standard_error,
    uncertainty_bins,
)

ERASED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # shares of pixels or regions, and of words
CROP = (0.1, 0.75)  # shares of the side
PROJECTED, EXAMPLES = 60, 8  # images, with their captions; most and least uncertain items
OWN_PAIRS, CAPTIONS, NESTED_PAIRS = 10_000, 2_000, 20_000  # at most, of which generality is measured
ROWS, IMAGES = 8, 4096  # pairs of which only the diagonal is wanted, and images whose captions are counted, at a time


def geometric_sigma(g: Gaussian) -> Tensor:
    """Geometric mean of the standard deviations, (N,): PCME's scalar measure of uncertainty (§3.2.1)."""
    return (0.5 * g.log_var.double().mean(-1)).exp()


# Scalar measures of uncertainty, values of `--uncertainty`, with what they are; the last two order items alike.
MEASURES: dict[str, tuple[str, Callable[[Gaussian], Tensor]]] = {
    "sum": ("the sum of an item's variances", Gaussian.uncertainty),
    "log-det": ("the log-determinant of an item's covariance", Gaussian.log_det),
    "geometric-mean": ("the geometric mean of an item's standard deviations", geometric_sigma),
}
PARTS = {"ends": "words at the end"}  # titles of what `erase` erases, where the key is none


def findings(
    embedder: Embedder, pairs: EmbeddedPairs, per_query: dict[str, dict[str, Tensor]], tops: dict[str, Tensor],
    erased: int, measure: str = "sum",
) -> dict:  # fmt: skip
    """The uncertainty part of results.json. per_query, tops: of `evaluate_rankings`; erased: number of images."""
    u = MEASURES[measure][1]
    found: dict = {"quality": quality(pairs, per_query, u)}
    if pairs.data.truth is not None:
        found["ambiguity_spearman"] = spearman(u(pairs.texts), true_ambiguity(pairs.data))
    texts = pairs.data.flat()
    words = torch.tensor([float(len(text.split())) for text in texts])
    found["length_spearman"] = spearman(u(pairs.texts), words)
    if erased:
        found["erased"] = erase(embedder, pairs.data, evenly(len(pairs.data), erased), measure=u)
    distinct = {text: row for row, text in reversed(list(enumerate(texts)))}  # the first row of each text
    found["extremes"] = {}
    for side, rows, items in (
        ("images", range(len(pairs.images)), pairs.images), ("captions", list(distinct.values()), pairs.texts),
    ):  # fmt: skip
        order = [rows[place] for place in u(items)[list(rows)].argsort(stable=True).tolist()]
        n = min(EXAMPLES, len(order) // 2)
        found["extremes"][side] = {
            which: [{"row": row, "retrieved": tops[side][row].tolist()} for row in some]
            for which, some in (("most", order[::-1][:n]), ("least", order[:n]))
        }
    return found


def quality(
    pairs: EmbeddedPairs, per_query: dict[str, dict[str, Tensor]],
    measure: Callable[[Gaussian], Tensor] = Gaussian.uncertainty,
) -> dict:  # fmt: skip
    """Ten bins and the rejection curve of every metric: side -> metric -> {"bins", "rejection"}, None for too few."""
    of_side = {"images": measure(pairs.images), "captions": measure(pairs.texts)}
    return {
        side: {
            name: {"bins": uncertainty_bins(u, values, cut_over_all=True), "rejection": rejection_curve(u, values)}
            for name, values in per_query[side].items()
        }
        for side, u in of_side.items()
    }


def evenly(n: int, wanted: int) -> list[int]:
    """At most `wanted` indices below n at equal distances."""
    wanted = min(n, wanted)
    return sorted({round(i * (n - 1) / max(1, wanted - 1)) for i in range(wanted)})


def projection(pairs: EmbeddedPairs, n_images: int = PROJECTED) -> dict:
    """Means of some images and their captions in a plane, by t-SNE: "method", and of either side rows and places."""
    rows = torch.tensor(evenly(len(pairs.images), n_images))
    columns = torch.isin(pairs.owner, rows).nonzero().flatten()
    points = torch.cat([pairs.images.mean[rows], pairs.texts.mean[columns]]).float()
    if len(points.unique(dim=0)) < 4:  # the start of t-SNE divides by their spread
        plane, method = pad(points, (0, 2))[:, :2], "the first two dimensions"
    else:
        from sklearn.manifold import TSNE  # sklearn costs --help more than a second

        perplexity = min(30.0, max(2.0, (len(points) - 1) / 4))
        plane = TSNE(init="pca", random_state=0, perplexity=perplexity).fit_transform(points.numpy())
        plane, method = torch.from_numpy(plane), f"t-SNE (perplexity {perplexity:.0f})"
    sides = (("images", rows, pairs.images, plane[: len(rows)]), ("captions", columns, pairs.texts, plane[len(rows) :]))
    return {"method": method} | {
        name: {"rows": index, "x": part[:, 0], "y": part[:, 1], "uncertainty": items[index].uncertainty()}
        for name, index, items, part in sides
    }


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
    order = torch.randperm(len(words), generator=generator)[: len(words) - round(share * len(words))]
    return " ".join(words[i] for i in order.sort().values.tolist())


def erase(
    embedder: Embedder, captions: CaptionDataset, chosen: Sequence[int], shares: Sequence[float] = ERASED,
    measure: Callable[[Gaussian], Tensor] = Gaussian.uncertainty,
) -> dict:  # fmt: skip
    """Uncertainty by erased share of the `chosen` images and of their first captions; "ends": of the last words."""
    read = []
    for i in chosen:
        with suppress(BadSample):  # the file has changed
            read.append(embedder.transform(captions.images.open(i)))
    texts = [captions.captions[i][0] for i in chosen]
    originals = embedder.model.normalized(torch.stack(read))
    side, erase_part = ("regions", erase_regions) if originals.ndim == 3 else ("pixels", erase_pixels)
    u: dict[str, list[Tensor]] = {side: [], "words": [], "ends": []}
    lies_in, full = [], embedder.tokens(embedder.tokenizer(texts))
    with embedder.show("erased", len(shares) * (len(originals) + 2 * len(texts))) as advance:

        def embedded(some: list[str]) -> Gaussian:
            return embedder.tokens(embedder.tokenizer(some), advance)

        for share in shares:
            draw = torch.Generator().manual_seed(0)
            batches = erase_part(originals, share, draw).split(embedder.batch_size)
            u[side].append(measure(embedder.pixels(batches, advance)))
            u["words"].append(measure(embedded([erase_words(text, share, draw) for text in texts])))
            prefixes = [prefix(text, share) for text in texts]
            ends = embedded(prefixes)
            u["ends"].append(measure(ends))
            cut = torch.tensor([len(a.split()) < len(b.split()) for a, b in zip(prefixes, texts)])
            lies_in.append(float((own_inclusion(full, ends)[cut] > 0).double().mean()) if cut.any() else None)
    found = {
        what: {
            "shares": list(shares),
            "uncertainty": [float(one.double().mean()) for one in values],
            "items": len(values[0]),
            "spearman": spearman(torch.cat(values), torch.tensor(shares).repeat_interleave(len(values[0]))),
        }
        for what, values in u.items()
    }
    found["ends"]["lies_in"] = lies_in
    return found


def crop_test(embedder: Embedder, images: Sequence) -> dict:
    """Does u grow when the middle of an image is enlarged to the whole? Source: URL (Kirchhof et al. 2023).

    images: decoded ones. "share": of images whose u grows; "size": Spearman of -u with the part's share of the side,
    which only images of single objects should show.
    """
    whole = embedder.model.normalized(torch.stack([embedder.transform(image) for image in images]))
    shares = torch.empty(len(whole)).uniform_(*CROP, generator=torch.Generator().manual_seed(0))
    parts, side = [], whole.shape[-1]
    for image, share in zip(whole, shares.tolist()):
        size = max(1, round(share * side))
        start = (side - size) // 2
        part = image[None, :, start : start + size, start : start + size]
        parts.append(interpolate(part, (side, side), mode="bicubic", antialias=True))
    u, u_part = (embedder.pixels(x.split(embedder.batch_size)).uncertainty() for x in (whole, torch.cat(parts)))
    grew = u_part > u
    return {
        "images": len(whole), "share": {"value": grew.double().mean().item(), "se": standard_error(grew)},
        "size": rank_correlation(-u_part, shares),
    }  # fmt: skip


def probe(embedder: Embedder, pairs: EmbeddedPairs, words: Tensor, n: int) -> dict[str, dict | None]:
    """Response of u to captions' content, and to crops and erasures of n images and captions. words: (M,), lengths."""
    u, found = pairs.texts.uncertainty(), dict.fromkeys(("larger_of_nested", "crop", "erased"))
    found["length"] = rank_correlation(u, words, pairs.owner)
    if pairs.data.truth is not None:
        rows = drawn(len(u), CAPTIONS)
        found["larger_of_nested"] = larger_of_nested(u[rows], exact_match(pairs.data, rows))
    if chosen := evenly(len(pairs.data), n):
        found["erased"] = erase(embedder, pairs.data, chosen, ERASED[::2])
        images = []
        for i in chosen:
            with suppress(BadSample):  # the file has changed
                images.append(pairs.data.images.open(i))
        if hasattr(images[0], "crop") and len(pairs.images.uncertainty().unique()) > 1:  # no regions, and no points
            found["crop"] = crop_test(embedder, images)
    return found


# ---------------------------------------------------------------------------------------------- inclusion as generality


def own_inclusion(inner: Gaussian, outer: Gaussian) -> Tensor:
    """`distances.inclusion` of every row in the same row of the other, (N,)."""
    return torch.cat([inclusion(inner[rows], outer[rows]).diagonal() for rows in blocks(len(inner), 1, ROWS)])


def generality(pairs: EmbeddedPairs) -> dict:
    """Does an image lie in its caption or in another's, and a caption in a more general one, that is, is
    `distances.inclusion` above 0? "nested": see `direction`, None where the captions' sets of images are unknown.
    """
    rows = drawn(len(pairs.owner), OWN_PAIRS)
    owner, texts = pairs.owner[rows], pairs.texts[rows]
    other = owner.roll(1)
    apart = other != owner  # neighbours in a drawn order may share their image

    def lie_in(image: Tensor, texts: Gaussian) -> dict[str, float]:
        return _share(own_inclusion(pairs.images[image], texts) > 0, *clusters_of(image))

    unpaired = lie_in(other[apart], texts[apart]) if apart.any() else None
    own, nested = {"pairs": len(rows), "lies_in": lie_in(owner, texts), "lies_in_other": unpaired}, None
    if pairs.data.truth is not None:
        rows = drawn(len(pairs.owner), CAPTIONS)
        nested = direction(pairs.texts[rows], exact_match(pairs.data, rows))
    return {"own": own, "nested": nested}


def direction(texts: Gaussian, match_NM: Tensor) -> dict | None:
    """Does inclusion tell which of two captions is true of more images? None without `nested_pairs`. "lies_in": the
    share in which the caption of fewer images lies in the other; "roc_auc": of that against the reverse inclusion.
    """
    small, large = nested_pairs(match_NM)
    if not len(small):
        return None
    n_found, chosen = len(small), drawn(len(small), NESTED_PAIRS)
    small, large = small[chosen], large[chosen]
    score_P = own_inclusion(texts[small], texts[large])
    cluster, weights_RC = clusters_of(small)
    both = torch.cat([score_P, -score_P])  # the reverse inclusion is the negative one
    area = pair_metrics(both, torch.arange(len(both)) < len(score_P), (cluster.repeat(2), weights_RC)).roc_auc
    return {
        "captions": len(texts), "found": n_found, "pairs": len(score_P),
        "lies_in": _share(score_P > 0, cluster, weights_RC), "roc_auc": estimate(area),
    }  # fmt: skip


def larger_of_nested(u: Tensor, match_NM: Tensor) -> dict | None:
    """Share of `nested_pairs` whose caption of more images has the larger u (M,), by bootstrap; None without any."""
    small, large = nested_pairs(match_NM)
    chosen = drawn(len(small), NESTED_PAIRS)
    return _share(u[large[chosen]] > u[small[chosen]], *clusters_of(small[chosen])) if len(small) else None


def nested_pairs(match_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of captions of which one is true of some of the other's images and of no other image, from (N, M) bool
    matches: (P,) columns of the smaller sets, (P,) of the larger ones.
    """
    common = sum(images.T @ images for images in map(Tensor.float, match_NM.split(IMAGES)))  # exact below 2^24
    count = common.diagonal()
    inside = (common == count[:, None]) & (count[:, None] < count[None, :]) & (count[:, None] > 0)
    return inside.nonzero(as_tuple=True)


def _share(hit_P: Tensor, cluster_P: Tensor, weights_RC: Tensor) -> dict[str, float]:
    """The share of hits, with its interval over the rows of weights."""
    hits_C, pairs_C = torch.bincount(cluster_P, hit_P.double()), torch.bincount(cluster_P).double()
    return estimate((weights_RC.double() @ hits_C) / (weights_RC.double() @ pairs_C))


def drawn(n: int, wanted: int) -> Tensor:
    """At most `wanted` indices below n in a drawn order, the same at every call."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))[:wanted]


# --------------------------------------------------------------------------------------------------- the sign of u


def signs(pairs: EmbeddedPairs, correct: Mapping[str, Tensor]) -> dict:
    """Is what u calls certain found more often? correct: side -> (Q,), whether the first answer is right, "r@1":
    Spearman of u with it, which should be negative; "halves" of the queries by u; "warning" if u has the wrong sign.
    """
    found: dict = {}
    for side, items, cluster in (("captions", pairs.texts, pairs.owner), ("images", pairs.images, None)):
        given = items.uncertainty(), correct[side], cluster
        found[side] = {"r@1": rank_correlation(*given), "halves": halves(*given)}
    return found | {"warning": warning(found)}


def warning(found: Mapping[str, Mapping]) -> str | None:
    """One line on the sides of `signs` where u significantly runs against recall, and what to do; None if on none."""
    told = []
    for side, one in found.items():
        correlation, parts = one["r@1"], one["halves"]
        fewer = parts and parts["difference"]["value"] < -SIGNIFICANT * parts["difference"]["se"]
        if correlation and (fewer or correlation["value"] > SIGNIFICANT * correlation["se"]):
            told.append("{side}: Spearman with R@1 {value:+.3f} ± {se:.3f}".format(side=side, **correlation))
            if parts:
                told[-1] += ", R@1 {certain:.1%} in the certain half, {rest:.1%} in the other".format(**parts)
    what = f"warning: u runs against recall here ({'; '.join(told)}), so refusing by u keeps the worse answers; "
    return f"{what}finetune so that u keeps its sign (docs/concepts.md)" if told else None
