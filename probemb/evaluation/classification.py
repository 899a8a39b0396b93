"""Zero-shot classification: prompt texts -> Gaussians -> class vectors -> ranks of the true class.

What the zero-shot stage and the evaluation during pretraining share. Pure functions on tensors; the model comes in
as its `encode_image` or `encode_text`, so that an engine which wraps the model can pass its own.

Shapes: N images, C classes, P prompts of a class, K = 1..P prompts kept, D dimensions.
Source: PCME++ §3.5 and §C.6; class vectors are means of the prompts' means, as in CLIP's prompt ensembles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from probemb.errors import UserError
from probemb.gaussian import Gaussian

SINGLE_TEMPLATE = "a photo of a {}."
Progress = Callable[[int], None]  # called with the number of items done since the last call


def imagenet_templates() -> list[str]:
    """CLIP's 80 ImageNet templates, each with one `{}` for the class name."""
    from open_clip import OPENAI_IMAGENET_TEMPLATES

    return [template("{}") for template in OPENAI_IMAGENET_TEMPLATES]


def imagenet_class_names() -> list[str]:
    """The 1000 ILSVRC classes in the order of their sorted WordNet ids."""
    from open_clip import IMAGENET_CLASSNAMES

    return list(IMAGENET_CLASSNAMES)


def prompt_texts(class_names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """All C x P texts, the prompts of one class next to each other."""
    return [template.replace("{}", name) for name in class_names for template in templates]


def encode_texts(
    encode: Callable[[Tensor], Gaussian],
    tokens: Tensor,
    *,
    batch_size: int = 256,
    device: str | torch.device = "cpu",
    autocast: torch.dtype | None = None,
    cut: Callable[[Tensor], Tensor] = lambda tokens: tokens,
    progress: Progress | None = None,
) -> Gaussian:
    """Encode tokens (T, L), padded with zeros, in batches.

    A text that occurs several times is encoded once. Texts of like length share a batch, so that cutting its padding
    saves most of the time for short prompts.

    Args:
        encode: the model's `encode_text`.
        cut: the model's `cut_padding`.
        autocast: run the model under autocast in this type; None keeps its own precision.

    Returns:
        Gaussian (T, D), float32, on the CPU.
    """
    distinct, place = torch.unique(tokens, dim=0, return_inverse=True)
    position = torch.arange(1, tokens.shape[1] + 1)
    length = (position * (distinct != 0)).amax(dim=1)  # up to the end token, which is not zero
    order = length.argsort(stable=True)
    batches = (cut(distinct[part]) for part in order.split(batch_size))
    found = encode_images(encode, batches, device=device, autocast=autocast, progress=progress, total=len(tokens))
    return found[order.argsort()[place]]


def encode_images(
    encode: Callable[[Tensor], Gaussian],
    batches: Iterable[Tensor],
    *,
    device: str | torch.device = "cpu",
    autocast: torch.dtype | None = None,
    progress: Progress | None = None,
    total: int | None = None,
) -> Gaussian:
    """Encode every batch of an iterable, without gradients.

    Args:
        encode: the model's `encode_image` (or `encode_text`: any function from a batch to a Gaussian).
        total: items to report as done at the end, if it differs from the number of items encoded.

    Returns:
        Gaussian (N, D), float32, on the CPU.

    Raises:
        UserError: an embedding is not finite, or there is nothing to encode.
    """
    device = torch.device(device)
    parts, done = [], 0
    with torch.inference_mode():
        for batch in batches:
            batch = batch.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=autocast) if autocast else contextlib.nullcontext():
                found = encode(batch)
            parts.append(found.to("cpu", torch.float32))
            done += len(batch)
            if progress:
                progress(len(batch))
    if not parts:
        raise UserError("There is nothing to encode.", "Check that the data holds images and the class file names.")
    if progress and total and total > done:
        progress(total - done)
    both = Gaussian.cat(parts)
    if not (torch.isfinite(both.mean).all() and torch.isfinite(both.log_var).all()):
        raise UserError(
            "The model gives embeddings that are not finite numbers.",
            "Its training has diverged or its file is damaged: evaluate an earlier checkpoint.",
        )
    return Gaussian(both.mean.clone(), both.log_var.clone())  # out of inference mode: usable under autograd as well


