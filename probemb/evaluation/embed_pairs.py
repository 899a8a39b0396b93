"""Embeddings of images with their captions, for evaluations of retrieval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from probemb.evaluation.embedding import Embedder
from probemb.evaluation.kept_tokens import KeptTokens, TokenKeeper
from probemb.gaussian import Gaussian

if TYPE_CHECKING:
    from probemb.data.captions.find import CaptionDataset


class EmbeddedPairs(NamedTuple):
    """Embeddings of all images that could be read, and of their captions, on the CPU.

    Attributes:
        images: Gaussian (N, D), or (N, K, D) for K embeddings an item.
        texts: Gaussian (M, D), or (M, K, D), image after image.
        owner: (M,) int64, the row of each caption's image.
        kept: for each row the index of its image in the data.
        bad: (name, reason) of images that could not be read.
        tokens: of the images and of the texts, for the ranking "attention"; None where they were not asked for.
    """

    images: Gaussian
    texts: Gaussian
    owner: torch.Tensor
    kept: list[int]
    bad: list[tuple[str, str]]
    tokens: tuple[KeptTokens, KeptTokens] | None = None


def embed_pairs(embedder: Embedder, captions: CaptionDataset, with_tokens: bool = False) -> EmbeddedPairs:
    """Embed all readable images and their captions; also their tokens, if asked for.

    Raises:
        UserError: too many images that cannot be read, embeddings that are not finite.
    """
    keepers = (TokenKeeper(), TokenKeeper()) if with_tokens else (None, None)
    images, kept, bad = embedder.images(captions.images, keeper=keepers[0])
    texts = embedder.texts([text for i in kept for text in captions.captions[i]], keeper=keepers[1])
    owner = torch.tensor([row for row, i in enumerate(kept) for _ in captions.captions[i]])
    tokens = (keepers[0].kept(), keepers[1].kept()) if with_tokens else None
    return EmbeddedPairs(images, texts, owner, kept, bad, tokens)


def centres(pairs: EmbeddedPairs) -> EmbeddedPairs:
    """One embedding of every item, for what compares single ones: of several, the l2-normalised mean of their means.

    Its variances are the means of theirs. Pairs with one embedding an item stay as they are.
    """

    def centre(several: Gaussian) -> Gaussian:
        mean = torch.nn.functional.normalize(several.mean.mean(1), dim=-1)
        return Gaussian(mean, several.log_var.logsumexp(1) - math.log(several.shape[1]))

    if pairs.images.mean.ndim == 2:
        return pairs
    return pairs._replace(images=centre(pairs.images), texts=centre(pairs.texts))


def exact_match(captions: CaptionDataset, kept: Sequence[int], rows: Sequence[int] | None = None) -> torch.Tensor:
    """(N, M) bool for the synthetic world: whether each caption, or each of the `rows`, is true of each image."""
    from probemb.data.scenes import match_matrix

    scenes = [captions.scenes[i][0] for i in kept]
    described = [caption for i in kept for caption in captions.scenes[i][1]]
    if rows is not None:
        described = [described[row] for row in rows]
    return torch.from_numpy(match_matrix(scenes, described))


def true_ambiguity(captions: CaptionDataset, kept: Sequence[int]) -> torch.Tensor:
    """(M,) float64, the share of all images that each caption fits, for the synthetic world."""
    from probemb.data.scenes import ambiguity

    return torch.tensor([ambiguity(caption) for i in kept for caption in captions.scenes[i][1]], dtype=torch.float64)
