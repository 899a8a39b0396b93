"""Embeddings of images and texts, in batches.

`encode_images` and `encode_texts` take the model's `encode_image` or `encode_text`; `Embedder` is a model with its
inputs' preparation and a command's settings.

N images, T texts, L tokens, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from probemb.cli.device import CPU, Device, loader_workers
from probemb.cli.progress import silent
from probemb.errors import UserError
from probemb.gaussian import Gaussian

if TYPE_CHECKING:
    from probemb.data.image_loader import Images
    from probemb.evaluation.kept_tokens import TokenKeeper

Progress = Callable[[int], None]  # called with the number of items done since the last call


def encode_texts(
    encode: Callable[[Tensor], Gaussian],
    tokens: Tensor,
    *,
    batch_size: int = 256,
    device: Device = CPU,
    cut: Callable[[Tensor], Tensor] = lambda tokens: tokens,
    progress: Progress | None = None,
    keeper: TokenKeeper | None = None,
) -> Gaussian:
    """Encode tokens (T, L), padded with zeros, in batches.

    Repeated texts are encoded once. Texts of similar length share a batch, whose padding is cut.

    Args:
        encode: the model's `encode_text`; cut: its `cut_padding`.
        keeper: what `encode` keeps tokens with; it is told their order.

    Returns:
        Gaussian (T, D), float32, on the CPU.
    """
    distinct, place = torch.unique(tokens, dim=0, return_inverse=True)
    position = torch.arange(1, tokens.shape[1] + 1)
    length = (position * (distinct != 0)).amax(dim=1)  # includes the end token
    order = length.argsort(stable=True)
    batches = (cut(distinct[part]) for part in order.split(batch_size))
    found = encode_images(encode, batches, device=device, progress=progress, total=len(tokens))
    index = order.argsort()[place]
    if keeper is not None:
        keeper.order = index
    return found[index]


def encode_images(
    encode: Callable[[Tensor], Gaussian],
    batches: Iterable[Tensor],
    *,
    device: Device = CPU,
    progress: Progress | None = None,
    total: int | None = None,
) -> Gaussian:
    """Encode every batch of an iterable, without gradients.

    Args:
        encode: the model's `encode_image`, or any function from a batch to a Gaussian.
        total: items to report as done at the end, if it differs from the number of items encoded.

    Returns:
        Gaussian (N, D), float32, on the CPU.

    Raises:
        UserError: an embedding is not finite, or there is nothing to encode.
    """
    parts, done = [], 0
    with torch.inference_mode():
        for batch in batches:
            batch = batch.to(device.name, non_blocking=True)
            with device.autocast():
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
    if not all(x.isfinite().all() for x in (both.mean, both.log_var, both.uncertainty())):
        raise UserError(
            "The model gives embeddings, or variances of embeddings, that are not finite numbers.",
            "Its training has diverged or its file is damaged: evaluate an earlier checkpoint.",
        )
    return Gaussian(both.mean.clone(), both.log_var.clone())  # out of inference mode, for autograd


class EmbeddedImages(NamedTuple):
    """Embeddings of the images that could be read.

    Attributes:
        gaussian: (N, D).
        kept: for each row the index of its image in the data.
        bad: (name, reason) of images that could not be read.
    """

    gaussian: Gaussian
    kept: list[int]
    bad: list[tuple[str, str]]


@dataclass(frozen=True)
class Embedder:
    """A model with its tokenizer and transform, and settings to run it.

    Attributes:
        model: in evaluation mode, on `device`.
        tokenizer: list of T texts -> (T, L); transform: PIL image -> (3, H, W).
        batch_size: images in a batch; text_batch_size: texts in a batch.
        workers: processes that decode images; None chooses.
        max_bad: largest share of images that may be unreadable.
        show: context manager (title, total) -> advance, as `probemb.cli.progress.progress`.
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
        """Embed all readable images; their tokens are kept with `keeper`.

        Raises:
            UserError: too many images that cannot be read, embeddings that are not finite.
        """
        from probemb.data.image_loader import ImageBatches
        from probemb.models import check_images

        check_images(self.model, images)
        workers = loader_workers(self.workers, len(images), self.device.name)
        batches = ImageBatches(images, self.transform, self.batch_size, workers, self.max_bad)
        with self.show(title, len(images)) as advance:
            gaussian = self.pixels(batches, advance, keeper)
        return EmbeddedImages(gaussian, list(batches.kept), list(batches.bad))

    def pixels(
        self, batches: Iterable[Tensor], progress: Progress | None = None, keeper: TokenKeeper | None = None
    ) -> Gaussian:
        """Embed batches of (B, 3, H, W) -> Gaussian (N, D)."""
        encode = self.model.encode_image if keeper is None else keeper.through(self.model.image_tower)
        return encode_images(encode, batches, device=self.device, progress=progress)

    def texts(self, texts: Sequence[str], title: str = "captions", keeper: TokenKeeper | None = None) -> Gaussian:
        """Embed T texts -> Gaussian (T, D)."""
        with self.show(title, len(texts)) as advance:
            return self.tokens(self.tokenizer(list(texts)), advance, keeper)

    def tokens(self, tokens: Tensor, progress: Progress | None = None, keeper: TokenKeeper | None = None) -> Gaussian:
        """Embed tokens (T, L) -> Gaussian (T, D)."""
        encode = self.model.encode_text if keeper is None else keeper.through(self.model.text_tower)
        return encode_texts(
            encode, tokens, batch_size=self.text_batch_size, device=self.device, cut=self.model.cut_padding,
            progress=progress, keeper=keeper,
        )  # fmt: skip
