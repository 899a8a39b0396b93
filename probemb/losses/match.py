"""PCME++: cross entropy of match over all pairs, pseudo-positives, and the variational information bottleneck."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probemb import distributed
from probemb.distances import DISTANCES, SAMPLES, match_log_odds_of_samples
from probemb.gaussian import Gaussian
from probemb.losses.output import LossOutput, identity, pseudo_positives
from probemb.losses.ring import BLOCK, blocks, number, sum_over_pairs

OWN_BLOCK = 64  # own pairs that are compared at a time, with one another too


def vib_kl(g: Gaussian, zero_above: float | None = None) -> Tensor:
    """KL(N(mean, var) || N(0, I)) in nats, mean over items and dimensions. Source: PCME++ Eq. 3, L_VIB.

    `zero_above` drops the term once it exceeds that value, as the authors' code does at 10,000.
    """
    g = g.float()
    if zero_above is not None:
        # The standard normal in its place: its gradient is 0, where that of an overflow would be NaN.
        dropped = vib_kl(g.detach()) > zero_above
        g = Gaussian(g.mean.masked_fill(dropped, 0.0), g.log_var.masked_fill(dropped, 0.0))
    return -0.5 * (1 + g.log_var - g.mean.square() - g.var).mean()


def pairwise_match_loss(
    image: Gaussian, text: Gaussian, match: Tensor | None = None, *, scale: Tensor | float, shift: Tensor | float,
    distance: str = "csd", pseudo_positive: float = 0.0, vib: float = 0.0, all_image: Gaussian | None = None,
    all_text: Gaussian | None = None, offset: int = 0, generator: torch.Generator | None = None,
) -> LossOutput:  # fmt: skip
    """L_match(image to text) + L_match(text to image) + pseudo_positive * L_pp + vib * L_vib. Source: PCME++ Eq. 2, 3.

    L_match is the mean over all pairs of the binary cross entropy of sigmoid(-scale * distance + shift).
    With ranks, pass all ranks' items, (N, D), and the row at which this rank's start, and no `match`: the mean over the
    ranks is the loss of one process on the whole batch, in value and gradient.

    Args:
        image, text: (B, D) and (C, D); C = B unless `match` is given: (B, C) in [0, 1], images in rows.
        scale, shift: a and b of Eq. 2. For the distance "match-probability" they act inside the probability.
        generator: of the samples of "match-probability"; None is torch's own.
    """
    with torch.autocast(image.mean.device.type, enabled=False):
        logits = match_logits(image, text if all_text is None else all_text, scale, shift, distance, False, generator)
        i2t, softplus = _direction(logits, match, offset, pseudo_positive)
        if all_image is None:
            t2i, _ = _direction(logits.T, None if match is None else match.T, offset, pseudo_positive, softplus)
        elif pseudo_positive:
            reverse = match_logits(text, all_image, scale, shift, distance, True, generator)
            t2i, _ = _direction(reverse, None, offset, pseudo_positive)
        else:
            t2i = i2t  # over all ranks both are the mean over the same pairs, so each rank counts its images' twice
        terms = {name: i2t[name] + t2i[name] for name in i2t} | {"vib": vib_kl(image) + vib_kl(text)}
        loss = terms["match"] + vib * terms["vib"]
        if pseudo_positive:
            loss = loss + pseudo_positive * terms["pseudo_positive"]
    return LossOutput(loss, terms)


def _direction(
    logits_NM: Tensor, match_NM: Tensor | None, offset: int, pseudo_positive: float, softplus: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Terms of one direction, and the mean softplus of the logits, for the other direction."""
    if match_NM is None:
        matched = logits_NM.diagonal(offset).sum()  # the identity needs no N x M matrix
    else:
        match_NM = match_NM.to(logits_NM.dtype)
        matched = (match_NM * logits_NM).sum()
    softplus = F.softplus(logits_NM).mean() if softplus is None else softplus
    out = {"match": softplus - matched / logits_NM.numel()}
    if pseudo_positive:
        if match_NM is None:
            match_NM = identity(*logits_NM.shape, offset, logits_NM.device, logits_NM.dtype)
        with torch.no_grad():
            pseudo, out["n_pseudo"] = pseudo_positives(-logits_NM, match_NM)
        out["pseudo_positive"] = softplus - (pseudo * logits_NM).mean()
    return out, softplus


def ring_match_loss(
    image: Gaussian, text: Gaussian, *, scale: Tensor | float, shift: Tensor | float, distance: str = "csd",
    vib: float = 0.0, block: int = BLOCK,
) -> LossOutput:  # fmt: skip
    """`pairwise_match_loss` over all ranks' items, B on each: texts pass around a ring, `block` are compared at a time.

    Memory is O(B * block + B D).
    """
    with torch.autocast(image.mean.device.type, enabled=False):
        image, text = image.float(), text.float()
        numbers = number(scale, image.mean), number(shift, image.mean)

        def softplus_of_pairs(mean_i, log_var_i, mean_t, log_var_t, a, b) -> Tensor:
            logits = match_logits(Gaussian(mean_i, log_var_i), Gaussian(mean_t, log_var_t), a, b, distance)
            return F.softplus(logits).sum()

        items = (image.mean, image.log_var), (text.mean, text.log_var)
        total = sum_over_pairs(softplus_of_pairs, *items, numbers, block)
        own = (match_logits(image[i], text[i], *numbers, distance) for i in blocks(len(image), OWN_BLOCK))
        own = sum(logits.diagonal().sum() for logits in own)
        # The mean over the pairs of this rank's images, in both directions, which have the same pairs over all ranks.
        match = 2 * (total - own) / (len(image) * distributed.world_size() * len(image))
        bottleneck = vib_kl(image) + vib_kl(text)
    return LossOutput(match + vib * bottleneck, {"match": match, "vib": bottleneck})


def match_logits(
    a: Gaussian, b: Gaussian, scale: Tensor | float, shift: Tensor | float, distance: str = "csd",
    reverse: bool = False, generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Logits of every pair's match, shift - scale * distance, (N, M), or log-odds. Source: PCME++ Eq. 2.

    With `reverse`, a holds the texts; asymmetric distances stay distances from image to text.
    """
    if distance == "match-probability":
        samples = (g.float().sample(SAMPLES, generator) for g in (a, b))
        return match_log_odds_of_samples(*samples, scale, shift)
    fn = DISTANCES[distance]
    return shift - scale * (fn(b, a).T if reverse else fn(a, b))


class PairwiseMatchLoss(nn.Module):
    """`pairwise_match_loss` with learnable scale a and shift b, initially 5, 5 for PCME++ on COCO, 1, 1 pretraining."""

    def __init__(self, scale: float = 5.0, shift: float = 5.0, **options):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), float(scale)))
        self.shift = nn.Parameter(torch.full((1,), float(shift)))
        self.options = {"pseudo_positive": 0.1, "vib": 1e-4} | options

    def forward(self, image: Gaussian, text: Gaussian, match: Tensor | None = None) -> LossOutput:
        """Gaussians (B, D) and (C, D), match (B, C) in [0, 1] or None for the identity."""
        return pairwise_match_loss(image, text, match, scale=self.scale, shift=self.shift, **self.options)
