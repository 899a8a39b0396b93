"""Embeddings of images and texts, in batches; of images with their captions; their tokens.

N images, M or T texts, L tokens, D dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from probemb import models
from probemb.cross_attention import Tokens, unit_tokens
from probemb.data.captions.dataset import CaptionDataset
from probemb.data.image_loader import ImageBatches, Images
from probemb.errors import UserError
from probemb.gaussian import Gaussian
from probemb.machine import CPU, Device, loader_workers
from probemb.progress import silent

if TYPE_CHECKING:
    from probemb.data.labelled import ZeroShotSet

Progress = Callable[[int], object]  # called with the number of items done since the last call


def encode_texts(
    encode: Callable[[Tensor], Gaussian], tokens: Tensor, *, batch_size: int = 256, device: Device = CPU,
    cut: Callable[[Tensor], Tensor] = lambda tokens: tokens, progress: Progress = lambda n: None,
    kept: KeptTokens | None = None,
) -> Gaussian:  # fmt: skip
    """Encode tokens (T, L), padded with zeros -> Gaussian (T, D), float32, on the CPU. Repeated texts are encoded once;
    texts of similar length share a batch, whose padding is cut (the model's `cut_padding`).
    """
    distinct, place = torch.unique(tokens, dim=0, return_inverse=True)
    length = (torch.arange(1, tokens.shape[1] + 1) * (distinct != 0)).amax(dim=1)  # includes the end token
    order = length.argsort(stable=True)
    found = encode_images(encode, (cut(distinct[part]) for part in order.split(batch_size)), device, progress)
    progress(len(tokens) - len(distinct))
    index = order.argsort()[place]
    if kept is not None:
        kept.items = kept[index].items
    return found[index]


def encode_images(
    encode: Callable[[Tensor], Gaussian], batches: Iterable[Tensor], device: Device = CPU,
    progress: Progress = lambda n: None,
) -> Gaussian:  # fmt: skip
    """Encode batches -> Gaussian (N, D), float32, on the CPU. Raises UserError: an embedding is not finite."""
    parts = []
    with torch.inference_mode():
        for batch in batches:
            with device.autocast():
                found = encode(batch.to(device.name, non_blocking=True))
            parts.append(found.to("cpu", torch.float32))
            progress(len(batch))
    if not parts:
        raise UserError("There is nothing to encode.", "Check that there are images, and names in the class file.")
    both = Gaussian.cat(parts)
    if not all(x.isfinite().all() for x in (both.mean, both.log_var, both.uncertainty())):
        what = "The model gives embeddings, or variances of embeddings, that are not finite numbers."
        raise UserError(what, "Its training has diverged or its file is damaged: evaluate an earlier checkpoint.")
    return Gaussian(both.mean.clone(), both.log_var.clone())  # out of inference mode, for autograd


class EmbeddedImages(NamedTuple):
    """Embeddings (N, D) of images that could be read, each row's index in the data, (name, reason) of the others."""

    gaussian: Gaussian
    kept: list[int]
    bad: list[tuple[str, str]]


@dataclass(frozen=True)
class Embedder:
    """A model in evaluation mode, with its tokenizer (list of T texts -> (T, L)), its transform (PIL image -> (3, H,
    W)), and settings to run it. workers: processes that decode images, None chooses; max_bad: largest share that may be
    unreadable; show: as `probemb.progress.progress`; kept: where the tokens of images and of texts are added.
    """

    model: torch.nn.Module
    tokenizer: Callable[[list[str]], Tensor]
    transform: Callable
    device: Device = CPU
    batch_size: int = 64
    text_batch_size: int = 256
    workers: int | None = 0
    max_bad: float = 0.05
    show: Callable = silent
    kept: tuple[KeptTokens, KeptTokens] | None = None

    def images(self, images: Images, title: str = "images") -> EmbeddedImages:
        """Embed all readable images. Raises UserError: too many cannot be read, embeddings that are not finite."""
        models.check_images(self.model, images)
        workers = loader_workers(self.workers, len(images), self.device.name)
        batches = ImageBatches(images, self.transform, self.batch_size, workers, self.max_bad)
        with self.show(title, len(images)) as advance:
            gaussian = self.pixels(batches, advance)
        return EmbeddedImages(gaussian, list(batches.kept), list(batches.bad))

    def pixels(self, batches: Iterable[Tensor], progress: Progress = lambda n: None) -> Gaussian:
        encode = self.kept[0].through(self.model.image_tower) if self.kept else self.model.encode_image
        return encode_images(encode, batches, self.device, progress)

    def texts(self, texts: Sequence[str], title: str = "captions") -> Gaussian:
        with self.show(title, len(texts)) as advance:
            return self.tokens(self.tokenizer(list(texts)), advance)

    def tokens(self, tokens: Tensor, progress: Progress = lambda n: None) -> Gaussian:
        kept = self.kept[1] if self.kept else None
        encode = self.model.encode_text if kept is None else kept.through(self.model.text_tower)
        how = {"batch_size": self.text_batch_size, "device": self.device, "cut": self.model.cut_padding}
        return encode_texts(encode, tokens, **how, progress=progress, kept=kept)


class EmbeddedPairs(NamedTuple):
    """Embeddings of all images that could be read, (N, D), and of their captions, (M, D), image after image, on the
    CPU; (N, K, D) for K embeddings an item. owner: (M,) int64, the row of each caption's image; kept, bad: as of
    EmbeddedImages; data: of the images that could be read; tokens: of both, where they were asked for.
    """

    images: Gaussian
    texts: Gaussian
    owner: Tensor
    kept: list[int]
    bad: list[tuple[str, str]]
    data: CaptionDataset | None = None
    tokens: tuple[KeptTokens, KeptTokens] | None = None


def embed_pairs(embedder: Embedder, captions: CaptionDataset, with_tokens: bool = False) -> EmbeddedPairs:
    """Embed all readable images and their captions. Raises UserError: as `Embedder.images`."""
    embedder = replace(embedder, kept=(KeptTokens(), KeptTokens()) if with_tokens else None)
    images, kept, bad = embedder.images(captions.images)
    data = captions.only(kept)
    return EmbeddedPairs(
        images, embedder.texts(data.flat()), torch.tensor(data.owner()), kept, bad, data, embedder.kept
    )


class EmbeddedClasses(NamedTuple):
    """Embeddings of labelled images that could be read, (N, D), with their labels (N,), and of the P prompts of each of
    C classes, (C, P, D); data: of these images; bad: as of EmbeddedImages.
    """

    images: Gaussian
    labels: Tensor
    prompts: Gaussian
    data: ZeroShotSet
    bad: list[tuple[str, str]]


def embed_classes(embedder: Embedder, data: ZeroShotSet) -> EmbeddedClasses:
    """Embed all prompts and all readable images. Raises UserError: as `Embedder.images`."""
    texts = embedder.texts(data.prompts, "prompts")
    prompts = Gaussian(*(x.unflatten(0, (len(data.classes), -1)) for x in (texts.mean, texts.log_var)))
    images, kept, bad = embedder.images(data.images)
    data = data.only(kept)
    return EmbeddedClasses(images, torch.tensor(data.labels), prompts, data, bad)


def centres(pairs: EmbeddedPairs) -> EmbeddedPairs:
    """One embedding an item: of several the l2-normalised mean of their means, with the mean of their variances."""
    if pairs.images.mean.ndim == 2:
        return pairs
    return pairs._replace(images=centre(pairs.images), texts=centre(pairs.texts))


def centre(several: Gaussian) -> Gaussian:
    """One normal (N, D) for K of each item, (N, K, D): in the direction of the mean of their means, with their mean
    length, and the mean of their variances. What is uncertain of an item is so in all of them: averaging keeps it.
    """
    mean = F.normalize(several.mean.double().mean(1), dim=-1) * several.mean.double().norm(dim=-1).mean(1, keepdim=True)
    return Gaussian(mean.to(several.mean.dtype), several.log_var.logsumexp(1) - math.log(several.shape[1]))


def exact_match(data: CaptionDataset, rows: Tensor | None = None) -> Tensor:
    """(N, M) bool, of data with known truth: whether each caption, or each of the `rows`, is true of each image."""
    truth, columns = data.truth, np.array([data.truth.texts[text] for text in data.flat()])
    columns = columns if rows is None else columns[rows.numpy()]
    return torch.from_numpy(truth.matches[np.ix_([truth.images[str(name)] for name in data.image_ids], columns)])


def true_ambiguity(data: CaptionDataset) -> Tensor:
    """(M,) float64, the share of all images that each caption fits, of data with known truth."""
    return torch.from_numpy(data.truth.ambiguity[[data.truth.texts[text] for text in data.flat()]])


class KeptTokens:
    """Tokens of unit length on the CPU, (T, D) float16 of each item."""

    def __init__(self, items: Sequence[Tensor] = ()):
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Tensor | slice) -> KeptTokens:
        return KeptTokens([self.items[i] for i in torch.arange(len(self))[index].tolist()])

    def read(self, device: torch.device | str = "cpu") -> Tokens:
        """(N, longest, D) float32, of unit length again."""
        values = pad_sequence([item.float() for item in self.items], batch_first=True)
        mask = torch.arange(values.shape[1]) < torch.tensor([[len(item)] for item in self.items])
        return unit_tokens(values.to(device), mask.to(device))

    def through(self, tower: models.Encoder) -> Callable[[Tensor], Gaussian]:
        """A tower's embedding of a batch, which also keeps its tokens. Raises ValueError: its heads give none."""

        def encode(inputs: Tensor) -> Gaussian:
            encoded = tower(inputs, want_tokens=True)
            self.add(encoded.tokens, encoded.mask)
            return encoded.gaussian

        return encode

    def add(self, values: Tensor, mask: Tensor) -> None:
        tokens = unit_tokens(values, mask)
        self.items += tokens.values[tokens.mask].half().cpu().split(tokens.mask.sum(1).tolist())