def normalise(vectors: Tensor) -> Tensor:
    """Unit length along the last dimension; a zero vector stays zero."""
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(vectors.dtype).tiny)


def class_vectors(mean: Tensor, weights: Tensor) -> Tensor:
    """Class vectors as weighted means of the prompts' means, at unit length.

    Args:
        mean: (C, P, D), the means of the prompts.
        weights: (C, P), not negative, each class with at least one positive weight.

    Returns:
        (C, D) float32. Summed in float64, so that equal weights give equal vectors whatever the order of summation.
    """
    return normalise(torch.einsum("cp,cpd->cd", weights.double(), mean.double())).float()


def prefix_vectors(mean: Tensor, uncertainty: Tensor, class_chunk: int = 64) -> Tensor:
    """Class vectors from the K most certain prompts, for every K = 1..P at once.

    One cumulative sum over each class' prompts in the order of their uncertainty; ties keep the order of the
    templates. `prefix_vectors(...)[P - 1]` are the vectors of the plain mean.

    Args:
        mean: (C, P, D); uncertainty: (C, P).

    Returns:
        (P, C, D) float32, unit length; row K - 1 keeps K prompts.
    """
    order = uncertainty.argsort(dim=1, stable=True)
    n_classes, n_prompts, dim = mean.shape
    out = torch.empty(n_prompts, n_classes, dim, device=mean.device)
    for part in torch.arange(n_classes, device=mean.device).split(class_chunk):
        ordered = mean[part].take_along_dim(order[part].unsqueeze(-1), dim=1)  # (c, P, D)
        out[:, part] = normalise(ordered.double().cumsum(dim=1)).float().transpose(0, 1)
    return out


def true_ranks(images: Tensor, vectors: Tensor, labels: Tensor, max_scores: int = 20_000_000) -> Tensor:
    """How many classes score above the true one, for one classifier or for a stack of them.

    A class that ties with the true one counts as above if it comes first, as argmax would have it: two classes
    of the same name share one vector.

    Args:
        images: (N, D), unit length.
        vectors: (C, D) for one classifier, (K, C, D) for K of them.
        labels: (N,) int64 in [0, C).
        max_scores: bound on the scores held at once; memory is about 5 bytes a score.

    Returns:
        (N,) or (N, K) int32: 0 = the true class is first.
    """
    stacked = vectors if vectors.dim() == 3 else vectors.unsqueeze(0)
    n_stacked, n_classes, dim = stacked.shape
    images, labels = images.to(stacked.device), labels.to(stacked.device)
    stack_step = max(1, min(n_stacked, max_scores // n_classes))
    image_step = max(1, max_scores // (stack_step * n_classes))
    before = torch.arange(n_classes, device=stacked.device)
    out = torch.empty(len(images), n_stacked, dtype=torch.int32, device=stacked.device)
    with torch.autocast(stacked.device.type, enabled=False):
        for k in range(0, n_stacked, stack_step):
            block = stacked[k : k + stack_step]
            for n in range(0, len(images), image_step):
                label = labels[n : n + image_step]
                scores = (images[n : n + image_step] @ block.reshape(-1, dim).T).view(len(label), len(block), n_classes)
                own = scores.take_along_dim(label.view(-1, 1, 1), dim=2)  # (n, k, 1)
                above = (~(scores <= own)).sum(dim=2, dtype=torch.int32)  # NaN is above everything: never right
                tied = scores == own
                if int(tied.sum(dtype=torch.int32)) > tied.shape[0] * tied.shape[1]:
                    tied &= before < label.view(-1, 1, 1)
                    above += tied.sum(dim=2, dtype=torch.int32)
                out[n : n + image_step, k : k + stack_step] = above
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
