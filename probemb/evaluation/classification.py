"""Zero-shot classification: embeddings of prompts -> class vectors -> ranks of the true class.

Shapes: N images, C classes, P prompts of a class, K = 1..P prompts kept, D dimensions.
Source: PCME++ §3.5 and §C.6; class vectors are means of the prompts' means, as in CLIP's prompt ensembles.
"""

from itertools import product

import torch
from torch import Tensor

from probemb.metrics.retrieval import blocks


def normalise(vectors: Tensor) -> Tensor:
    """Unit length along the last dimension; a zero vector stays zero."""
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(vectors.dtype).tiny)


def class_vectors(mean: Tensor, weights: Tensor | None = None) -> Tensor:
    """Weighted means of the prompts' means (C, P, D) at unit length, (C, D) float32. weights: (C, P), not negative;
    None: equal. Summed in float64, so that equal weights give equal vectors in any order.
    """
    weights = mean.new_ones(mean.shape[:2]) if weights is None else weights
    return normalise(torch.einsum("cp,cpd->cd", weights.double(), mean.double())).float()


def prefix_vectors(mean: Tensor, uncertainty: Tensor, class_chunk: int = 64) -> Tensor:
    """Class vectors (P, C, D) float32 from the K most certain of the prompts (C, P, D); row K - 1 keeps K of them.
    Prompts of equal uncertainty (C, P) keep the order of the templates.
    """
    order = uncertainty.argsort(dim=1, stable=True)
    n_classes, n_prompts, dim = mean.shape
    out = torch.empty(n_prompts, n_classes, dim, device=mean.device)
    for part in torch.arange(n_classes, device=mean.device).split(class_chunk):
        ordered = mean[part].take_along_dim(order[part].unsqueeze(-1), dim=1)  # (c, P, D)
        out[:, part] = normalise(ordered.double().cumsum(dim=1)).float().transpose(0, 1)
    return out


def true_ranks(images: Tensor, vectors: Tensor, labels: Tensor, max_scores: int = 20_000_000) -> Tensor:
    """Number of classes that score above the true one, for one classifier (C, D), (N,), or K of them, (N, K) int32. A
    class that ties counts as above if it comes first, as under argmax. max_scores: held at once, about 5 bytes each.
    """
    stacked = vectors if vectors.dim() == 3 else vectors.unsqueeze(0)
    n_stacked, n_classes, dim = stacked.shape
    images, labels = images.to(stacked.device), labels.to(stacked.device).view(-1, 1, 1)
    before = torch.arange(n_classes, device=stacked.device)
    out = torch.empty(len(images), n_stacked, dtype=torch.int32, device=stacked.device)
    stacks = blocks(n_stacked, n_classes, max_scores)
    for k, n in product(stacks, blocks(len(images), stacks[0].stop * n_classes, max_scores)):
        scores = (images[n] @ stacked[k].reshape(-1, dim).T).view(n.stop - n.start, -1, n_classes)
        own = scores.take_along_dim(labels[n], dim=2)  # (n, k, 1)
        above = ~(scores <= own) | ((scores == own) & (before < labels[n]))  # NaN counts as above
        out[n, k] = above.sum(dim=2, dtype=torch.int32)
    return out if vectors.dim() == 3 else out[:, 0]


def accuracy(ranks: Tensor, k: int = 1) -> Tensor:
    """Share of images whose true class is among the first k: (N,) -> scalar, (N, K) -> (K,), float64."""
    return (ranks < k).double().mean(dim=0)


def class_accuracy(ranks: Tensor, labels: Tensor, n_classes: int, k: int = 1) -> Tensor:
    """Accuracy of each class' own images: (N,) -> (C,), (N, K) -> (C, K) float64; NaN for a class without images."""
    hits = (ranks < k).double()
    total = torch.zeros(n_classes, *hits.shape[1:], dtype=torch.float64, device=hits.device)
    total.index_add_(0, labels.to(hits.device), hits)
    count = torch.bincount(labels.to(hits.device), minlength=n_classes).double()
    return total / count.view(-1, *[1] * (hits.dim() - 1))


def confidences(images: Tensor, vectors: Tensor, scale: float, max_scores: int = 20_000_000) -> Tensor:
    """Probability of each image's first class under the softmax of scale * cosine, (N,) float64, on the CPU."""
    parts = images.to(vectors.device).split(max(1, max_scores // len(vectors)))
    return torch.cat([(scale * (part @ vectors.T)).double().softmax(dim=1).amax(dim=1).cpu() for part in parts])
