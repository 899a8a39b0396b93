"""Combinations of concepts: feasible ones against plain counting, and what is drawn of them."""

from itertools import combinations

import numpy as np
import pytest

from probemb.data.compositions.find import COMBINATIONS, draw_splits, feasible_tuples, sample_tuples
from tests.compositions import made

SPLITS = ("train", "val", "test")


def world(n=400, concepts=12, seed=0):
    """Images with one to seven concepts, the lower numbers more often; the last one never with the first two."""
    random = np.random.RandomState(seed)
    weights = 1 / np.arange(1, concepts + 1)
    held = []
    for _ in range(n):
        mine = set(random.choice(concepts, random.randint(1, 8), replace=False, p=weights / weights.sum()).tolist())
        held.append(mine - {0, 1} if concepts - 1 in mine else mine)
    return held, made(held, concepts, splits=draw_splits([str(i) for i in range(n)], seed))


HELD, FOUND = world()


def count(concepts, split):
    return sum(set(concepts) <= mine and FOUND.splits[i] == split for i, mine in enumerate(HELD))


@pytest.mark.parametrize(("k", "minimum"), [(2, (8, 2, 2)), (3, (3, 1, 1))])
def test_feasible_combinations_are_those_that_counting_finds(k, minimum):
    expected = [
        one for one in combinations(range(12), k) if all(count(one, s) >= least for s, least in zip(SPLITS, minimum))
    ]
    assert expected
    assert feasible_tuples(FOUND, k, minimum).tolist() == [list(one) for one in expected]


def test_drawn_combinations_keep_the_rules_of_the_benchmark(monkeypatch):
    numbers = {"seen": 15, "unseen_train": 8, "unseen_test": 4, "feasible": 3, "infeasible": 2}
    for name, number in numbers.items():
        monkeypatch.setitem(COMBINATIONS, name, (number, "x"))
    drawn = sample_tuples(FOUND, 2, 1)
    sets = {name: [tuple(row) for row in rows.tolist()] for name, rows in drawn.items()}
    assert {name: len(rows) for name, rows in sets.items()} == numbers
    for rows in sets.values():
        assert len(set(rows)) == len(rows)
        assert all(a < b for a, b in rows)
    for name in ("seen", "unseen_train", "unseen_test", "feasible"):
        for one in sets[name]:
            assert [count(one, split) >= least for split, least in zip(SPLITS, (8, 2, 2))] == [True] * 3
    assert not set(sets["seen"]) & set(sets["feasible"])
    assert not set(sets["unseen_train"]) & set(sets["unseen_test"])
    trained = {concept for one in sets["unseen_train"] for concept in one}
    assert all(set(one) <= trained for one in sets["unseen_test"])
    assert not any(set(one) <= mine for one in sets["infeasible"] for mine in HELD)


def test_drawing_is_a_pure_function_of_data_and_seed():
    one, same, other = (sample_tuples(FOUND, 2, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["seen"], other["seen"])
    state = np.random.get_state()[1].copy()
    sample_tuples(FOUND, 3, 0)
    assert np.array_equal(state, np.random.get_state()[1])
