"""Joint Wasserstein autoencoders (jWAE): reconstruction, Gaussian regularisation, and supervision of codes.

Source: Mahajan et al., "Joint Wasserstein Autoencoders for Aligning Multimodal Embeddings", Eqs. 5-9. The paper writes
sums over items for the reconstruction; here, as in the public code, it is the mean over items, so that its weight does
not depend on the batch. All losses are scalars, ().

Shapes: N items, D dimensions of a code, P of a feature, T tokens of an item, L words of a caption.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from probemb.gaussian import Gaussian, at_least_float32

SCALES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # of the kernels' squared width, as for WAE-MMD
FIRST_DROPPED = 2  # padding (0), and the unknown word or, in the public code, the start (1) are never dropped
NORMS = {
    "l1": lambda difference: difference.abs().sum(-1),
    "l2": lambda difference: torch.linalg.vector_norm(difference, dim=-1),
    "squared": lambda difference: difference.square().sum(-1),
}


def reconstruction(x: Tensor, decoded: Tensor, norm: str = "l1", mask_NT: Tensor | None = None) -> Tensor:
    """Mean over items of ‖x − x̂‖, (N, P), or of its sum over tokens, (N, T, P), that the mask has, by a norm of NORMS.

    x is a target, so it gets no gradient. Source: Eq. 6, first term.
    """
    error = NORMS[norm](at_least_float32(x).detach() - at_least_float32(decoded))
    if mask_NT is not None:
        error = error * mask_NT
    return error.sum() / len(x)


def drop_words(words_NL: Tensor, rate: float, generator: torch.Generator | None = None) -> Tensor:
    """A copy with words that a decoder does not get to see, each with probability `rate`, replaced by 0, (N, L)."""
    drawn = torch.rand(words_NL.shape, generator=generator, device=words_NL.device)
    return words_NL.masked_fill((drawn < rate) & (words_NL >= FIRST_DROPPED), 0)


def encoder_loss(logits: Tensor) -> Tensor:
    """Mean of −log D(code), D = sigmoid(logit) the probability of the prior: the GAN's form of D_JS. Source: Eq. 6."""
    return F.softplus(-at_least_float32(logits)).mean()


def discriminator_loss(prior_logits: Tensor, code_logits: Tensor) -> Tensor:
    """Cross entropy of prior samples (1) and of codes (0), each a mean, summed; at its optimum 2 log 2 − 2 D_JS."""
    return encoder_loss(prior_logits) + encoder_loss(-at_least_float32(code_logits))


def js_bound(loss: Tensor) -> Tensor:
    """The lower bound of D_JS, in nats, that a `discriminator_loss` means: log 2 − loss / 2, at least 0."""
    return (math.log(2) - loss.detach() / 2).clamp(min=0)


def prior_samples(codes_ND: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return torch.randn(codes_ND.shape, generator=generator, device=codes_ND.device, dtype=codes_ND.dtype)


def code_statistics(codes_ND: Tensor) -> dict[str, Tensor]:
    """Two numbers that codes of N(0, I) are known to have, without a gradient.

    "code_square" is the mean of |c|² / D, 1 for the prior; "code_dimensions" the participation ratio of the
    covariance's eigenvalues, (Σ λ)² / Σ λ², which is D for the prior in the limit, and N D / (N + D) of N samples.
    """
    codes = at_least_float32(codes_ND.detach())
    centred = codes - codes.mean(0)
    products = centred @ centred.T if len(codes) < codes.shape[-1] else centred.T @ centred
    dimensions = products.trace().square() / products.square().sum().clamp(min=torch.finfo(codes.dtype).tiny)
    return {"code_square": codes.square().mean(), "code_dimensions": dimensions}


def code_mse(image_ND: Tensor, text_ND: Tensor) -> Tensor:
    """Mean over pairs of ‖f_v(x) − f_t(y)‖². Source: Eq. 7."""
    return (at_least_float32(image_ND) - at_least_float32(text_ND)).square().sum(-1).mean()


def vae_kl(codes: Gaussian) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, I)) of the (N, D) codes, summed over dimensions, mean over items. Source: Eq. 2."""
    codes = codes.float()
    return 0.5 * (codes.mean.square() + codes.var - 1 - codes.log_var).sum(-1).mean()


def mmd(x_ND: Tensor, y_MD: Tensor, kernel: Literal["rbf", "imq"] = "rbf") -> Tensor:
    """Squared maximum mean discrepancy of two sets of codes, unbiased, mean over kernels of several widths.

    k(d²) = exp(−d² / (2 c)) for "rbf" and c / (c + d²) for "imq", with c over `SCALES` times the mean squared distance
    among all codes, as a constant. An unbiased estimate may be below 0, and needs two codes of each kind.
    Source: Gretton et al., "A Kernel Two-Sample Test"; Tolstikhin et al., "Wasserstein Auto-Encoders".
    """
    n, m = len(x_ND), len(y_MD)
    codes = torch.cat([at_least_float32(x_ND), at_least_float32(y_MD)])
    centred = codes - codes.detach().mean(0)  # distances from products lose less precision near the origin
    norms = centred.square().sum(-1)
    squared = (norms[:, None] + norms[None] - 2 * centred @ centred.T).clamp(min=0)
    base = squared.detach().sum() / ((n + m) * (n + m - 1))
    total = codes.new_zeros(())
    for scale in SCALES:
        c = (scale * base).clamp(min=torch.finfo(codes.dtype).tiny)
        k = torch.exp(-squared / (2 * c)) if kernel == "rbf" else c / (c + squared)
        within_x = (k[:n, :n].sum() - k[:n, :n].diagonal().sum()) / (n * (n - 1))
        within_y = (k[n:, n:].sum() - k[n:, n:].diagonal().sum()) / (m * (m - 1))
        total = total + within_x + within_y - 2 * k[:n, n:].mean()
    return total / len(SCALES)
