"""The combinations of concepts that the benchmark asks for (MPC, supplementary A, algorithm A).

A combination is feasible if enough images of every split have all of its concepts, and every split has something to cut
image queries of each from. The published algorithm draws k
concepts until it has found enough feasible combinations; here all of them are found first, and drawn from: the same
distribution, and what is missing can be said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from probemb.data.compositions.annotated import SPLITS, ConceptImages
from probemb.data.compositions.holdings import Holdings
from probemb.data.randomness import stream_of
from probemb.errors import UserError

MAX_FEASIBLE = 5_000_000  # combinations; COCO has some ten thousand
MAX_K = 10
REMEDY = "Ask for fewer, allow fewer images for each (minimum), or use more data."


@dataclass(frozen=True)
class TupleNumbers:
    """Numbers of combinations to draw, and of images of train, val and test that a feasible one is in; the paper's.

    Attributes:
        seen: asked for in all splits.
        unseen_train, unseen_test: pairs of another setup; all concepts of the test pairs are in the training pairs.
        feasible, infeasible: further pairs that are not trained on: feasible ones, and such as are in no image at all.
        at_most: take what there is where that is less.
    """

    seen: int = 1000
    unseen_train: int = 100
    unseen_test: int = 500
    feasible: int = 250
    infeasible: int = 250
    minimum: tuple[int, int, int] = (8, 2, 2)
    at_most: bool = False


@dataclass(frozen=True)
class Tuples:
    """Combinations of concept numbers, each (T, k) int64 in ascending order of the numbers of a row.

    Attributes: those of `TupleNumbers`; all but `seen` are empty unless k is 2.
    """

    seen: np.ndarray
    unseen_train: np.ndarray = field(default_factory=lambda: no_tuples(2))
    unseen_test: np.ndarray = field(default_factory=lambda: no_tuples(2))
    feasible: np.ndarray = field(default_factory=lambda: no_tuples(2))
    infeasible: np.ndarray = field(default_factory=lambda: no_tuples(2))


def no_tuples(k: int) -> np.ndarray:
    return np.empty((0, k), dtype=np.int64)


def sample_tuples(
    found: ConceptImages, k: int = 2, seed: int = 0, numbers: TupleNumbers | None = None,
    impossible: set[tuple[int, ...]] | None = None,
) -> Tuples:  # fmt: skip
    """Draw the benchmark's combinations; a pure function of the data, k and the seed.

    Args:
        k: concepts in a combination.
        impossible: pairs that the infeasible ones are drawn from, where the data's makers know them; those that occur
            in an image all the same are left out.

    Raises:
        UserError: there are not so many, with how many there are; k is below 2 or above 10.
    """
    numbers = numbers or TupleNumbers()
    if not 2 <= k <= MAX_K:
        raise UserError(f"Combinations of {k} concepts cannot be drawn.", f"Use 2 to {MAX_K} concepts.")
    feasible = feasible_tuples(found, k, numbers.minimum)
    least = "/".join(map(str, numbers.minimum))
    what = f"{found.source} has {{}} combinations of {k} concepts that at least {least} images of train/val/test have"
    order = feasible[stream_of("tuples", seed, k, "seen").permutation(len(feasible))]
    seen = _take(order, numbers.seen, numbers, what)
    if k != 2:
        return Tuples(seen)
    more = _take(order[len(seen) :], numbers.feasible, numbers, f"{what} beside the {len(seen):,} seen ones")
    shuffled = feasible[stream_of("tuples", seed, k, "unseen").permutation(len(feasible))]
    train = _take(shuffled, numbers.unseen_train, numbers, what)
    others = shuffled[len(train) :]
    known = others[np.isin(others, train).all(axis=1)]
    test = _take(known, numbers.unseen_test, numbers, f"{what}, of concepts of the {len(train):,} training pairs")
    never = infeasible_pairs(found, impossible)
    never = never[stream_of("tuples", seed, k, "infeasible").permutation(len(never))]
    none = _take(never, numbers.infeasible, numbers, f"{found.source} has {{}} pairs of concepts that no image has")
    return Tuples(seen, train, test, more, none)


def _take(rows: np.ndarray, number: int, numbers: TupleNumbers, what: str) -> np.ndarray:
    if len(rows) < number and not numbers.at_most:
        raise UserError(f"{what.format(f'{len(rows):,}')}, but {number:,} are asked for.", REMEDY)
    return rows[:number]


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
            elif len(rows) < MAX_FEASIBLE:
                rows.append(longer)
            else:
                raise UserError(
                    f"{found.source} has more than {MAX_FEASIBLE:,} combinations of {k} concepts.",
                    "Ask for shorter combinations.",
                )

    extend((), np.flatnonzero(member.any(axis=0)))
    return np.array(rows, dtype=np.int64).reshape(-1, k)


def shown(found: ConceptImages) -> np.ndarray:
    """Mask of the concepts with image queries in every split: (C,) bool."""
    result = np.ones(len(found.concepts), dtype=bool)
    for name in SPLITS:
        result &= np.isin(np.arange(len(found.concepts)), found.split(name).crop_pairs[:, 1])
    return result


def infeasible_pairs(found: ConceptImages, among: set[tuple[int, ...]] | None = None) -> np.ndarray:
    """Pairs of concepts that every split has, but no image of any split has both of, (F, 2) int64."""
    together = cooccurring(found.holdings())
    rows = [pair for pair in combinations(np.flatnonzero(shown(found)).tolist(), 2) if not together[pair]]
    if among is not None:
        rows = [pair for pair in rows if pair in among]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def cooccurring(holdings: Holdings) -> np.ndarray:
    """Mask of the pairs of concepts that any image has: (C, C) bool."""
    together = np.zeros((holdings.n_concepts, holdings.n_concepts), dtype=bool)
    for image in range(len(holdings)):
        mine = holdings.of_image(image)
        together[np.ix_(mine, mine)] = True
    return together
