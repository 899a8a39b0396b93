"""Joint Wasserstein autoencoders (jWAE): reconstruction, Gaussian regularisation, and supervision of codes; and the
modules that train beside the encoders: decoders from codes to features and captions, and a discriminator.

Source: Mahajan et al., "Joint Wasserstein Autoencoders for Aligning Multimodal Embeddings", Eqs. 5-9. The paper writes
sums over items for the reconstruction; here, as in the public code, it is the mean over items, so that its weight does
not depend on the batch. All losses are scalars, ().

Shapes: N items, D dimensions of a code, P of a feature, T tokens of an item, L words of a caption, V ids of words (0 is
padding), H hidden, R regions of W numbers.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.cross_attention import Tokens
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


# -------------------------------------------------------------------------------------------------------------- modules
# Source: jWAE §4.2. With `published` a module is built as in the public code, which differs. VSRN's decoder generates a
# caption from an image's regions.


class FeatureDecoder(nn.Module):
    """Layers from a code (…, D) to features (…, P), of `hidden` widths: the paper has one of D, the public code two."""

    def __init__(self, code_dim: int, width: int, hidden: Sequence[int]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise([code_dim, *hidden, width]))

    def forward(self, codes: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            codes = layer(codes).relu()
        return self.layers[-1](codes)


class CaptionDecoder(nn.Module):
    """Generates a caption word by word, after a learned start vector: p(w_m | w_0 … w_m−1, source).

    Without a start vector (`published`) word m is read when word m is to be predicted.
    """

    start: nn.Parameter | None

    def states(self, source: Tensor | Tokens, seen_NL: Tensor) -> Tensor:
        """The states before each word, (N, L, H); seen_NL: the caption's words with the dropped ones as 0."""
        raise NotImplementedError

    def before(self, seen_NL: Tensor) -> Tensor:
        """The vectors read before each word, (N, L, E): the start vector, and the words but the last one."""
        read = self.embedding(seen_NL)
        return torch.cat([self.start.expand(len(read), 1, -1), read[:, :-1]], 1)

    def nll(self, source: Tensor | Tokens, words_NL: Tensor, seen_NL: Tensor) -> Tensor:
        """−log p of each caption, summed over its words, (N,); padding does not count."""
        counts = words_NL != 0
        if self.start is not None:
            counts = counts | (torch.arange(words_NL.shape[1], device=words_NL.device) == 0)  # id 0 may begin a caption
        logits = self.out(self.states(source, seen_NL)[counts])  # of the words alone: V is large
        each = F.cross_entropy(logits, words_NL[counts], reduction="none")
        return torch.zeros(words_NL.shape, dtype=each.dtype, device=each.device).masked_scatter(counts, each).sum(1)


class WordDecoder(CaptionDecoder):
    """A GRU that generates a caption from its code. Source: Eq. 5.

    The code, through a linear map and tanh, is the GRU's first state. In the public code (`published`) it is a part of
    every input of two layers, and there is no start vector.
    """

    def __init__(self, n_words: int, code_dim: int, width: int = 300, hidden: int = 512, published: bool = False):
        super().__init__()
        self.published, n_layers = published, 2 if published else 1
        self.embedding = nn.Embedding(n_words, width)
        self.start = None if published else nn.Parameter(torch.zeros(width))
        self.code = nn.Linear(code_dim, code_dim if published else hidden)
        self.gru = nn.GRU(width + code_dim if published else width, hidden, n_layers, batch_first=True)
        self.out = nn.Linear(hidden, n_words)

    def states(self, codes: Tensor, seen_NL: Tensor) -> Tensor:
        """(N, L, H) from codes (N, D); in the public code's form also (N, L, D), a code for each word."""
        if self.published:
            codes = codes if codes.ndim == 3 else codes[:, None].expand(-1, seen_NL.shape[1], -1)
            return self.gru(torch.cat([self.code(codes), self.embedding(seen_NL)], -1))[0]
        return self.gru(self.before(seen_NL), self.code(codes).tanh()[None].contiguous())[0]


class RegionDecoder(CaptionDecoder):
    """A GRU that generates a caption from the sequence of an image's regions, and attends to them before every word.

    One GRU reads the regions; its last state is the first one of the GRU that speaks. Before word m that one reads word
    m−1 and Σ_r a_r e_r, with the reader's states e and a = softmax_r of v · tanh(W [e_r, h_m−1]).
    Source: VSRN (Li et al., ICCV 2019), in the form of its public code but for its dropout.
    """

    def __init__(self, n_words: int, region_width: int, width: int = 300, hidden: int = 512):
        super().__init__()
        self.embedding = nn.Embedding(n_words, width)
        self.start = nn.Parameter(torch.zeros(width))
        self.reader = nn.GRU(region_width, hidden, batch_first=True)
        self.key, self.query = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden, bias=False)
        self.energy = nn.Linear(hidden, 1, bias=False)
        self.speaker = nn.GRUCell(width + hidden, hidden)
        self.out = nn.Linear(hidden, n_words)

    def states(self, regions: Tokens, seen_NL: Tensor) -> Tensor:
        """(N, L, H) from regions (N, R, W), of which the mask says which exist: one at least."""
        mask = regions.mask
        read_NRH = self.reader(regions.values)[0]
        last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
        state, key_NRH, states = read_NRH[torch.arange(len(mask), device=mask.device), last], self.key(read_NRH), []
        for word in self.before(seen_NL).unbind(1):
            energy_NR = self.energy((key_NRH + self.query(state)[:, None]).tanh())[..., 0]
            weight_NR = energy_NR.masked_fill(~mask, -torch.inf).softmax(1)
            attended = (weight_NR[:, None] @ read_NRH)[:, 0]
            state = self.speaker(torch.cat([word, attended], 1), state)
            states.append(state)
        return torch.stack(states, 1)


class Discriminator(nn.Module):
    """Three layers (the public code has two): codes (…, D) of images and texts -> logit of the prior (…,)."""

    def __init__(self, code_dim: int, hidden: int = 256, published: bool = False):
        super().__init__()
        sizes = [code_dim, hidden, 1] if published else [code_dim, hidden, hidden, 1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, codes: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            codes = F.leaky_relu(layer(codes))
        return self.layers[-1](codes).squeeze(-1)

    def encoder_loss(self, codes: Tensor) -> Tensor:
        """The encoders' loss, whose gradient does not reach the discriminator."""
        constant = {name: parameter.detach() for name, parameter in self.named_parameters()}
        return encoder_loss(torch.func.functional_call(self, constant, codes))

    def loss(self, codes_ND: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The discriminator's own loss, (), against as many samples of the prior."""
        codes_ND = codes_ND.detach()
        return discriminator_loss(self(prior_samples(codes_ND, generator)), self(codes_ND))
