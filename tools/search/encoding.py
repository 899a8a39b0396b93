"""Embed queries with a model that serves several threads, and several indexes."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

from tools.search.decoding import DecodingPool
from tools.search.wish import QueryImage, StoredImage, clean_texts

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.cli.device import Device
    from probemb.gaussian import Gaussian


class QueryEncoder:
    """A model for queries; thread-safe.

    Args:
        loaded: `probemb.models.LoadedModel`, on `device`.
        name: as it is shown.
        decoding: shared by the models of a server; by default one of its own.
    """

    def __init__(self, loaded, name: str, device: Device | None = None, decoding: DecodingPool | None = None):
        from probemb.cli.device import CPU
        from probemb.evaluation.embedding import Embedder
        from probemb.models.match import MatchModel
        from tools.search.composing import QueryComposer

        model, tokenizer, transforms = loaded
        self.name, self.loaded = name, loaded
        self.match_model = MatchModel.of(model)
        self.composer = QueryComposer(model)
        self.embedder = Embedder(model, tokenizer, transforms.evaluate, device or CPU)
        self.decoding = decoding or DecodingPool()
        self._one_at_a_time = Lock()  # bounds memory and protects the tokenizer's cache

    def embed(self, texts: Sequence[str], images: Sequence[QueryImage | StoredImage]) -> Gaussian:
        """The parts of a query, texts first, (K, D). Raises UserError: an empty, too large, undecodable query; Busy."""
        from probemb.gaussian import Gaussian

        texts = clean_texts(texts, len(images))
        pixels = self.decoding.pixels(images, self.loaded.transforms.evaluate) if images else None
        parts = [self.embed_texts(texts)] if texts else []
        return Gaussian.cat([*parts, self.embed_pixels(pixels)] if images else parts)

    def embed_texts(self, texts: Sequence[str]) -> Gaussian:
        """Texts that need no check, (K, D)."""
        with self._one_at_a_time:
            return self.embedder.texts(texts)

    def embed_pixels(self, pixels: Tensor) -> Gaussian:
        """(K, 3, H, W) -> (K, D)."""
        with self._one_at_a_time:
            return self.embedder.pixels([pixels])
