"""The combinations of concepts that the benchmark asks for (MPC, supplementary A, algorithm A).

A combination is feasible if enough images of every split have all of its concepts, and every split has something to cut
image queries of each from. The published algorithm draws k concepts until it has found enough feasible combinations;
here all of them are found first, and drawn from: the same distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from probemb.data.compositions.concepts import SPLITS, ConceptImages
from probemb.data.randomness import stream_of
from probemb.errors import UserError

MAX_FEASIBLE = 5_000_000  # combinations; COCO has some ten thousand
MAX_K = 10


@dataclass(frozen=True)
class TupleNumbers:
    """Numbers of combinations to draw, fewer where there are no more, and of images that a feasible one is in.

    Attributes:
        seen: asked for in all splits.
        unseen_train, unseen_test: pairs of another setup; all concepts of the test pairs are in the training pairs.
        feasible, infeasible: further pairs that are not trained on: feasible ones, and such as are in no image at all.
        minimum: images of train, val and test.
    """

    seen: int = 1000
    unseen_train: int = 100
    unseen_test: int = 500
    feasible: int = 250
    infeasible: int = 250
    minimum: tuple[int, int, int] = (8, 2, 2)


def no_tuples(k: int = 2) -> np.ndarray:
    return np.empty((0, k), dtype=np.int64)


@dataclass(frozen=True)
class Tuples:
    """Combinations of concept numbers, each (T, k) int64 in ascending order of the numbers of a row.

    Attributes: those of `TupleNumbers`; all but `seen` are empty unless k is 2.
    """

    seen: np.ndarray
    unseen_train: np.ndarray = field(default_factory=no_tuples)
    unseen_test: np.ndarray = field(default_factory=no_tuples)
    feasible: np.ndarray = field(default_factory=no_tuples)
    infeasible: np.ndarray = field(default_factory=no_tuples)


def sample_tuples(
    found: ConceptImages, k: int = 2, seed: int = 0, numbers: TupleNumbers | None = None,
    impossible: set[tuple[int, ...]] | None = None,
) -> Tuples:  # fmt: skip
    """Draw the benchmark's combinations; a pure function of the data, k and the seed.

    Args:
        impossible: pairs that the infeasible ones are drawn from, where the data's makers know them; those that occur
            in an image all the same are left out.

    Raises UserError: a split is missing, or there are more than 5,000,000.
    """
    numbers = numbers or TupleNumbers()

    def shuffled(rows: np.ndarray, name: str) -> np.ndarray:
        return rows[stream_of("tuples", seed, k, name).permutation(len(rows))]

    feasible = feasible_tuples(found, k, numbers.minimum)
    order = shuffled(feasible, "seen")
    seen, more = order[: numbers.seen], order[numbers.seen :]
    if k != 2:
        return Tuples(seen)
    other = shuffled(feasible, "unseen")
    train, rest = other[: numbers.unseen_train], other[numbers.unseen_train :]
    test = rest[np.isin(rest, train).all(axis=1)][: numbers.unseen_test]
    held = found.holdings().dense().astype(np.float32)
    together = held.T @ held > 0
    rows = [pair for pair in combinations(np.flatnonzero(shown(found)).tolist(), 2) if not together[pair]]
    rows = [pair for pair in rows if impossible is None or pair in impossible]
    never = shuffled(np.array(rows, dtype=np.int64).reshape(-1, 2), "infeasible")
    return Tuples(seen, train, test, more[: numbers.feasible], never[: numbers.infeasible])


def feasible_tuples(found: ConceptImages, k: int, minimum: tuple[int, int, int]) -> np.ndarray:
    """All combinations of k concepts that so many images of train, val and test have, (T, k), in ascending order.

    Raises UserError: a split is missing, or there are more than 5,000,000.
    """
    missing = [name for name in SPLITS if name not in found.splits]
    if missing:
        raise UserError(
            f"{found.source} has no images in the split {missing[0]}.", "Name the folder that holds all three splits."
        )
    held = found.holdings().dense() & shown(found)  # (N, C)
    member = np.stack([np.array(found.splits) == name for name in SPLITS]).astype(np.float32)  # (3, N)
    least = np.array(minimum)[:, None]
    rows: list[tuple[int, ...]] = []

    def extend(prefix: tuple[int, ...], images: np.ndarray) -> None:
        """Every feasible combination begins with feasible shorter ones."""
        first = prefix[-1] + 1 if prefix else 0
        part = held[images, first:]
        counts = member[:, images] @ part.astype(np.float32)  # (3, C - first), exact below 2^24
        for column in np.flatnonzero((counts >= least).all(axis=0)).tolist():
            longer = (*prefix, first + column)
            if len(longer) < k:
                extend(longer, images[part[:, column]])
            else:
                rows.append(longer)
        if len(rows) > MAX_FEASIBLE:
            raise UserError(
                f"{found.source} has more than {MAX_FEASIBLE:,} combinations of {k} concepts.",
                "Ask for shorter combinations.",
            )

    extend((), np.flatnonzero(member.any(axis=0)))
    return np.array(rows, dtype=np.int64).reshape(-1, k)


def shown(found: ConceptImages) -> np.ndarray:
    """Mask of the concepts with image queries in every split: (C,) bool."""
    number = np.arange(len(found.concepts))
    return np.all([np.isin(number, found.split(name).crop_pairs[:, 1]) for name in SPLITS], axis=0)
