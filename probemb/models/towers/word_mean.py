"""The mean of a text's word vectors, behind which the heads stand: the text input of jWAE (mean word2vec).

The vectors are inputs, not weights: they stay as they start (`fill_word_vectors`; random where a word has none), and an
autoencoder can therefore be asked to reconstruct their mean.

Shapes: B texts, T words, E width of the vectors.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.models.architectures import check_n_unc_layers
from probemb.models.encoder import Encoder, Place
from probemb.models.features import Features
from probemb.models.heads import HeadConfig, add_heads
from probemb.models.towers.words import WordParts, fill_rows, needed_vocabulary, random_vectors, trim_words, word_mask
from probemb.models.word_tokenizer import UNKNOWN


def make_text_tower(architecture: dict, n_unc_layers: int, head: HeadConfig, stock: nn.Module | None) -> WordMean:
    """The tower of an architecture; text_cfg has "vocabulary", "width" and "context_length"."""
    config = {key: value for key, value in architecture["text_cfg"].items() if key not in ("tower", "vocabulary")}
    return WordMean(needed_vocabulary(architecture), n_unc_layers, head, **config)


class WordMean(WordParts, Encoder):
    """Mean word vectors; tokens are the words' vectors.

    Args:
        vocabulary: the words, in the order of their ids.
        n_unc_layers: 0, as there are no blocks.
        head: of the mean and the log-variance.
        width: E.
        context_length: largest number of words.
    """

    def __init__(
        self, vocabulary: list[str], n_unc_layers: int, head: HeadConfig, width: int = 300, context_length: int = 64
    ):
        super().__init__()
        check_n_unc_layers(n_unc_layers, 0, "text")
        self.context_length, self.vocabulary, self.probabilistic = context_length, list(vocabulary), head.probabilistic
        self.register_buffer("vectors", random_vectors(len(vocabulary), width))
        add_heads(self, head, width, width)

    def features(self, tokens: Tensor) -> tuple[Features, Features | None]:
        """(B, T) int64 -> features; unknown words have no part in the mean, and a text of them alone is 0."""
        x, known = F.embedding(tokens, self.vectors), (tokens > UNKNOWN)[..., None]
        pooled = (x * known).sum(1) / known.sum(1).clamp(min=1)
        found = Features(x, pooled, word_mask(tokens))
        return found, found if self.probabilistic else None

    def place(self, name: str) -> Place:
        """The heads are all that there is."""
        return Place("head")

    def trim(self, tokens: Tensor) -> Tensor:
        """(B, T) without the columns behind the longest text."""
        return trim_words(tokens)

    @torch.no_grad()
    def fill_embedding(self, vectors: Mapping[str, np.ndarray]) -> int:
        """Start words from vectors (E,); see `fill_rows`."""
        return fill_rows(self.vectors, self.vocabulary, vectors)
