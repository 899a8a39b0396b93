"""A Laplace posterior over the last projections of a trained dual encoder: uncertainty without any training.

Everything before a projection W stays fixed; W has a normal posterior around its trained value, whose precision is made
of two Kronecker factors: the inputs' second moments A, and the loss' curvature B in the outputs. Its variance is
epistemic: it tells how far an item is from those that the factors saw, not how many things it could match. Source:
BayesVLM (Baumann et al., arXiv 2412.06014), whose public code maximises another function than the evidence and drops
the items that fill no block from B; here both factors see every item.

Letters: N items, M items of the other modality, P inputs of the projection, D outputs, K classes.
"""

from __future__ import annotations

import math

import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.gaussian import Gaussian

ROWS = 256  # items whose products with a block are in memory at once
PSEUDO_DATA = 10.0  # how many times the pairs count; the authors' τ


def curvature(embeds: Tensor, others: Tensor, scale: float, bias: float | None = None) -> Tensor:
    """Sum over items of the Gauss-Newton curvature of the contrastive loss in their raw embeddings, (D, D).

    embeds: (N, D) of one modality, not normalised; others: (M, D) of the other, which stay fixed. With a bias the loss
    is the sigmoid loss, else the softmax from embeds to others. No (N, D, D) stack is formed.
    """
    norm = embeds.norm(dim=1, keepdim=True)
    unit, other = embeds / norm, F.normalize(others, dim=1)
    cosine = unit @ other.T  # (N, M)
    if bias is None:
        weight = (scale * cosine).softmax(1)
    else:
        probability = (scale * cosine + bias).sigmoid()
        weight = probability * (1 - probability)
    # J = (I - u u') / norm takes y to (y - c u) / norm, so the sum over pairs is a few products.
    scaled = weight / norm.square()
    cross = other.T @ (scaled * cosine).T @ unit  # (D, D)
    total = other.T @ (scaled.sum(0)[:, None] * other) - cross - cross.T
    total += unit.T @ ((scaled * cosine.square()).sum(1, keepdim=True) * unit)
    if bias is None:
        mean = weight @ other
        mean = (mean - (unit * mean).sum(1, keepdim=True) * unit) / norm
        total -= mean.T @ mean
    return scale**2 * total


