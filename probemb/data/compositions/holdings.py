"""Images and their concepts: compressed lists in both directions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def among(values: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Mask of the values that are among others, which are in ascending order: (n,), (m,) -> (n,) bool.

    The same as `np.isin`, which takes many times longer for few values.
    """
    if not len(ascending):
        return np.zeros(len(values), dtype=bool)
    places = np.searchsorted(ascending, values)
    return ascending[np.minimum(places, len(ascending) - 1)] == values


class Holdings:
    """The concepts of N images, and the images of C concepts.

    Args:
        pairs: (P, 2) whole numbers, (image, concept); order and repetition do not matter.
        n_images, n_concepts: N and C.
    """

    def __init__(self, pairs: np.ndarray, n_images: int, n_concepts: int):
        pairs = np.unique(np.asarray(pairs, dtype=np.int64).reshape(-1, 2), axis=0)
        self.n_images, self.n_concepts = n_images, n_concepts
        self._concepts = pairs[:, 1].astype(np.int32)
        self._image_starts = np.searchsorted(pairs[:, 0], np.arange(n_images + 1))
        order = np.lexsort((pairs[:, 0], pairs[:, 1]))
        self._images = pairs[order, 0].astype(np.int32)
        self._concept_starts = np.searchsorted(pairs[order, 1], np.arange(n_concepts + 1))

    def __len__(self) -> int:
        return self.n_images

    def __getitem__(self, image: int) -> frozenset[int]:
        """The concepts of an image."""
        return frozenset(self.of_image(image).tolist())

    def pairs(self) -> np.ndarray:
        """(P, 2) int64, each (image, concept) once, in ascending order."""
        images = np.repeat(np.arange(self.n_images), np.diff(self._image_starts))
        return np.stack([images, self._concepts.astype(np.int64)], axis=1)

    def of_image(self, image: int) -> np.ndarray:
        """The concepts of an image in ascending order."""
        return self._concepts[self._image_starts[image] : self._image_starts[image + 1]]

    def of_concept(self, concept: int) -> np.ndarray:
        """The images of a concept in ascending order."""
        return self._images[self._concept_starts[concept] : self._concept_starts[concept + 1]]

    def with_all(self, concepts: Sequence[int]) -> np.ndarray:
        """The images that have all of the concepts, in ascending order, (R,) int64; without concepts none."""
        lists = sorted((self.of_concept(int(one)) for one in concepts), key=len)
        found = lists[0] if lists else np.empty(0, np.int32)
        for other in lists[1:]:
            found = found[among(found, other)]
        return found.astype(np.int64)

    def dense(self, images: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """(T, C) bool of some images, or of all of them."""
        if images is None:
            held = np.zeros((self.n_images, self.n_concepts), dtype=bool)
            held[tuple(self.pairs().T)] = True
            return held
        held = np.zeros((len(images), self.n_concepts), dtype=bool)
        for row, image in enumerate(images):
            held[row, self.of_image(int(image))] = True
        return held

    def matches(self, concepts: np.ndarray, images: np.ndarray) -> np.ndarray:
        """Mask of the images that have all concepts of a query: (Q, c), (T,) -> (Q, T) bool."""
        concepts, images = np.asarray(concepts), np.asarray(images)
        used, columns = np.unique(concepts, return_inverse=True)
        held = np.empty((len(images), len(used)), dtype=bool)
        for column, concept in enumerate(used):
            held[:, column] = among(images, self.of_concept(concept))
        result = np.ones((len(concepts), len(images)), dtype=bool)
        for place in columns.reshape(concepts.shape).T:
            result &= held[:, place].T
        return result
