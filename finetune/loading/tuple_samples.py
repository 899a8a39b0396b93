"""Training examples of composed retrieval: the parts of a query, images and texts in any mixture, and a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from finetune.loading.rows import Rows, Unusable, stacked
from probemb.data.compositions.dataset import Compositions, Example
from probemb.data.randomness import stream_of
from probemb.errors import UserError

_DRAW = "example"  # a use of random numbers


class TupleBatch(NamedTuple):
    """This rank's b rows of one global batch, each a query of k parts and its target.

    images        (b + m, 3, H, W) uint8: the b targets, then the m parts that are images
    tokens        (t, L) int64: the parts that are texts; one unused row where no part is a text, so that the text
                  tower takes part in the gradients of every rank
    part_rows     (b, k) int64: r >= 0 is images[b + r], r < 0 is tokens[-r - 1]
    text_used     (t,) bool: False for the unused row
    target_index  (b,) int64: which image of `Compositions` the target is
    concepts      (b, c) int64: what a correct target has; c = k but for changes of attributes, where it is 1
    example_index (b,) int64: which combination, or which source image of changes

    m and t differ from rank to rank and from step to step.
    """

    images: torch.Tensor
    tokens: torch.Tensor
    part_rows: torch.Tensor
    text_used: torch.Tensor
    target_index: torch.Tensor
    concepts: torch.Tensor
    example_index: torch.Tensor


class TupleRow(NamedTuple):
    """One example, read: its target, and for each part pixels or tokens."""

    number: int
    example: Example
    target: torch.Tensor
    parts: list[torch.Tensor]


class TupleRows(Rows[TupleRow, TupleBatch]):
    """Reads examples.

    Args:
        data: one split. Row r of an epoch is an example of combination r modulo their number.
        repeats: rows of an epoch for each combination, with other targets and parts each time.
    """

    def __init__(
        self, data: Compositions, transform: Callable, tokenizer: Callable, batch_size: int, seed: int, repeats: int = 1
    ):  # fmt: skip
        super().__init__(data.n_examples * repeats, data.images, transform, tokenizer, batch_size, seed)
        self.data = data

    def read(self, epoch: int, number: int) -> TupleRow:
        example = self.data.draw(number % self.data.n_examples, stream_of(_DRAW, self.seed, epoch, number))
        target = self.image(example.target, epoch, number, 0)
        parts = [
            self.image(part.image, epoch, number, place, box=part.box)
            if part.is_image
            else self.tokens(part.text, example.target)
            for place, part in enumerate(example.parts, 1)
        ]
        return TupleRow(number, example, target, parts)

    def batch(self, rows: list[TupleRow]) -> TupleBatch:
        images, texts, places = [], [], []
        for row in rows:
            mine = []
            for part, content in zip(row.example.parts, row.parts):
                kind = images if part.is_image else texts
                mine.append(len(kind) if part.is_image else -len(kind) - 1)
                kind.append(content)
            places.append(mine)
        used = torch.ones(max(1, len(texts)), dtype=torch.bool)
        if not texts:
            used[0] = False
            texts.append(self._padding(rows[0]))
        numbers = torch.tensor([row.number % self.data.n_examples for row in rows])
        targets, concepts = zip(*((row.example.target, row.example.concepts) for row in rows))
        pixels = [row.target for row in rows] + images
        rows.clear()
        return TupleBatch(
            stacked(pixels),
            torch.stack(texts),
            torch.tensor(places),
            used,
            torch.tensor(targets),
            torch.tensor(concepts),
            numbers,
        )

    def _padding(self, row: TupleRow) -> torch.Tensor:
        """The tokens of a text that no part is: the first concept's."""
        try:
            return self.tokens(self.data.concepts[row.example.concepts[0]], row.example.target)
        except Unusable as error:
            raise UserError(f"The tokenizer cannot read a concept: {error.why}.", "Check the tokenizer.") from None
