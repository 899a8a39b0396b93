"""The combinations of concepts that the benchmark asks for (MPC, supplementary A, algorithm A).

A combination is feasible if enough images of every split have all of its concepts, and every split has something to cut
image queries of each from. The published algorithm draws k concepts until it has found enough feasible combinations;
here all of them are found first, and drawn from: the same distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np

from probemb.data.compositions.concepts import SPLITS, ConceptImages
from probemb.data.randomness import stream_of
from probemb.errors import UserError

NUMBERS = {  # of combinations
    "seen": 1000,  # asked for in all splits
    "unseen_train": 100,  # pairs of another setup
    "unseen_test": 500,  # pairs of that setup, of concepts of its training pairs
    "feasible": 250,  # further pairs that are not trained on
    "infeasible": 250,  # pairs that are in no image at all
}
MINIMUM = (8, 2, 2)  # images of train, val and test that a feasible combination is in
MAX_FEASIBLE = 5_000_000  # combinations; COCO has some ten thousand
MAX_K = 10


def no_tuples(k: int = 2) -> np.ndarray:
    return np.empty((0, k), dtype=np.int64)


def sample_tuples(
    found: ConceptImages, k: int = 2, seed: int = 0, numbers: Mapping[str, int] = NUMBERS,
    impossible: set[tuple[int, ...]] | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Draw the benchmark's combinations; a pure function of the data, k and the seed.

    Args:
        numbers: of each kind, fewer where there are no more.
        impossible: pairs that the infeasible ones are drawn from, where the data's makers know them; those that occur
            in an image all the same are left out.

    Returns:
        Combinations of concept numbers, (T, k) int64 in ascending order of the numbers of a row; all but the seen ones
        are empty unless k is 2.

    Raises UserError: a split is missing, or there are more than 5,000,000.
    """

    def shuffled(rows: np.ndarray, name: str) -> np.ndarray:
        return rows[stream_of("tuples", seed, k, name).permutation(len(rows))]

    feasible = feasible_tuples(found, k, MINIMUM)
    seen = shuffled(feasible, "seen")
    drawn = dict.fromkeys(NUMBERS, no_tuples()) | {"seen": seen[: numbers["seen"]]}
    if k != 2:
        return drawn
    unseen, first = shuffled(feasible, "unseen"), numbers["unseen_train"]
    drawn |= {"feasible": seen[numbers["seen"] :], "unseen_train": unseen[:first], "unseen_test": unseen[first:]}
    known = np.isin(drawn["unseen_test"], drawn["unseen_train"]).all(axis=1)
    drawn["unseen_test"] = drawn["unseen_test"][known]
    held = found.holdings().dense().astype(np.float32)
    together = held.T @ held > 0
    rows = [pair for pair in combinations(np.flatnonzero(shown(found)).tolist(), 2) if not together[pair]]
    rows = [pair for pair in rows if impossible is None or pair in impossible]
    drawn["infeasible"] = shuffled(np.array(rows, dtype=np.int64).reshape(-1, 2), "infeasible")
    return {name: rows[: numbers[name]] for name, rows in drawn.items()}


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
