"""PCME: the soft contrastive loss of sampled embeddings, with uniformity and the information bottleneck.

Letters: N images, M texts, J and K samples of each, D dimensions.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from probemb.distances import in_row_blocks, near_origin, root, squared_euclidean
from probemb.gaussian import Gaussian
from probemb.losses.match import vib_kl
from probemb.losses.output import LossOutput

BLOCK_ELEMENTS = 1 << 20  # sample pairs held at a time (128 x 128 x 8 x 8); with more, recomputed in the backward pass
UNIFORMITY_POINTS = 128  # as in the authors' code


def pcme_loss(
    image: Gaussian, text: Gaussian, match: Tensor | None = None, *, scale: Tensor | float, shift: Tensor | float,
    samples: int | tuple[Tensor, Tensor] = 8, vib: float = 0.0,
    vib_form: Literal["kl", "sum", "pcme", "pcmepp"] = "kl", uniformity_weight: float = 0.0, squared: bool = False,
    eps: float = 1e-6, generator: torch.Generator | None = None,
) -> LossOutput:  # fmt: skip
    """2 * sum of every pair's soft contrastive loss + vib * L_vib + uniformity_weight * L_uniformity. Source: PCME.

    Images (N, D), texts (M, D), labels (N, M), see `pair_nll`; `samples` of each item, or themselves, (N, J, D) and
    (M, K, D); the generator, on the embeddings' device, is seeded alike on every rank.

    `vib_form`: "kl" is the mean over items and dimensions of KL(N(mean, var) || N(0, I)), "sum" its sum, to which the
    published weights of PCME belong. "pcme" and "pcmepp" reproduce the authors' codes, which put log sigma where log
    sigma^2 belongs: "pcmepp" is otherwise the mean; "pcme" is the sum, about the mean of the samples.
    """
    with torch.autocast(image.mean.device.type, enabled=False):
        image, text = image.float(), text.float()
        if isinstance(samples, int):
            samples = image.sample(samples, generator), text.sample(samples, generator)
        # Image to text and text to image are the same sum.
        terms = {"match": 2 * pair_nll(*samples, scale, shift, match, squared, eps).sum()}
        loss = terms["match"]
        if vib:
            terms["vib"] = sum(_bottleneck(g, z, vib_form) for g, z in zip((image, text), samples))
            loss = loss + vib * terms["vib"]
        if uniformity_weight:
            terms["uniformity"] = uniformity(torch.cat([z.flatten(0, 1) for z in samples]), generator)
            loss = loss + uniformity_weight * terms["uniformity"]
    return LossOutput(loss, terms)


def pair_nll(
    z_image_NJD: Tensor, z_text_MKD: Tensor, scale: Tensor | float, shift: Tensor | float,
    match_NM: Tensor | None = None, squared: bool = False, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Soft contrastive loss of every pair, (N, M): -m log p - (1 - m) log(1 - p). Source: PCME, soft contrastive loss.

    p is the mean over all J x K sample pairs of s(shift - scale * distance), s(x) = e^x / (e^x + e^-x) = sigmoid(2 x).
    Labels m are in [0, 1]; None is the identity; bool labels need half the memory of floats. `squared`: the squared
    Euclidean distance; `eps` is added under the root, which has no slope at zero (0 in the PCME++ authors' code).
    """
    n, j, _ = z_image_NJD.shape
    m, k, _ = z_text_MKD.shape
    if match_NM is None:
        match_NM = torch.eye(n, m, dtype=torch.bool, device=z_image_NJD.device)
    hard, match_NM = match_NM.dtype == torch.bool, match_NM.to(z_image_NJD.dtype)
    # A common origin keeps the squares small.
    origin = torch.cat([z_image_NJD.detach().flatten(0, 1), z_text_MKD.detach().flatten(0, 1)]).mean(0)
    flat_text = (z_text_MKD - origin).flatten(0, 1)  # (M K, D)

    def of_rows(z_NJD: Tensor, match: Tensor) -> Tensor:
        distance = squared_euclidean((z_NJD - origin).flatten(0, 1), flat_text).clamp(min=0)  # (N J, M K)
        if not squared:
            distance = (distance + eps).sqrt() if eps else root(distance)
        logit = 2 * (shift - scale * distance).view(-1, j, m, k)
        if hard:
            return _nll(logit * (2 * match - 1)[:, None, :, None])
        return match * _nll(logit) + (1 - match) * _nll(-logit)

    return in_row_blocks(of_rows, (z_image_NJD, match_NM), j * m * k, BLOCK_ELEMENTS)


def _nll(logit_NJMK: Tensor) -> Tensor:
    """-log of the mean over J and K of sigmoid(logit), (N, M), safe where the sigmoid is tiny."""
    _, j, _, k = logit_NJMK.shape
    return math.log(j * k) - F.logsigmoid(logit_NJMK).logsumexp((1, 3))


def uniformity(points_PD: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """log of the mean of exp(-2 |x_i - x_j|^2) over all pairs of different points. Source: PCME, uniformity loss.

    Of more than 128 points, 128 different ones are drawn.
    """
    if len(points_PD) > UNIFORMITY_POINTS:
        order = torch.randperm(len(points_PD), generator=generator, device=points_PD.device)
        points_PD = points_PD[order[:UNIFORMITY_POINTS]]
    points_PD, _ = near_origin(points_PD, points_PD)
    squared = squared_euclidean(points_PD, points_PD).clamp(min=0)
    first, second = torch.triu_indices(len(squared), len(squared), 1, device=squared.device)
    return (-2 * squared[first, second]).logsumexp(0) - math.log(len(first))


def _bottleneck(g: Gaussian, z_NKD: Tensor, form: str) -> Tensor:
    """One modality's information bottleneck."""
    mean = z_NKD.mean(1) if form == "pcme" else g.mean
    kl = vib_kl(Gaussian(mean, g.log_var if form in ("kl", "sum") else 0.5 * g.log_var))
    return kl * g.mean.numel() if form in ("sum", "pcme") else kl
