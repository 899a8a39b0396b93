"""Shared parts of towers that read words: their vocabulary, their vectors, and the positions of the words."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from probemb.errors import UserError
from probemb.models.features import Features
from probemb.models.towers.parts import Parts, take_tokens
from probemb.models.word_tokenizer import FIRST_WORD, PADDING, UNKNOWN

VECTOR_STD = 0.3  # about that of GloVe's vectors


def needed_vocabulary(architecture: dict) -> list[str]:
    """The words of an architecture, in the order of their ids. Raises UserError: it has none."""
    vocabulary = architecture["text_cfg"].get("vocabulary")
    if not vocabulary:
        raise UserError(
            "The text tower reads words, and has no vocabulary.",
            "Build one with `python -m tools.build_vocabulary DATA --out vocabulary.txt`, and name it as vocabulary.",
        )
    return vocabulary


def random_vectors(n_words: int, width: int) -> Tensor:
    """Vectors to start from, (FIRST_WORD + n_words, width): 0 for padding and for unknown words."""
    vectors = torch.randn(FIRST_WORD + n_words, width) * VECTOR_STD
    vectors[[PADDING, UNKNOWN]] = 0
    return vectors


def word_mask(tokens: Tensor) -> Tensor:
    """(B, T) bool, True for words; an empty text is one word of padding."""
    return (tokens != PADDING) | (torch.arange(tokens.shape[1], device=tokens.device) == 0)


class WordParts:
    """Mixin that lets an `Encoder` of words read a part of them, as if the others had not been written."""

    def parts(self, tokens: Tensor) -> Parts:
        """Every word may be dropped."""
        optional = tokens != PADDING
        return Parts(optional, torch.zeros_like(optional))

    def features_of_parts(self, tokens: Tensor, kept: Tensor) -> tuple[Features, Features | None]:
        """`features` of n words."""
        return self.features(take_tokens(tokens, kept, PADDING))


def trim_words(tokens: Tensor) -> Tensor:
    """(B, T) without the columns behind the longest text."""
    longest = int((tokens != PADDING).sum(1).max()) if len(tokens) else 1
    return tokens[:, : max(1, longest)]


@torch.no_grad()
def fill_rows(table: Tensor, vocabulary: list[str], vectors: Mapping[str, np.ndarray]) -> int:
    """Write vectors (E,) into the words' rows of a table (V, E); other words keep their random ones.

    Returns:
        the number of words that had a vector.

    Raises:
        UserError: vectors of another width.
    """
    found = 0
    for row, word in enumerate(vocabulary, FIRST_WORD):
        if word in vectors:
            vector = torch.from_numpy(vectors[word])
            if len(vector) != table.shape[1]:
                raise UserError(
                    f"The word vectors have {len(vector)} numbers, the model's {table.shape[1]}.",
                    f"Name vectors of {table.shape[1]} numbers, or an architecture whose text width is {len(vector)}.",
                )
            table[row] = vector
            found += 1
    return found
