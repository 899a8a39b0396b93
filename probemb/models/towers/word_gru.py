"""Word embeddings and a GRU in one or both directions, for text: the text tower of VSE++, PVSE and PCME.

    words ── embedding ── layer 1 … L−u ─┬─ layer L−u+1 … L ── mean head ──── mean
                                         └─ u layers of its own ─ log_var head ─ log_var

The backward direction reads every text reversed within its own length. So padding never comes before a word, and a
text's states do not depend on the batch, as with packed sequences; in contrast to those no length leaves the device.

Shapes: B texts, T words, E width of the word embeddings, H hidden size, W = H or 2 H width of the tower.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from probemb.errors import UserError, nearest
from probemb.models.architectures import check_n_unc_layers
from probemb.models.encoder import Encoder, Place
from probemb.models.features import Features
from probemb.models.heads import HeadConfig, add_heads
from probemb.models.towers.words import WordParts, fill_rows, needed_vocabulary, random_vectors, trim_words, word_mask
from probemb.models.word_tokenizer import FIRST_WORD, PADDING

POOLING = ("last", "last-word", "max", "mean")
TOKENS = ("states", "words")
DIRECTIONS = ("concatenated", "averaged")
LAYER = re.compile(r"(layers|branch)\.(\d+)\.")


def make_text_tower(architecture: dict, n_unc_layers: int, head: HeadConfig, stock: nn.Module | None) -> WordGRU:
    """The tower of an architecture; text_cfg has "vocabulary", and the fields of `GRUShape`."""
    config = {key: value for key, value in architecture["text_cfg"].items() if key not in ("tower", "vocabulary")}
    return WordGRU(needed_vocabulary(architecture), n_unc_layers, head, GRUShape(**config))


@dataclass(frozen=True)
class GRUShape:
    """Sizes and wiring of a `WordGRU`, keys of an architecture's text_cfg.

    Attributes:
        width, hidden, layers, bidirectional: E, H, number of layers, and whether both directions are concatenated.
        pooling: "last" (each direction's last state), "max" or "mean" over the words; "last-word", both directions'
            states at the last word, of which the backward one has read that word alone, is what the public codes of
            PVSE and PCME do.
        tokens: what the heads see beside the pooled states: "states", or "words", the word embeddings (PVSE, PCME).
        directions: "concatenated", or "averaged" (SCAN): every state and pooled one is the mean of both directions.
        projection: whether head "clip" maps the pooled states to D; otherwise those of size D are the embedding (VSE++,
            VSRN).
        head_options: further options of a kind of head in this tower, by its name: {"pie": {"project": false}}.
        context_length: largest number of words.

    Raises:
        UserError: an unknown pooling, tokens or directions.
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

    def __post_init__(self):
        for what, known in (("pooling", POOLING), ("tokens", TOKENS), ("directions", DIRECTIONS)):
            if (chosen := getattr(self, what)) not in known:
                raise UserError(
                    f"There is no {what} '{chosen}' of words.{nearest(chosen, known)}", f"Use {', '.join(known)}."
                )

    @property
    def averaged(self) -> bool:
        """True if states are the mean of two directions."""
        return self.bidirectional and self.directions == "averaged"

    @property
    def layer_inputs(self) -> list[int]:
        """The input size of every layer."""
        return [self.width] + [self.hidden * (1 + self.bidirectional)] * (self.layers - 1)

    @property
    def out(self) -> int:
        """The size of states."""
        return self.hidden * (1 + (self.bidirectional and not self.averaged))


class WordGRU(WordParts, Encoder):
    """A word embedding and layers of GRUs.

    Args:
        vocabulary: the words, in the order of their ids.
        n_unc_layers: layers of the uncertainty branch.
        head: of the mean and the log-variance.
        shape: sizes and wiring.
    """

    def __init__(self, vocabulary: list[str], n_unc_layers: int, head: HeadConfig, shape: GRUShape):
        super().__init__()
        check_n_unc_layers(n_unc_layers, shape.layers, "text")
        self.shape, self.context_length, self.vocabulary = shape, shape.context_length, list(vocabulary)
        self.embedding = nn.Embedding(FIRST_WORD + len(vocabulary), shape.width, padding_idx=PADDING)
        with torch.no_grad():  # unknown words may never be taught
            self.embedding.weight.copy_(random_vectors(len(vocabulary), shape.width))
        sizes = shape.layer_inputs

        def layers(sizes: list[int]) -> nn.ModuleList:
            return nn.ModuleList(_Layer(size, shape.hidden, shape.bidirectional) for size in sizes)

        self.layers = layers(sizes)
        self.branch = layers(sizes[shape.layers - n_unc_layers :]) if head.probabilistic else None
        options = {**head.options, **shape.head_options.get(head.kind, {})}
        add_heads(
            self, replace(head, options=options), shape.width if shape.tokens == "words" else shape.out, shape.out,
            own_projection=not shape.projection and shape.out == head.embed_dim,
        )  # fmt: skip

    def features(self, tokens: Tensor) -> tuple[Features, Features | None]:
        """(B, T) int64 -> features; their mask is True for words."""
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

    def place(self, name: str) -> Place:
        """Layers by their depth; the embedding belongs to the trunk's depth 0."""
        if name.startswith(("mean_head.", "log_var_head.")):
            return Place("head")
        layer = LAYER.match(name)
        if layer is None:
            return Place("trunk")
        layers = self.layers if layer[1] == "layers" else self.branch
        return Place("trunk" if layer[1] == "layers" else "branch", len(layers) - int(layer[2]))

    def in_stem(self, name: str) -> bool:
        """The word vectors."""
        return name.startswith("embedding.")

    def is_pretrained(self, name: str) -> bool:
        """The word vectors alone: the GRU starts from random weights."""
        return name.startswith("embedding.")

    def trim(self, tokens: Tensor) -> Tensor:
        """(B, T) without the columns behind the longest text."""
        return trim_words(tokens)

    def fill_embedding(self, vectors: Mapping[str, np.ndarray]) -> int:
        """Start words from vectors (E,); see `fill_rows`."""
        return fill_rows(self.embedding.weight, self.vocabulary, vectors)


class _Layer(nn.Module):
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
