"""Inclusion as a measure of generality: does an image lie in its caption, and a caption in a more general one?

The test is `distances.inclusion` above 0: the other normal is wider around it. Pairs and captions beyond the limits
below are left out, drawn from a seed. N images, M captions, P pairs, C clusters, R resamples, D dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probemb.data.captions.find import CaptionDataset
from probemb.evaluation.analyses.set_algebra import nested_pairs, own_inclusion
from probemb.evaluation.embed_pairs import EmbeddedPairs, exact_match
from probemb.gaussian import Gaussian
from probemb.metrics.judged import cluster_weights, estimate, pair_metrics

OWN_PAIRS, CAPTIONS, NESTED_PAIRS = 10_000, 2_000, 20_000  # at most


def generality(pairs: EmbeddedPairs, captions: CaptionDataset, seed: int = 0) -> dict:
    """Both parts of the measure.

    Args:
        pairs: one embedding of each item.

    Returns:
        "own": see `own_pairs`; "nested": see `direction`, None but for the synthetic world, whose captions' sets of
        images are known.
    """
    found: dict = {"own": own_pairs(pairs, seed), "nested": None}
    if captions.scenes is not None:
        rows = _drawn(len(pairs.owner), CAPTIONS, seed)
        match_NM = exact_match(captions, pairs.kept, rows.tolist())
        found["nested"] = direction(Gaussian(pairs.texts.mean[rows], pairs.texts.log_var[rows]), match_NM, seed)
    return found


def own_pairs(pairs: EmbeddedPairs, seed: int = 0) -> dict:
    """The share of images that lie in their captions.

    Returns:
        "pairs"; "lies_in": of own pairs, "lies_in_other": of as many images with the caption of another one (None with
        a single image): each {"value", "low", "high"}, 95 % by bootstrap over the images.
    """
    rows = _drawn(len(pairs.owner), OWN_PAIRS, seed)
    owner = pairs.owner[rows]
    texts = Gaussian(pairs.texts.mean[rows], pairs.texts.log_var[rows])
    found = {"pairs": len(rows), "lies_in": _lies_in(pairs.images, owner, texts, owner), "lies_in_other": None}
    other = owner.roll(1)
    apart = other != owner  # neighbours in a drawn order may share their image
    if apart.any():
        strangers = Gaussian(texts.mean[apart], texts.log_var[apart])
        found["lies_in_other"] = _lies_in(pairs.images, other[apart], strangers, other[apart])
    return found


def direction(texts: Gaussian, match_NM: Tensor, seed: int = 0) -> dict | None:
    """Does inclusion tell which of two captions is true of more images?

    Args:
        texts: Gaussian (M, D); match_NM: (N, M) bool, which image each caption is true of.

    Returns:
        over pairs of captions of which one is true of some of the images of the other and of no other image, None
        without any: "captions"; "found", the pairs among them; "pairs", those that are measured; "lies_in", the share
        in which the caption of fewer images lies in the other; "roc_auc", of the inclusion that way against the
        reverse one. Both {"value", "low", "high"}, 95 % by bootstrap over the captions of fewer images, and 0.5 by
        chance.
    """
    small, large = nested_pairs(match_NM)
    if not len(small):
        return None
    n_found = len(small)
    chosen = _drawn(n_found, NESTED_PAIRS, seed)
    small, large = small[chosen], large[chosen]
    score_P = own_inclusion(
        Gaussian(texts.mean[small], texts.log_var[small]), Gaussian(texts.mean[large], texts.log_var[large])
    )
    cluster = small.unique(return_inverse=True)[1]
    weights_RC = cluster_weights(int(cluster.max()) + 1, seed=seed)
    both = torch.cat([score_P, -score_P])  # the reverse inclusion is the negative one
    label = torch.arange(len(both)) < len(score_P)
    area = pair_metrics(both, label, (cluster.repeat(2), weights_RC)).roc_auc
    return {
        "captions": len(texts.mean),
        "found": n_found,
        "pairs": len(score_P),
        "lies_in": estimate(_shares(score_P > 0, cluster, weights_RC)),
        "roc_auc": estimate(area),
    }


def _lies_in(images: Gaussian, rows: Tensor, texts: Gaussian, cluster: Tensor) -> dict[str, float]:
    """The share of the images `rows` that lie in the texts, row by row."""
    hit = own_inclusion(Gaussian(images.mean[rows], images.log_var[rows]), texts) > 0
    cluster = cluster.unique(return_inverse=True)[1]
    return estimate(_shares(hit, cluster, cluster_weights(int(cluster.max()) + 1)))


def _shares(hit_P: Tensor, cluster_P: Tensor, weights_RC: Tensor) -> Tensor:
    """The share of hits under every row of weights, (R,) float64."""
    n_clusters = weights_RC.shape[1]
    sums = torch.zeros(n_clusters, 2, dtype=torch.float64)
    sums.index_add_(0, cluster_P, torch.stack([hit_P.double(), torch.ones(len(hit_P), dtype=torch.float64)], 1))
    hits_R, pairs_R = (weights_RC.double() @ sums).unbind(1)
    return hits_R / pairs_R


def _drawn(n: int, wanted: int, seed: int) -> Tensor:
    """At most `wanted` indices below n in an order drawn from the seed."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:wanted]
