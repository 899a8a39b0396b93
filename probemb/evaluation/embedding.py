"""Embeddings of images and texts, in batches; of images with their captions; tokens, kept on disk.

N images, M or T texts, L tokens, D dimensions.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from probemb import models
from probemb.cross_attention import Tokens, unit_tokens
from probemb.data.image_loader import ImageBatches, Images
from probemb.errors import UserError
from probemb.gaussian import Gaussian
from probemb.machine import CPU, Device, loader_workers
from probemb.progress import silent

if TYPE_CHECKING:
    from probemb.data.captions.find import CaptionDataset
    from probemb.models import Encoder

Progress = Callable[[int], object]  # called with the number of items done since the last call


def encode_texts(
    encode: Callable[[Tensor], Gaussian], tokens: Tensor, *, batch_size: int = 256, device: Device = CPU,
    cut: Callable[[Tensor], Tensor] = lambda tokens: tokens, progress: Progress = lambda n: None,
    keeper: TokenKeeper | None = None,
) -> Gaussian:  # fmt: skip
    """Encode tokens (T, L), padded with zeros, in batches -> Gaussian (T, D), float32, on the CPU.

    Repeated texts are encoded once. Texts of similar length share a batch, whose padding is cut (the model's
    `cut_padding`). keeper: what `encode` keeps tokens with; it is told their order.
    """
    distinct, place = torch.unique(tokens, dim=0, return_inverse=True)
    length = (torch.arange(1, tokens.shape[1] + 1) * (distinct != 0)).amax(dim=1)  # includes the end token
    order = length.argsort(stable=True)
    found = encode_images(encode, (cut(distinct[part]) for part in order.split(batch_size)), device, progress)
    progress(len(tokens) - len(distinct))
    index = order.argsort()[place]
    if keeper is not None:
        keeper.order = index
    return found[index]


def encode_images(
    encode: Callable[[Tensor], Gaussian], batches: Iterable[Tensor], device: Device = CPU,
    progress: Progress = lambda n: None,
) -> Gaussian:  # fmt: skip
    """Encode every batch of an iterable, without gradients -> Gaussian (N, D), float32, on the CPU.

    Raises UserError: an embedding is not finite, or there is nothing to encode.
    """
    parts = []
    with torch.inference_mode():
        for batch in batches:
            with device.autocast():
                found = encode(batch.to(device.name, non_blocking=True))
            parts.append(found.to("cpu", torch.float32))
            progress(len(batch))
    if not parts:
        raise UserError("There is nothing to encode.", "Check that the data holds images and the class file names.")
    both = Gaussian.cat(parts)
    if not all(x.isfinite().all() for x in (both.mean, both.log_var, both.uncertainty())):
        raise UserError(
            "The model gives embeddings, or variances of embeddings, that are not finite numbers.",
            "Its training has diverged or its file is damaged: evaluate an earlier checkpoint.",
        )
    return Gaussian(both.mean.clone(), both.log_var.clone())  # out of inference mode, for autograd


class EmbeddedImages(NamedTuple):
    """Embeddings (N, D) of images that could be read, each row's index in the data, (name, reason) of the others."""

    gaussian: Gaussian
    kept: list[int]
    bad: list[tuple[str, str]]


