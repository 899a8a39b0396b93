"""Text towers that read whole words: a GRU (VSE++, PVSE, PCME), or the mean of word vectors (jWAE); their tokenizer.

    words ── embedding ── layer 1 … L−u ─┬─ layer L−u+1 … L ── mean head ──── mean
                                         └─ u layers of its own ─ log_var head ─ log_var

Ids: 0 is padding, 1 an unknown word, 2 and on are the vocabulary in its order.
Shapes: B texts, T words, E width of the word vectors, H hidden size, W = H or 2 H width of the tower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.data.words import split_words
from probemb.errors import UserError
from probemb.models.encoder import BothFeatures, Encoder
from probemb.models.heads import Features
from probemb.models.options import ModelOptions
from probemb.models.towers.branch import check_n_unc_layers
from probemb.models.towers.parts import Parts, take_tokens

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
WIRING = {"last", "last-word", "max", "mean", "states", "words", "concatenated", "averaged"}
VECTOR_STD = 0.3  # about that of GloVe's vectors


class WordTokenizer:
    """Texts to ids of words, for texts of any origin: what is read of a text and of a word is bounded."""

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


class WordTower(Encoder):
    """Base of towers of words. A subclass takes (vocabulary, options, n_unc_layers, **text_cfg); `table` is its
    vectors, (FIRST_WORD + words, E).
    """

    vocabulary: list[str]

    @property
    def table(self) -> Tensor:
        raise NotImplementedError

    def parts(self, tokens: Tensor) -> Parts:
        """Every word may be dropped, as if it had not been written."""
        optional = tokens != PADDING
        return Parts(optional, torch.zeros_like(optional))

    def trim(self, tokens: Tensor) -> Tensor:
        longest = int((tokens != PADDING).sum(1).max()) if len(tokens) else 1
        return tokens[:, : max(1, longest)]

    @torch.no_grad()
    def fill_embedding(self, vectors: Mapping[str, np.ndarray]) -> int:
        """Start words from vectors (E,), others stay; returns how many had one. Raises UserError: another width."""
        found, width = 0, self.table.shape[1]
        for row, word in enumerate(self.vocabulary, FIRST_WORD):
            if word in vectors:
                if (given := len(vectors[word])) != width:
                    raise UserError(
                        f"The word vectors have {given} numbers, the model's {width}.",
                        f"Name vectors of {width} numbers, or an architecture whose text width is {given}.",
                    )
                self.table[row] = torch.from_numpy(vectors[word])
                found += 1
        return found


def random_vectors(n_words: int, width: int) -> Tensor:
    """Vectors to start from, (FIRST_WORD + n_words, width): 0 for padding and for unknown words."""
    vectors = torch.randn(FIRST_WORD + n_words, width) * VECTOR_STD
    vectors[[PADDING, UNKNOWN]] = 0
    return vectors


def word_mask(tokens: Tensor) -> Tensor:
    """(B, T) bool, True for words; an empty text is one word of padding."""
    return (tokens != PADDING) | (torch.arange(tokens.shape[1], device=tokens.device) == 0)


class WordMean(WordTower):
    """Mean word vectors; tokens are the words' vectors. Source: jWAE (mean word2vec).

    The vectors are inputs, not weights: they stay as they start (random where a word has none), and an autoencoder can
    therefore be asked to reconstruct their mean.
    """

    def __init__(
        self, vocabulary: list[str], o: ModelOptions, n_unc_layers: int, width: int = 300, context_length: int = 64
    ):
        super().__init__()
        check_n_unc_layers(n_unc_layers, 0, "text")
        self.context_length, self.vocabulary = context_length, list(vocabulary)
        self.register_buffer("vectors", random_vectors(len(vocabulary), width))
        self.add_heads(o, width, width)

    table = property(lambda self: self.vectors)

    def features(self, tokens: Tensor, kept: Tensor | None = None) -> BothFeatures:
        """(B, T) int64 -> features; unknown words have no part in the mean, and a text of them alone is 0."""
        if kept is not None:
            tokens = take_tokens(tokens, kept, PADDING)
        x, known = F.embedding(tokens, self.vectors), (tokens > UNKNOWN)[..., None]
        pooled = (x * known).sum(1) / known.sum(1).clamp(min=1)
        features = Features(x, pooled, word_mask(tokens))
        return features, features if self.options.probabilistic else None


@dataclass(frozen=True)
class GRUShape:
    """Sizes and wiring of a `WordGRU`, keys of an architecture's text_cfg.

    Attributes:
        width, hidden, layers, bidirectional: E, H, number of layers, and whether there are two directions.
        pooling: "last" (each direction's last state), "max" or "mean" over the words; "last-word", both directions'
            states at the last word, of which the backward one has read that word alone, is what the public codes of
            PVSE and PCME do.
        tokens: what the heads see beside the pooled states: "states", or "words", the word vectors (PVSE, PCME).
        directions: "concatenated", or "averaged" (SCAN): every state and pooled one is the mean of both directions.
        projection: whether head "clip" maps the pooled states to D; otherwise those of size D are the embedding (VSE++,
            VSRN).
        head_options: further `ModelOptions.pooling` of a head in this tower: {"pie": {"project": false}}.
    """

    width: int = 300
    hidden: int = 512
    layers: int = 1
    bidirectional: bool = True
    pooling: str = "last"
    context_length: int = 64
    tokens: str = "states"
    directions: str = "concatenated"
    projection: bool = True
    head_options: Mapping[str, dict] = field(default_factory=dict)

    @property
    def averaged(self) -> bool:
        return self.bidirectional and self.directions == "averaged"


class WordGRU(WordTower):
    """Word vectors and layers of GRUs (`GRUShape`); the last `n_unc_layers` exist twice.

    The backward direction reads every text reversed within its own length. So padding never comes before a word, and a
    text's states do not depend on the batch, as with packed sequences; and no length leaves the device.
    """

    stem_prefixes = ("embedding.",)

    def __init__(self, vocabulary: list[str], o: ModelOptions, n_unc_layers: int, **shape):
        super().__init__()
        self.shape = shape = GRUShape(**shape)
        if {shape.pooling, shape.tokens, shape.directions} - WIRING:
            raise UserError(f"A GRU of words is not wired like that: {shape}.", "Correct the text_cfg.")
        check_n_unc_layers(n_unc_layers, shape.layers, "text")
        self.context_length, self.vocabulary = shape.context_length, list(vocabulary)
        self.embedding = nn.Embedding(FIRST_WORD + len(vocabulary), shape.width, padding_idx=PADDING)
        with torch.no_grad():  # unknown words may never be taught
            self.embedding.weight.copy_(random_vectors(len(vocabulary), shape.width))
        sizes = [shape.width] + [shape.hidden * (1 + shape.bidirectional)] * (shape.layers - 1)

        def layers(sizes: list[int]) -> nn.ModuleList:
            return nn.ModuleList(GRULayer(size, shape.hidden, shape.bidirectional) for size in sizes)

        self.layers = layers(sizes)
        self.branch = layers(sizes[shape.layers - n_unc_layers :]) if o.probabilistic else None
        self.blocks = [f"layers.{i}" for i in range(shape.layers)]
        self.branch_blocks = [f"branch.{i}" for i in range(n_unc_layers)]
        out = shape.hidden * (1 + (shape.bidirectional and not shape.averaged))
        o = replace(o, pooling={**(o.pooling or {}), **shape.head_options.get(o.head, {})})
        tokens = shape.width if shape.tokens == "words" else out
        self.add_heads(o, tokens, out, own_projection=not shape.projection and out == o.embed_dim)

    table = property(lambda self: self.embedding.weight)

    def features(self, tokens: Tensor, kept: Tensor | None = None) -> BothFeatures:
        """(B, T) int64 -> features; their mask is True for words."""
        if kept is not None:
            tokens = take_tokens(tokens, kept, PADDING)
        mask = word_mask(tokens)
        length = mask.sum(1)
        with torch.autocast(tokens.device.type, enabled=False):  # long recurrences lose precision in bfloat16
            x = words = self.embedding(tokens)
            shared = len(self.layers) - len(self.branch or ())
            for layer in self.layers[:shared]:
                x = layer(x, length)
            mean = self._run(self.layers[shared:], x, length, mask)
            unc = None if self.branch is None else self._run(self.branch, x, length, mask)
        if self.shape.tokens == "words":
            mean, unc = mean._replace(tokens=words), unc and unc._replace(tokens=words)
        return mean, unc

    def _run(self, layers: nn.ModuleList, x: Tensor, length: Tensor, mask: Tensor) -> Features:
        for layer in layers:
            x = layer(x, length)
        pooling = self.shape.pooling
        if pooling == "max":
            pooled = x.masked_fill(~mask[..., None], -torch.inf).amax(1)
        elif pooling == "mean":
            pooled = (x * mask[..., None]).sum(1) / length[:, None]
        else:
            ends = x.gather(1, (length - 1)[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]
            hidden = x.shape[2] if pooling == "last-word" else self.shape.hidden
            pooled = torch.cat([ends[:, :hidden], x[:, 0, hidden:]], 1)  # backwards, the first word is read last
        if self.shape.averaged:
            x, pooled = (state.unflatten(-1, (2, -1)).mean(-2) for state in (x, pooled))
        return Features(x, pooled, mask)

    def is_pretrained(self, name: str) -> bool:
        """The word vectors alone: the GRU starts from random weights."""
        return self.in_stem(name)


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
