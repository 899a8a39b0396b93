"""DAA: a triplet loss, and agreement of the ranks by similarity with the ranks by the captions' tf-idf.

Letters: N pairs, C captions, V words.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from probemb.gaussian import Gaussian
from probemb.losses.output import LossOutput
from probemb.losses.pairs import cosine_similarity
from probemb.losses.triplets.triplet import triplet_loss

BLOCK_ELEMENTS = 1 << 22  # comparisons held at a time, 16 MiB in float32; above it, recomputed in the backward pass
WORD = re.compile(r"\w\w+")


def soft_rank(values_NM: Tensor, temperature: float = 0.001, published: bool = False) -> Tensor:
    """Differentiable rank of every element within its row, 1 for the largest, (N, M). Source: DAA, after SmoothAP.

    rank(b, c) = 1 + the sum over a other than c of sigmoid((s_ba - s_bc) / temperature).

    `published` reproduces the authors' code, which compares s_bc with column b, s_ab, instead of row b; N = M only.
    """
    n, m = values_NM.shape
    values_NM = values_NM / temperature
    rivals_NM = values_NM.T if published else values_NM

    def of_rows(rivals: Tensor, values: Tensor) -> Tensor:
        above = torch.sigmoid(rivals[:, :, None] - values[:, None, :]).sum(1)  # of (rows, a, c)
        return above + 1 - torch.sigmoid(rivals - values)  # without a = c

    rows = max(1, BLOCK_ELEMENTS // (m * m))
    if rows >= n:
        return of_rows(rivals_NM, values_NM)
    blocks = zip(rivals_NM.split(rows), values_NM.split(rows))
    return torch.cat([checkpoint(of_rows, r, v, use_reentrant=False, preserve_rng_state=False) for r, v in blocks])


def daa_regulariser(
    similarity_NM: Tensor, semantic_NM: Tensor, temperature: float = 0.001, published: bool = False
) -> Tensor:
    """1 - average semantic precision of one direction, in [0, 1). Source: DAA.

    The precision is the mean over all pairs of min / max of the two ranks within the row, by `similarity_NM` and by
    `semantic_NM`. Call it on transposes for the other direction.

    Args:
        similarity_NM: of the embeddings, queries in rows.
        semantic_NM: of the captions, without gradient.
        published: see `soft_rank`; off by default, as the code's rank is not the paper's.
    """
    if similarity_NM.shape != semantic_NM.shape:
        raise ValueError(f"similarity is {tuple(similarity_NM.shape)}, semantic is {tuple(semantic_NM.shape)}")
    rank = soft_rank(similarity_NM, temperature, published)
    with torch.no_grad():
        wanted = soft_rank(semantic_NM.to(similarity_NM), temperature, published)
    return 1 - (torch.minimum(rank, wanted) / torch.maximum(rank, wanted)).mean()


def daa_loss(
    similarity_NN: Tensor,
    semantic_NN: Tensor,
    match_NN: Tensor | None = None,
    *,
    margin: float = 0.2,
    weight: float = 25.0,
    temperature: float = 0.001,
    hardest: bool = True,
    published: bool = False,
) -> LossOutput:
    """Triplet loss + weight * (both directions' `daa_regulariser`). Source: DAA, weight 25.

    Args:
        semantic_NN: `CaptionSimilarity` of the batch, images in rows.
        match_NN, margin, hardest: see `triplet_loss`.

    Returns:
        terms "triplet" and "daa".
    """
    triplet = triplet_loss(similarity_NN, match_NN, margin, hardest).loss
    i2t = daa_regulariser(similarity_NN, semantic_NN, temperature, published)
    t2i = daa_regulariser(similarity_NN.T, semantic_NN.T, temperature, published)
    return LossOutput(triplet + weight * (i2t + t2i), {"triplet": triplet.detach(), "daa": (i2t + t2i).detach()})


class DAALoss(nn.Module):
    """`daa_loss` of the cosines of the means."""

    def __init__(
        self, margin: float = 0.2, weight: float = 25.0, temperature: float = 0.001, published_rank: bool = False
    ):
        super().__init__()
        self.options = dict(margin=margin, weight=weight, temperature=temperature, published=published_rank)

    def forward(
        self,
        image: Gaussian,
        text: Gaussian,
        match: Tensor | None = None,
        *,
        semantic: Tensor,
        hardest: bool = True,
    ) -> LossOutput:
        """N pairs, (N, D) each; `semantic` (N, N), the captions' similarity, images in rows."""
        similarity = cosine_similarity(image, text)
        with torch.autocast(similarity.device.type, enabled=False):
            return daa_loss(similarity, semantic, match, hardest=hardest, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.options.items())


@dataclass(frozen=True)
class SparseRows:
    """A sparse (C, V) matrix: row c has values[starts[c] : starts[c + 1]] in the same slice of columns, ascending."""

    starts: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    shape: tuple[int, int]

    def dense(self, rows: Sequence[int], columns: np.ndarray | None = None) -> np.ndarray:
        """The given rows, (R, V), or their part in the given ascending columns."""
        rows = np.asarray(rows, np.int64)
        columns = np.arange(self.shape[1]) if columns is None else columns
        row_of, element = self._elements(rows)
        at = np.searchsorted(columns, self.columns[element])
        known = at < len(columns)
        known[known] = columns[at[known]] == self.columns[element[known]]
        out = np.zeros((len(rows), len(columns)), self.values.dtype)
        out[row_of[known], at[known]] = self.values[element[known]]
        return out

    def columns_of(self, rows: np.ndarray) -> np.ndarray:
        """The columns in which any of the rows has a value, ascending."""
        return np.unique(self.columns[self._elements(rows)[1]])

    def _elements(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row number and place of every stored value of the given rows."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        row_of = np.repeat(np.arange(len(rows)), lengths)
        before = np.cumsum(lengths) - lengths
        return row_of, np.arange(len(row_of)) + np.repeat(self.starts[rows] - before, lengths)


def caption_tfidf(captions: Sequence[str]) -> SparseRows:
    """Unit rows of term frequency times inverse document frequency, sparse (C, V) in float32.

    Words are runs of at least two letters or digits in lower case; the inverse document frequency of a word is
    ln((1 + C) / (1 + captions with the word)) + 1. A caption without words is a row of zeros.
    """
    documents = Counter(word for caption in captions for word in set(WORD.findall(caption.lower())))
    column = {word: i for i, word in enumerate(sorted(documents))}
    idf = {word: math.log((1 + len(captions)) / (1 + df)) + 1 for word, df in documents.items()}
    starts, columns, values = array("q", [0]), array("q"), array("f")
    for caption in captions:
        count = Counter(WORD.findall(caption.lower()))
        row = sorted((column[word], n * idf[word]) for word, n in count.items())
        norm = math.sqrt(sum(value * value for _, value in row))
        columns.extend(i for i, _ in row)
        values.extend(value / norm for _, value in row)
        starts.append(len(columns))
    arrays = np.array(starts, np.int64), np.array(columns, np.int64), np.array(values, np.float32)
    return SparseRows(*arrays, shape=(len(captions), len(column)))


class CaptionSimilarity:
    """Mean tf-idf cosine of a caption with all captions of an image. Source: DAA, CIDEr.

    Args:
        captions: all training captions.
        image_of_caption: (C,) the index of each caption's image.
    """

    def __init__(self, captions: Sequence[str], image_of_caption: Sequence[int]):
        if len(captions) != len(image_of_caption):
            raise ValueError(f"{len(captions)} captions, but {len(image_of_caption)} images of captions")
        self.tfidf = caption_tfidf(captions)
        owner = np.asarray(image_of_caption, dtype=np.int64)
        self.by_image = np.argsort(owner, kind="stable")
        self.image_starts = np.searchsorted(owner[self.by_image], np.arange(owner.max(initial=-1) + 2))

    def __call__(self, image_index: Sequence[int], caption_index: Sequence[int]) -> Tensor:
        """(N,) images and (M,) captions to their similarities (N, M) in [0, 1], float32.

        Raises:
            ValueError: an image without captions.
        """
        texts, images = np.asarray(caption_index, np.int64), np.asarray(image_index, np.int64)
        if not (np.diff(self.image_starts)[images] > 0).all():
            raise ValueError("an image has no caption, so that captions cannot be compared with it")
        words = self.tfidf.columns_of(texts)  # no others count
        own = [self.by_image[self.image_starts[i] : self.image_starts[i + 1]] for i in images]
        firsts = np.cumsum([0, *map(len, own)])[:-1]
        sums = np.add.reduceat(self.tfidf.dense(np.concatenate(own), words), firsts)
        means = sums / np.array([[len(captions)] for captions in own], np.float32)
        return torch.from_numpy(means @ self.tfidf.dense(texts, words).T)
