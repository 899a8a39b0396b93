"""Cosine similarities and positives of a batch of N pairs, shared by the point methods."""

from __future__ import annotations

import torch
from torch import Tensor

from probemb.gaussian import Gaussian, at_least_float32


def cosine_similarity(image: Gaussian, text: Gaussian) -> Tensor:
    """Cosines of the means, unit rows (N, D) and (M, D), as (N, M) in at least float32, also under autocast."""
    with torch.autocast(image.mean.device.type, enabled=False):
        return at_least_float32(image.mean) @ at_least_float32(text.mean).T


def positive_pairs(similarity_NN: Tensor, match_NN: Tensor | None = None) -> Tensor:
    """Pairs that are never negatives, (N, N) bool: the diagonal, and every pair with a match above 0.

    Raises:
        ValueError: similarities that are not square, or labels of another shape.
    """
    n = len(similarity_NN)
    if similarity_NN.shape != (n, n):
        raise ValueError(f"N pairs have N x N similarities, these are {tuple(similarity_NN.shape)}")
    own = torch.eye(n, dtype=torch.bool, device=similarity_NN.device)
    if match_NN is None:
        return own
    if match_NN.shape != similarity_NN.shape:
        raise ValueError(f"match is {tuple(match_NN.shape)}, the pairs are {tuple(similarity_NN.shape)}")
    return own | (match_NN > 0)
