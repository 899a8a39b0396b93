"""Tokens of many items, kept on disk: float16, one behind the other without padding, in a file that no name points to.

Letters: N items, T tokens, D dimensions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from probemb.cross_attention import Tokens, unit_tokens
from probemb.errors import UserError
from probemb.gaussian import Gaussian

if TYPE_CHECKING:
    from probemb.models import Encoder


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Tokens of unit length of N items.

    Attributes:
        values: (P, D) float16, memory-mapped, of all items.
        starts, lengths: (N,) int64, where each item's tokens stand.
    """

    values: np.ndarray
    starts: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, index: Tensor) -> KeptTokens:
        """Other items, or another order, of the same file."""
        return KeptTokens(self.values, self.starts[index], self.lengths[index])

    def read(self, rows: slice, device: torch.device | str = "cpu") -> Tokens:
        """Some items' tokens, (n, longest, D) float32, of unit length again."""
        starts, lengths = self.starts[rows], self.lengths[rows]
        values = np.zeros((len(starts), int(lengths.max()), self.values.shape[1]), np.float32)
        for item, start, length in zip(values, starts.tolist(), lengths.tolist()):
            item[:length] = self.values[start : start + length]
        mask = torch.arange(values.shape[1]) < lengths[:, None]
        return unit_tokens(torch.from_numpy(values).to(device), mask.to(device))


class TokenKeeper:
    """Collects tokens batch by batch; `kept` gives them all.

    Raises:
        UserError: the folder for temporary files is full.
    """

    def __init__(self):
        self._file = tempfile.TemporaryFile(prefix="probemb-tokens-")  # noqa: SIM115  lives as long as the tokens
        self._lengths: list[Tensor] = []
        self._dim = 0
        self.order: Tensor | None = None  # of the items, if not that of `add`

    def through(self, tower: Encoder) -> Callable[[Tensor], Gaussian]:
        """A tower's `encode` of a batch, which also keeps its tokens. Raises ValueError: its heads give none."""

        def encode(inputs: Tensor) -> Gaussian:
            encoded = tower.encode(inputs, want_tokens=True)
            self.add(encoded.tokens, encoded.mask)
            return encoded.gaussian

        return encode

    def add(self, values: Tensor, mask: Tensor) -> None:
        """A batch (B, T, D) with its mask (B, T); at least one token of each item is kept."""
        tokens = unit_tokens(values, mask)
        self._lengths.append(tokens.mask.sum(1).cpu())
        self._dim = values.shape[2]
        try:
            self._file.write(tokens.values[tokens.mask].half().cpu().numpy().tobytes())
        except OSError as error:
            raise UserError(
                f"The tokens that are ranked by cannot be kept in {tempfile.gettempdir()} ({error.strerror}).",
                "Make room there, or set TMPDIR to another folder.",
            ) from error

    def kept(self) -> KeptTokens:
        """All items."""
        self._file.flush()
        lengths = torch.cat(self._lengths)
        values = np.memmap(self._file, np.float16, "r", shape=(int(lengths.sum()), self._dim))
        found = KeptTokens(values, lengths.cumsum(0) - lengths, lengths)
        return found if self.order is None else found.take(self.order)
