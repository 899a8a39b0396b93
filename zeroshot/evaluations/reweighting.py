"""Bayesian prompt re-weighting: prompts weighted by how well each explains images of its class.

The images of a class are a mixture of its prompts' normal distributions, whose means and variances are known. EM finds
the proportions under a Dirichlet prior: from a few labelled images of each class, or from unlabelled ones with the
class as a second latent variable. Source: ProLIP (Chun et al., ICLR 2025), Bayesian prompt re-weighting.

M images, C classes, P prompts of a class, D dimensions. Densities are logarithms in float64 throughout.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from probemb.gaussian import Gaussian

STEPS, TOLERANCE = 200, 1e-9  # of EM: at most so many, and the smallest relative gain that goes on
CLASS_PRIOR = 1.0  # pseudo-images of each class, for the shares of the classes
BLOCK = 1 << 24  # densities in a block


@dataclass(frozen=True)
class Reweighting:
    """Proportions found by EM: weights (C, P) float64; with labels the images of each class, counts (C,).

    objective: log-likelihood plus the log of the prior before each step and at the end; never falls.
    """

    weights: Tensor
    objective: list[float]
    counts: Tensor | None = None


def log_densities(images: Tensor, normals: Gaussian) -> Tensor:
    """log N(z; mean, diag(exp(log_var))) of images (M, D) under normals (Q, D) -> (M, Q) float64."""
    z, mean, log_var = images.double(), normals.mean.double(), normals.log_var.double()
    precision = (-log_var).exp()
    squared = z.square() @ precision.T - 2 * z @ (mean * precision).T + (mean.square() * precision).sum(1)
    return -0.5 * (squared + log_var.sum(1) + z.shape[1] * math.log(2 * math.pi))


def fit_labelled(images: Tensor, labels: Tensor, prompts: Gaussian, prior_images: float = 10.0) -> Reweighting:
    """Proportions of each class from images (M, D) with labels (M,), under prompts (C, P, D).

    prior_images: pseudo-images of each class, evenly over its prompts: the prior is Dirichlet(1 + prior_images / P),
    the result its mode. 0 is maximum likelihood.
    """
    n_classes, n_prompts, _ = prompts.shape
    labels = labels.to(images.device)
    density_MP = torch.empty(len(images), n_prompts, dtype=torch.float64, device=images.device)
    for c in labels.unique():
        density_MP[labels == c] = log_densities(images[labels == c], prompts[int(c)])
    pseudo = prior_images / n_prompts

    def step(log_CP: Tensor) -> tuple[Tensor, float]:
        joint_MP = density_MP + log_CP[labels]
        total_M = joint_MP.logsumexp(1)
        counts = torch.zeros_like(log_CP).index_add_(0, labels, (joint_MP - total_M[:, None]).exp())
        return _proportions(counts + pseudo).log(), float(total_M.sum() + _prior(pseudo, log_CP))

    start = torch.full((n_classes, n_prompts), -math.log(n_prompts), dtype=torch.float64, device=images.device)
    log_CP, objective = _climb(step, start)
    return Reweighting(log_CP.exp(), objective, torch.bincount(labels, minlength=n_classes).cpu())


def fit_unlabelled(images: Tensor, prompts: Gaussian, prior_images: float = 10.0) -> Reweighting:
    """Proportions of the prompts and of the classes from images without labels."""
    n_classes, n_prompts, dim = prompts.shape
    flat = Gaussian(prompts.mean.reshape(-1, dim), prompts.log_var.reshape(-1, dim))
    blocks, offset, pseudo = [], 0.0, prior_images / n_prompts
    for part in images.split(max(1, BLOCK // len(flat))):
        density_MQ = log_densities(part, flat)
        top_M = density_MQ.amax(1, keepdim=True)
        blocks.append((density_MQ - top_M).exp_())  # once, so that a step is two products with a vector
        offset += float(top_M.sum())

    def step(log: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], float]:
        log_C, log_CP = log
        shares_Q = (log_C[:, None] + log_CP).exp().flatten()
        likelihood, counts = offset, torch.zeros_like(shares_Q)
        for block_MQ in blocks:
            total_M = block_MQ @ shares_Q
            likelihood += float(total_M.log().sum())
            counts += block_MQ.T @ total_M.reciprocal()
        counts_CP = (counts * shares_Q).view_as(log_CP)
        value = likelihood + float(_prior(pseudo, log_CP) + _prior(CLASS_PRIOR, log_C))
        shares = _proportions((counts_CP.sum(1) + CLASS_PRIOR)[None])[0]
        return (shares.log(), _proportions(counts_CP + pseudo).log()), value

    empty = torch.zeros(n_classes, n_prompts, dtype=torch.float64, device=images.device)
    start = (empty[:, 0] - math.log(n_classes), empty - math.log(n_prompts))
    (_, log_CP), objective = _climb(step, start)
    return Reweighting(log_CP.exp(), objective)


def _climb(step, state):
    """Repeat `step` (state -> next state, objective of the given state) until the objective stands still."""
    objective = []
    for _ in range(STEPS):
        following, value = step(state)
        objective.append(value)
        state = following
        if len(objective) > 1 and value - objective[-2] <= TOLERANCE * abs(value):
            break
    return state, [*objective, step(state)[1]]


def _proportions(counts: Tensor) -> Tensor:
    """Counts (R, P) divided by their sum; equal where there is nothing to count."""
    total = counts.sum(dim=1, keepdim=True)
    return torch.where(total > 0, counts / total, 1 / counts.shape[1])


def _prior(pseudo: float, log: Tensor) -> Tensor | float:
    return pseudo * log.sum() if pseudo else 0.0


def name_hash(name: str) -> bytes:
    """A hash that puts images in an order of their own, the same wherever they come from."""
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def few_of_each(labels: Sequence[int], names: Sequence[str], shots: int) -> list[int]:
    """Indices of up to `shots` images of each class, by the hashes of their names: the same ones in any order."""
    taken, chosen = Counter(), []
    for i in sorted(range(len(names)), key=lambda i: (name_hash(names[i]), names[i])):
        taken[labels[i]] += 1
        if taken[labels[i]] <= shots:
            chosen.append(i)
    return sorted(chosen)
