"""Images with their captions as embeddings: what every evaluation of retrieval begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from probemb.cli.device import Placement, loader_workers
from probemb.cli.progress import silent
from probemb.data.image_loader import ImageBatches
from probemb.evaluation.classification import encode_images, encode_texts
from probemb.gaussian import Gaussian

if TYPE_CHECKING:
    from probemb.data.captions.find import Captioned


class EmbeddedPairs(NamedTuple):
    """Embeddings of all images that could be read, and of their captions, on the CPU.

    Attributes:
        images: Gaussian (N, D).
        texts: Gaussian (M, D), image after image.
        owner: (M,) int64, the row of each caption's image.
        kept: for each row the index of its image in the data.
        bad: (name, reason) of images that could not be read.
    """

    images: Gaussian
    texts: Gaussian
    owner: torch.Tensor
    kept: list[int]
    bad: list[tuple[str, str]]


def embed_pairs(
    model, tokenizer, transform, captions: Captioned, *, placement: Placement = Placement("cpu", None, "fp32"),  # noqa: B008
    batch_size: int = 64, text_batch_size: int = 256, workers: int | None = 0, max_bad: float = 0.05, show=silent,
) -> EmbeddedPairs:  # fmt: skip
    """Embed all readable images and their captions.

    Args:
        model: in evaluation mode, on `placement`'s device; transform: PIL image -> (3, H, W).
        show: context manager (title, total) -> advance, as `probemb.cli.progress.progress`.

    Raises:
        UserError: too many images that cannot be read, embeddings that are not finite.
    """
    workers = loader_workers(workers, len(captions.images), placement.device)
    batches = ImageBatches(captions.images, transform, batch_size, workers, max_bad)
    where = {"device": placement.device, "autocast": placement.autocast}
    with show("images", len(captions.images)) as advance:
        images = encode_images(model.encode_image, batches, progress=advance, **where)
    kept = list(batches.kept)
    texts = [text for i in kept for text in captions.captions[i]]
    owner = torch.tensor([row for row, i in enumerate(kept) for _ in captions.captions[i]])
    with show("captions", len(texts)) as advance:
        embedded = encode_texts(
            model.encode_text, tokenizer(texts), batch_size=text_batch_size, cut=model.cut_padding, progress=advance,
            **where,
        )  # fmt: skip
    return EmbeddedPairs(images, embedded, owner, kept, list(batches.bad))


def exact_match(captions: Captioned, kept: Sequence[int]) -> torch.Tensor:
    """(N, M) bool, which caption is true of which image, for the embedded world."""
    from probemb.data.scenes import match_matrix

    scenes = [captions.scenes[i][0] for i in kept]
    told = [caption for i in kept for caption in captions.scenes[i][1]]
    return torch.from_numpy(match_matrix(scenes, told))


def true_ambiguity(captions: Captioned, kept: Sequence[int]) -> torch.Tensor:
    """(M,) float64, the share of all images that each caption fits, for the embedded world."""
    from probemb.data.scenes import ambiguity

    return torch.tensor([ambiguity(caption) for i in kept for caption in captions.scenes[i][1]], dtype=torch.float64)