def kronecker_factors(
    inputs: Tensor, embeds: Tensor, others: Tensor, scale: float, bias: float | None = None, block: int = 32_768
) -> tuple[Tensor, Tensor]:
    """A (P, P) and B (D, D) of N pairs, float64: A kron B is about the sum of a a' kron H over the items.

    inputs: (N, P), with a trailing 1 where the projection has a bias; embeds, others: (N, D) of the pairs. Items meet
    those of their block alone, as in a batch of the loss; blocks are of one size.
    """
    a, b = (torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device) for x in (inputs, embeds))
    for rows in torch.arange(len(embeds)).tensor_split(-(-len(embeds) // block)):
        other = others[rows].double()
        for some in rows.split(ROWS):
            x = inputs[some].double()
            a += x.T @ x
            b += curvature(embeds[some].double(), other, scale, bias)
    return a / math.sqrt(len(inputs)), b / math.sqrt(len(embeds))


def fit_prior(
    a: Tensor, b: Tensor, weight_norm2: float, pseudo_data: float = PSEUDO_DATA, exact: bool = False
) -> float:
    """The prior precision λ with the largest evidence; a (P,), b (D,): eigenvalues of the factors.

    The evidence ½ (P D log λ - λ |W|² - log det of the posterior's precision) is concave in log λ. weight_norm2: |W|²,
    of the bias too; pseudo_data, exact: as of `LaplaceProjection`.
    """

    def slope(log_prior: float) -> float:
        """Twice the derivative: each direction counts by how much of its precision is data."""
        prior = math.exp(log_prior)
        if exact:
            data = pseudo_data * a[:, None] * b
            known = (data / (data + prior)).sum()
        else:
            of_a, of_b = (math.sqrt(pseudo_data) * x for x in (a, b))
            root = math.sqrt(prior)
            known = (len(b) * (of_a / (of_a + root)).sum() + len(a) * (of_b / (of_b + root)).sum()) / 2
        return known.item() - prior * weight_norm2

    return math.exp(brentq(slope, -60, 60, xtol=1e-12))


class LaplaceProjection(nn.Module):
    """The posterior of one projection, in the eigenbases of its factors, and the embeddings that it gives.

    exact: the precision is τ A kron B + λ I; else the published (√τ A + √λ I) kron (√τ B + √λ I), which adds cross
    terms: the covariances of all items then differ by one factor alone.
    """

    def __init__(self, dim: int, inputs: int, exact: bool = False, pseudo_data: float = PSEUDO_DATA):
        super().__init__()
        self.exact, self.pseudo_data = exact, pseudo_data
        for name, shape in (("a_values", (inputs,)), ("a_vectors", (inputs, inputs)), ("prior", ()),
                            ("b_values", (dim,)), ("b_vectors", (dim, dim))):  # fmt: skip
            self.register_buffer(name, torch.zeros(shape))

    def fit(self, a: Tensor, b: Tensor, weight_norm2: float) -> LaplaceProjection:
        """Take `kronecker_factors` (P, P) and (D, D), and the squared norm of the projection's parameters."""
        (a, a_vectors), (b, b_vectors) = (torch.linalg.eigh(x.double()) for x in (a, b))
        a, b = a.clamp_min(0), b.clamp_min(0)
        prior = a.new_tensor(fit_prior(a, b, weight_norm2, self.pseudo_data, self.exact))
        state = {"a_values": a, "a_vectors": a_vectors, "b_values": b, "b_vectors": b_vectors, "prior": prior}
        self.load_state_dict(state)
        return self

    def log_var(self, inputs: Tensor) -> Tensor:
        """Log-variances of the outputs, (N, D), for inputs (N, P) with the trailing 1 of a bias."""
        squares = (inputs.to(self.a_vectors) @ self.a_vectors).square()  # (N, P)
        b_squares = self.b_vectors.square()  # (D, D): output x eigenvector
        if self.exact:
            precision = self.pseudo_data * self.a_values[:, None] * self.b_values + self.prior  # (P, D)
            return ((squares @ precision.reciprocal()) @ b_squares.T).log()
        root, prior = math.sqrt(self.pseudo_data), self.prior.sqrt()
        of_item = (squares / (root * self.a_values + prior)).sum(1)
        of_output = (b_squares / (root * self.b_values + prior)).sum(1)
        return of_item.log()[:, None] + of_output.log()

    def forward(self, raw: Tensor, inputs: Tensor) -> Gaussian:
        """Raw embeddings (N, D) and their inputs as normals that CSD ranks as the mean of their `prob_cosine`."""
        return expected_unit(Gaussian(raw, self.log_var(inputs).to(raw.dtype)))


def prob_cosine(x: Gaussian, y: Gaussian) -> tuple[Tensor, Tensor]:
    """Mean and variance of the cosine of two normals, (N, M) each. Source: BayesVLM, ProbCosine.

    The expected squared norms stand for the squared norms.
    """
    x, y = x.float(), y.float()
    x2, y2 = (g.mean.square() + g.var for g in (x, y))  # second moments
    norm = x2.sum(1)[:, None] * y2.sum(1)
    return x.mean @ y.mean.T / norm.sqrt(), (x2 @ y.var.T + x.var @ y.mean.square().T) / norm


def expected_unit(x: Gaussian) -> Gaussian:
    """x over the root of its expected squared norm: CSD of two of these ranks as the mean of their `prob_cosine`."""
    log_norm = (x.mean.square() + x.var).sum(-1, keepdim=True).log()
    return Gaussian(x.mean * (-0.5 * log_norm).exp(), x.log_var - log_norm)


def probit_softmax(mean: Tensor, var: Tensor) -> Tensor:
    """Softmax of normal logits, (..., K), by the probit approximation. Source: MacKay 1992; BayesVLM."""
    return (mean / (1 + math.pi * var / 8).sqrt()).softmax(-1)
