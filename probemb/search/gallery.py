"""Vectors of a gallery that need not fit into memory, read partition by partition."""

from collections.abc import Iterator, Sequence

import numpy as np

from probemb.errors import UserError
from probemb.search.embeddings import Embeddings
from probemb.search.index import gallery_vectors, width_of
from probemb.search.penalty import penalty_of

ROWS = 1 << 16  # vectors at a time


class Gallery:
    """The items of an index, in the order of the folders and of their partitions' names.

    Args:
        sources: of one model.
        kind: "image" or "text".
        form, factory, tolerance: as `build_index` takes them.

    Attributes:
        parts: (folder, partition); count: items; dim: D; width: of a vector; penalty: of the form.

    Raises UserError: no items, a weight that is not finite.
    """

    def __init__(
        self, sources: Sequence[Embeddings], kind: str, form: str, factory: str, tolerance: float | None = None
    ):
        self.parts = [(source, part) for source in sources for part in source.partitions(kind)]
        self.count = sum(part.count for _, part in self.parts)
        if not self.count:
            raise UserError(
                f"{' and '.join(str(source.folder) for source in sources)} hold no {kind} embeddings.",
                f"Make them with `python -m tools.embed --items {kind}`.",
            )
        self.form, self.factory, self.dim = form, factory, sources[0].dim
        self.width = width_of(self.dim, form, factory)
        least, most = (0.0, 0.0) if form == "mean" else self._ends_of_u()
        self.penalty = penalty_of(form, tolerance, most, least)

    def _ends_of_u(self) -> tuple[float, float]:
        several = [source.read_uncertainty(part) for source, part in self.parts if part.count]
        return min(float(u.min()) for u in several), max(float(u.max()) for u in several)

    def versions(self) -> list[list]:
        """[path, bytes, time of change] of each file, which change with the embeddings."""
        found = []
        for source, part in self.parts:
            path = source.path(part)
            try:
                status = path.stat()
                found.append([str(path.absolute()), status.st_size, status.st_mtime_ns])
            except OSError:  # reported when it is read
                found.append([str(path.absolute()), None, None])
        return found

    def sample(self, wanted: int, seed: int) -> np.ndarray:
        """Vectors of `wanted` items, drawn without replacement, in gallery order. Raises UserError."""
        drawn = np.sort(np.random.default_rng(seed).choice(self.count, wanted, replace=False, shuffle=False))
        found = np.empty((wanted, self.width), dtype=np.float32)
        start = 0
        for source, part in self.parts:
            first, last = np.searchsorted(drawn, (start, start + part.count))
            if last > first:
                mean, u = source.read(part)
                rows = drawn[first:last] - start
                found[first:last] = self._vectors(mean[rows], u[rows])
            start += part.count
        return found

    def vectors(self, start: int, end: int) -> Iterator[np.ndarray]:
        """Vectors of the items from `start` to `end`, in chunks. Raises UserError."""
        place = 0
        for source, part in self.parts:
            if place < end and place + part.count > start:
                mean, u = source.read(part)
                last = min(part.count, end - place)
                for first in range(max(0, start - place), last, ROWS):
                    rows = slice(first, min(last, first + ROWS))
                    yield self._vectors(mean[rows], u[rows])
            place += part.count

    def _vectors(self, mean: np.ndarray, u: np.ndarray) -> np.ndarray:
        return gallery_vectors(mean, u, self.form, self.factory, self.penalty)
