"""A Laplace posterior over the last projections of a trained dual encoder: uncertainty without any training.

Everything before a projection W stays fixed; W has a normal posterior around its trained value, whose precision is a
Kronecker product of the inputs' second moments A and of the loss' curvature B in the outputs. Source: BayesVLM
(Baumann et al., arXiv 2412.06014). Its public code maximises another function than the evidence, adds cross terms
(`damped=True` here) and drops items that fill no batch from B; here both factors see every item.

Letters: N items, M items of the other modality, P inputs of the projection, D outputs, K classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from probemb.gaussian import Gaussian

PSEUDO_DATA = 10.0  # how many times the pairs count; the authors' τ


def curvature(embeds: Tensor, others: Tensor, scale: float, bias: float | None = None) -> Tensor:
    """Sum over items of the Gauss-Newton curvature of the contrastive loss in their raw embeddings, (D, D).

    embeds: (N, D) of one modality, not normalised; others: (M, D) of the other, which stay fixed. With a bias the loss
    is the sigmoid loss, else the softmax from embeds to others. No (N, D, D) stack is formed.
    """
    norm = embeds.norm(dim=1, keepdim=True)
    unit, other = embeds / norm, torch.nn.functional.normalize(others, dim=1)
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
    """A (P, P) and B (D, D) of N pairs: A kron B is about the sum of a a' kron H over the items.

    inputs: (N, P), with a trailing 1 where the projection has a bias; embeds, others: (N, D) of the pairs. Items meet
    those of their block alone, as in a batch of the loss.
    """
    a, b = inputs.T @ inputs, torch.zeros(embeds.shape[1], embeds.shape[1], dtype=embeds.dtype, device=embeds.device)
    for rows in torch.arange(len(embeds)).split(block):
        b += curvature(embeds[rows], others[rows], scale, bias)
    return a / math.sqrt(len(inputs)), b / math.sqrt(len(embeds))


def log_evidence(a: Tensor, b: Tensor, weight_norm2: float, prior: float, pseudo_data: float = PSEUDO_DATA) -> float:
    """Log marginal likelihood of a prior precision up to a constant; a (P,), b (D,): eigenvalues of the factors.

    weight_norm2: squared norm of the projection's parameters.
    """
    p, d = len(a), len(b)
    det_a, det_b = ((math.sqrt(pseudo_data) * x + math.sqrt(prior)).log().sum().item() for x in (a, b))
    return 0.5 * (-prior * weight_norm2 + p * d * math.log(prior) - d * det_a - p * det_b)


def fit_prior(a: Tensor, b: Tensor, weight_norm2: float, pseudo_data: float = PSEUDO_DATA) -> float:
    """The prior precision with the largest `log_evidence`."""
    found = minimize_scalar(
        lambda x: -log_evidence(a, b, weight_norm2, math.exp(x), pseudo_data), bounds=(-20, 25), method="bounded",
        options={"xatol": 1e-10},
    )  # fmt: skip
    return math.exp(found.x)


@dataclass(frozen=True)
class LaplaceProjection:
    """The posterior of one projection, in the eigenbases of its factors.

    a_values (P,), a_vectors (P, P), b_values (D,), b_vectors (D, D): eigenpairs; prior: precision; pseudo_data: τ.
    """

    a_values: Tensor
    a_vectors: Tensor
    b_values: Tensor
    b_vectors: Tensor
    prior: float
    pseudo_data: float = PSEUDO_DATA

    @classmethod
    def fit(cls, inputs_moment: Tensor, curvature: Tensor, weight_norm2: float, pseudo_data: float = PSEUDO_DATA):
        """From `kronecker_factors` and the squared norm of the projection's parameters."""
        (a, u), (b, v) = (torch.linalg.eigh(x.double()) for x in (inputs_moment, curvature))
        a, b = a.clamp_min(0), b.clamp_min(0)
        return cls(a, u, b, v, fit_prior(a, b, weight_norm2, pseudo_data), pseudo_data)

    def log_var(self, inputs: Tensor, damped: bool = False) -> Tensor:
        """Log-variances of the outputs, (N, D), for inputs (N, P) with the trailing 1 of a bias.

        damped: the authors' factored precision (√τ A + √λ I) kron (√τ B + √λ I): items then differ by one factor.
        """
        squares = (inputs.to(self.a_vectors) @ self.a_vectors).square()  # (N, P)
        b_squares = self.b_vectors.square()  # (D, D): output x eigenvector
        if damped:
            root, prior = math.sqrt(self.pseudo_data), math.sqrt(self.prior)
            of_item = (squares / (root * self.a_values + prior)).sum(1)
            of_output = (b_squares / (root * self.b_values + prior)).sum(1)
            return of_item.log()[:, None] + of_output.log()
        precision = self.pseudo_data * self.a_values[:, None] * self.b_values + self.prior  # (P, D)
        return ((squares @ precision.reciprocal()) @ b_squares.T).log()


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
