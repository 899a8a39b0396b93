"""A tokenizer of whole words: 0 is padding, 1 an unknown word, 2 and on are the vocabulary in its order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from probemb.data.words import split_words

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2


class WordTokenizer:
    """Texts to ids of words, for texts of any origin: what is read of a text and of a word is bounded.

    Args:
        vocabulary: the words; other words are `UNKNOWN`.
        context_length: words of a text; the rest is cut.
    """

    def __init__(self, vocabulary: Sequence[str], context_length: int):
        self.context_length = context_length
        self._ids = {word: FIRST_WORD + i for i, word in enumerate(vocabulary)}

    def __call__(self, texts: list[str] | str) -> Tensor:
        """(B, context_length) int64, padded with zeros; a text without any word is one unknown word."""
        texts = [texts] if isinstance(texts, str) else texts
        result = torch.zeros(len(texts), self.context_length, dtype=torch.long)
        for row, text in zip(result, texts):
            ids = [self._ids.get(word, UNKNOWN) for word in split_words(text, self.context_length)] or [UNKNOWN]
            row[: len(ids)] = torch.tensor(ids)
        return result

    def unknown_words(self, texts: list[str]) -> list[str]:
        """Words of the texts that the vocabulary lacks, each once: the model reads them all alike."""
        words = (word for text in texts for word in split_words(text, self.context_length))
        return list(dict.fromkeys(word for word in words if word not in self._ids))