@dataclass(frozen=True)
class Embedder:
    """A model with its tokenizer and transform, and settings to run it.

    Attributes:
        model: in evaluation mode, on `device`; tokenizer: list of T texts -> (T, L); transform: PIL image -> (3, H, W).
        workers: processes that decode images, None chooses; max_bad: largest share that may be unreadable.
        show: context manager (title, total) -> advance, as `probemb.progress.progress`.
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

    def images(self, images: Images, title: str = "images", keeper: TokenKeeper | None = None) -> EmbeddedImages:
        """Embed all readable images. Raises UserError: too many cannot be read, embeddings that are not finite."""
        models.check_images(self.model, images)
        workers = loader_workers(self.workers, len(images), self.device.name)
        batches = ImageBatches(images, self.transform, self.batch_size, workers, self.max_bad)
        with self.show(title, len(images)) as advance:
            gaussian = self.pixels(batches, advance, keeper)
        return EmbeddedImages(gaussian, list(batches.kept), list(batches.bad))

    def pixels(
        self, batches: Iterable[Tensor], progress: Progress = lambda n: None, keeper: TokenKeeper | None = None
    ) -> Gaussian:
        """Embed batches of (B, 3, H, W) -> Gaussian (N, D)."""
        encode = keeper.through(self.model.image_tower) if keeper else self.model.encode_image
        return encode_images(encode, batches, self.device, progress)

    def texts(self, texts: Sequence[str], title: str = "captions", keeper: TokenKeeper | None = None) -> Gaussian:
        """Embed T texts -> Gaussian (T, D)."""
        with self.show(title, len(texts)) as advance:
            return self.tokens(self.tokenizer(list(texts)), advance, keeper)

    def tokens(
        self, tokens: Tensor, progress: Progress = lambda n: None, keeper: TokenKeeper | None = None
    ) -> Gaussian:
        """Embed tokens (T, L) -> Gaussian (T, D)."""
        return encode_texts(
            keeper.through(self.model.text_tower) if keeper else self.model.encode_text, tokens,
            batch_size=self.text_batch_size, device=self.device, cut=self.model.cut_padding, progress=progress,
            keeper=keeper,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- pairs


class EmbeddedPairs(NamedTuple):
    """Embeddings of all images that could be read, (N, D), and of their captions, (M, D), image after image, on the
    CPU; (N, K, D) for K embeddings an item. owner: (M,) int64, the row of each caption's image; kept, bad: as of
    EmbeddedImages; tokens: of both, for the ranking "attention", where they were asked for.
    """

    images: Gaussian
    texts: Gaussian
    owner: Tensor
    kept: list[int]
    bad: list[tuple[str, str]]
    tokens: tuple[KeptTokens, KeptTokens] | None = None


def embed_pairs(embedder: Embedder, captions: CaptionDataset, with_tokens: bool = False) -> EmbeddedPairs:
    """Embed all readable images and their captions. Raises UserError: as `Embedder.images`."""
    keepers = (TokenKeeper(), TokenKeeper()) if with_tokens else (None, None)
    images, kept, bad = embedder.images(captions.images, keeper=keepers[0])
    texts = embedder.texts([text for i in kept for text in captions.captions[i]], keeper=keepers[1])
    owner = torch.tensor([row for row, i in enumerate(kept) for _ in captions.captions[i]])
    return EmbeddedPairs(images, texts, owner, kept, bad, tuple(one.kept() for one in keepers) if with_tokens else None)


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


def exact_match(captions: CaptionDataset, kept: Sequence[int], rows: Sequence[int] | None = None) -> Tensor:
    """(N, M) bool, of data with known truth: whether each caption, or each of the `rows`, is true of each image."""
    truth, columns = captions.truth, _columns(captions, kept)
    columns = columns if rows is None else [columns[row] for row in rows]
    images = [truth.images[str(captions.image_ids[i])] for i in kept]
    return torch.from_numpy(truth.matches[np.ix_(images, columns)])


def true_ambiguity(captions: CaptionDataset, kept: Sequence[int]) -> Tensor:
    """(M,) float64, the share of all images that each caption fits, of data with known truth."""
    return torch.from_numpy(captions.truth.ambiguity[_columns(captions, kept)])


def _columns(captions: CaptionDataset, kept: Sequence[int]) -> list[int]:
    return [captions.truth.texts[text] for i in kept for text in captions.captions[i]]


# --------------------------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Tokens of unit length of N items, in a file that no name points to: one behind the other, without padding.

    values: (P, D) float16, memory-mapped, of all items; starts, lengths: (N,) int64, where each item's tokens stand.
    """

    values: np.ndarray
    starts: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Tensor | slice) -> KeptTokens:
        """Other items, or another order, of the same file."""
        return KeptTokens(self.values, self.starts[index], self.lengths[index])

    def read(self, device: torch.device | str = "cpu") -> Tokens:
        """The tokens, (N, longest, D) float32, of unit length again."""
        values = np.zeros((len(self), int(self.lengths.max()), self.values.shape[1]), np.float32)
        for item, start, length in zip(values, self.starts.tolist(), self.lengths.tolist()):
            item[:length] = self.values[start : start + length]
        mask = torch.arange(values.shape[1]) < self.lengths[:, None]
        return unit_tokens(torch.from_numpy(values).to(device), mask.to(device))


class TokenKeeper:
    """Collects tokens batch by batch; `kept` gives them all."""

    def __init__(self):
        self._file = tempfile.TemporaryFile(prefix="probemb-tokens-")  # noqa: SIM115  lives as long as the tokens
        self._lengths: list[Tensor] = []
        self._dim = 0
        self.order: Tensor | None = None  # of the items, if not that of `add`

    def through(self, tower: Encoder) -> Callable[[Tensor], Gaussian]:
        """A tower's `encode` of a batch, which also keeps its tokens. Raises ValueError: its heads give none."""

        def encode(inputs: Tensor) -> Gaussian:
            encoded = tower.encode(inputs, want_tokens=True)
            self.add(encoded.tokens, encoded.mask)
            return encoded.gaussian

        return encode

    def add(self, values: Tensor, mask: Tensor) -> None:
        """A batch (B, T, D) with its mask (B, T). Raises UserError: the folder for temporary files is full."""
        tokens = unit_tokens(values, mask)
        self._lengths.append(tokens.mask.sum(1).cpu())
        self._dim = values.shape[2]
        try:
            self._file.write(tokens.values[tokens.mask].half().cpu().numpy())
        except OSError as error:
            what = f"The tokens that are ranked by cannot be kept in {tempfile.gettempdir()} ({error.strerror})."
            raise UserError(what, "Make room there, or set TMPDIR to another folder.") from error

    def kept(self) -> KeptTokens:
        """All items."""
        self._file.flush()
        lengths = torch.cat(self._lengths)
        values = np.memmap(self._file, np.float16, "r", shape=(int(lengths.sum()), self._dim))
        found = KeptTokens(values, lengths.cumsum(0) - lengths, lengths)
        return found if self.order is None else found[self.order]
