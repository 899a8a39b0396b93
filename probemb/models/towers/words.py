"""Text towers that read whole words: a GRU (VSE++, PVSE, PCME), or the mean of word vectors (jWAE); their tokenizer.

    words ── embedding ── layer 1 … L−u ─┬─ layer L−u+1 … L ── mean head ──── mean
                                         └─ u layers of its own ─ log_var head ─ log_var

Ids: 0 is padding, 1 an unknown word, 2 and on are the vocabulary in its order.
Shapes: B texts, T words, E width of the word vectors, H hidden size, W = H or 2 H width of the tower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.data.words import split_words
from probemb.models.encoder import BothFeatures, Encoder, Place, last_blocks, run_both
from probemb.models.heads import Features
from probemb.models.options import ModelOptions

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
VECTOR_STD = 0.3  # about that of GloVe's vectors


class WordTokenizer:
    """Texts of any origin to ids of words."""

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
        """Words of the texts that the vocabulary lacks, each once."""
        words = (word for text in texts for word in split_words(text, self.context_length))
        return list(dict.fromkeys(word for word in words if word not in self._ids))


def random_vectors(n_words: int, width: int) -> Tensor:
    """Vectors to start from, (FIRST_WORD + n_words, width): 0 for padding and for unknown words."""
    vectors = torch.randn(FIRST_WORD + n_words, width) * VECTOR_STD
    vectors[[PADDING, UNKNOWN]] = 0
    return vectors


def word_mask(tokens: Tensor) -> Tensor:
    """(B, T) bool, True for words; an empty text is one word of padding."""
    return (tokens != PADDING) | (torch.arange(tokens.shape[1], device=tokens.device) == 0)


class WordMean(Encoder):
    """Mean word vectors, which are inputs, not weights, so that an autoencoder can reconstruct them. Source: jWAE."""

    pad_id = PADDING
    table = property(lambda self: self.vectors)  # (FIRST_WORD + words, E)

    def __init__(
        self, vocabulary: list[str], o: ModelOptions, n_unc_layers: int, width: int = 300, context_length: int = 64
    ):
        super().__init__()
        self.context_length = context_length
        last_blocks((), n_unc_layers)  # it has none
        self.register_buffer("vectors", random_vectors(len(vocabulary), width))
        self.add_heads(o, width, width)

    def features(self, tokens: Tensor) -> BothFeatures:
        """(B, T) int64 -> features; unknown words have no part in the mean, and a text of them alone is 0."""
        x, known = F.embedding(tokens, self.vectors), (tokens > UNKNOWN)[..., None]
        pooled = (x * known).sum(1) / known.sum(1).clamp(min=1)
        features = Features(x, pooled, word_mask(tokens))
        return features, features if self.options.probabilistic else None


class GRUShape(NamedTuple):
    """Sizes and wiring of a `WordGRU`, keys of an architecture's text_cfg.

    pooling: "last" (each direction's last state), "max" or "mean" over the words; or, as the public codes of PVSE and
    PCME, "last-word": both directions' states there.
    """

    width: int = 300  # E
    hidden: int = 512  # H
    layers: int = 1
    bidirectional: bool = True
    pooling: str = "last"
    context_length: int = 64
    tokens: str = "states"  # that the heads see beside the pooled states; or "words", the word vectors (PVSE, PCME)
    directions: str = "concatenated"  # or "averaged" (SCAN): every state and pooled one is the mean of both
    projection: bool = True  # False if pooled states of size D are the embedding of head "clip" (VSE++, VSRN)
    head_options: Mapping[str, dict] = {}  # further `ModelOptions.pooling` of a head here: {"pie": {"project": false}}


class WordGRU(Encoder):
    """Word vectors and GRUs; the backward ones read every text reversed within its own length."""

    pad_id, stem_prefixes = PADDING, ("embedding.",)
    table = property(lambda self: self.embedding.weight)

    def __init__(self, vocabulary: list[str], o: ModelOptions, n_unc_layers: int, **shape):
        super().__init__()
        self.shape = shape = GRUShape(**shape)
        self.context_length, hidden, both = shape.context_length, shape.hidden, shape.bidirectional
        self.averaged = both and shape.directions == "averaged"
        self.embedding = nn.Embedding(FIRST_WORD + len(vocabulary), shape.width, padding_idx=PADDING)
        with torch.no_grad():  # unknown words may never be taught
            self.embedding.weight.copy_(random_vectors(len(vocabulary), shape.width))
        sizes = [shape.width] + [hidden * (1 + both)] * (shape.layers - 1)
        own = last_blocks(sizes, n_unc_layers)
        self.layers = nn.ModuleList(GRULayer(size, hidden, both) for size in sizes)
        self.branch = nn.ModuleList(GRULayer(size, hidden, both) for size in own) if o.probabilistic else None
        self.blocks = [f"layers.{i}" for i in range(len(sizes))]
        self.branch_blocks = [f"branch.{i}" for i in range(n_unc_layers)]
        out = hidden * (1 + (both and not self.averaged))
        o = replace(o, pooling={**(o.pooling or {}), **shape.head_options.get(o.head, {})})
        width = shape.width if shape.tokens == "words" else out
        self.add_heads(o, width, out, own_projection=not shape.projection and out == o.embed_dim)

    def features(self, tokens: Tensor) -> BothFeatures:
        mask = word_mask(tokens)
        length = mask.sum(1)
        with torch.autocast(tokens.device.type, enabled=False):  # long recurrences lose precision in bfloat16
            words = self.embedding(tokens)
            both = run_both(self.layers, self.branch, words, length)
            return tuple(x if x is None else self._pool(x, words, length, mask) for x in both)

    def _pool(self, x: Tensor, words: Tensor, length: Tensor, mask: Tensor) -> Features:
        if self.shape.pooling == "max":
            pooled = x.masked_fill(~mask[..., None], -torch.inf).amax(1)
        elif self.shape.pooling == "mean":
            pooled = (x * mask[..., None]).sum(1) / length[:, None]
        else:
            ends = x.gather(1, (length - 1)[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]
            forwards = {"last-word": x.shape[2], "last": self.shape.hidden}[self.shape.pooling]
            pooled = torch.cat([ends[:, :forwards], x[:, 0, forwards:]], 1)  # backwards, the first word is read last
        if self.averaged:
            x, pooled = (state.unflatten(-1, (2, -1)).mean(-2) for state in (x, pooled))
        return Features(words if self.shape.tokens == "words" else x, pooled, mask)

    def place(self, name: str) -> Place:
        """Pretrained are the word vectors alone: the GRU starts from random weights."""
        place = super().place(name)
        return place._replace(pretrained=place.in_stem)


class GRULayer(nn.Module):
    """One GRU, or one each way: (B, T, in) and lengths (B,) -> (B, T, H or 2 H). States at padding mean nothing."""

    def __init__(self, width: int, hidden: int, bidirectional: bool):
        super().__init__()
        self.forwards = nn.GRU(width, hidden, batch_first=True)
        self.backwards = nn.GRU(width, hidden, batch_first=True) if bidirectional else None

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        first = self.forwards(x)[0]
        if self.backwards is None:
            return first
        position = torch.arange(x.shape[1], device=x.device)
        mirror = torch.where(position < length[:, None], length[:, None] - 1 - position, position)[..., None]
        second = self.backwards(x.gather(1, mirror.expand(-1, -1, x.shape[2])))[0]
        return torch.cat([first, second.gather(1, mirror.expand(-1, -1, second.shape[2]))], -1)
