"""The order of an epoch: a permutation, pure, well mixed, sequential in shards, fair to the corpora of a mixture."""

import numpy as np
import pytest

from pretrain.stream.order import Order, default_lanes, draw, permutation
from probemb.errors import UserError


def whole_epoch(order: Order, epoch: int) -> np.ndarray:
    """All used slots, (lanes, lane_length, 3): shard, index, visit."""
    return np.stack([np.stack(order.slots(epoch, lane, 0, order.lane_length), 1) for lane in range(order.lanes)])


def pairs(slots: np.ndarray) -> list[tuple[int, int]]:
    return [tuple(slot) for slot in slots.reshape(-1, 3)[:, :2].tolist()]


@pytest.mark.parametrize(
    ("sizes", "batch", "lanes", "window"),
    [
        ([10, 1, 0, 7, 30], 8, 4, 5),
        ([100], 10, 5, 1000),
        ([3] * 50, 12, 12, 2),
        ([17, 40], 57, 1, 8),
        ([9, 9], 1, 1, 4),
    ],
)
def test_epoch_uses_every_slot_once_but_the_stated_remainder(sizes, batch, lanes, window):
    order = Order(sizes, batch_size=batch, lanes=lanes, window=window, seed=3)
    everything = {(shard, index) for shard, size in enumerate(sizes) for index in range(size)}
    for epoch in range(3):
        used = pairs(whole_epoch(order, epoch))
        assert len(used) == len(set(used)) == order.steps * batch
        assert set(used) <= everything
        assert len(everything) - len(used) == order.dropped < batch


def test_remainder_differs_between_epochs():
    order = Order([16] * 6 + [5], batch_size=16, lanes=4, window=8, seed=0)
    used = [set(pairs(whole_epoch(order, epoch))) for epoch in range(8)]
    assert order.dropped == 5
    assert len({frozenset(one) for one in used}) > 4
    assert len(set.union(*used)) == 101  # nothing is left out for ever


def test_order_is_a_pure_function_of_seed_and_epoch():
    settings = {"batch_size": 8, "lanes": 4, "window": 6}
    order, other = Order([20, 30, 25], seed=1, **settings), Order([20, 30, 25], seed=2, **settings)
    first = whole_epoch(order, 0)
    whole_epoch(order, 5)  # what was asked before does not matter
    np.testing.assert_array_equal(whole_epoch(order, 0), first)
    np.testing.assert_array_equal(whole_epoch(Order([20, 30, 25], seed=1, **settings), 0), first)
    assert pairs(whole_epoch(order, 1)) != pairs(first)
    assert pairs(whole_epoch(other, 0)) != pairs(first)


def test_order_is_the_same_on_every_machine_and_in_every_release():
    """Runs are resumed with newer code and libraries: these numbers must never change."""
    assert draw(0) == 0x6E789E6AA1B965F4  # the second number that published SplitMix64 code gives for seed 0
    assert permutation(8, 1, 2).tolist() == [0, 1, 5, 2, 7, 6, 3, 4]
    order = Order([5, 4, 6], batch_size=4, lanes=2, window=3, seed=7)
    lanes = [[(0, 0), (0, 2), (0, 1), (0, 3), (0, 4), (2, 0)], [(2, 2), (2, 3), (2, 1), (2, 5), (2, 4), (1, 0)]]
    assert pairs(whole_epoch(order, 2)) == lanes[0] + lanes[1]


def test_any_piece_of_a_lane_equals_the_same_piece_of_the_whole():
    order = Order([7, 13, 2, 21], batch_size=6, lanes=3, window=4, seed=0)
    fresh = Order([7, 13, 2, 21], batch_size=6, lanes=3, window=4, seed=0)
    for lane in range(3):
        whole = np.stack(order.slots(1, lane, 0, order.lane_length), 1)
        for start in range(order.lane_length):
            for stop in range(start, order.lane_length + 1):
                np.testing.assert_array_equal(np.stack(fresh.slots(1, lane, start, stop), 1), whole[start:stop])


def test_rows_of_a_batch_come_from_the_lanes_in_order():
    order = Order([40, 50], batch_size=12, lanes=4, window=10, seed=0)
    lanes = whole_epoch(order, 0)
    for step in range(order.steps):
        batch = lanes[:, step * 3 : step * 3 + 3].reshape(12, 3)
        np.testing.assert_array_equal(np.stack(order.rows(0, step, 0, 12), 1), batch)
        for start, stop in (0, 1), (2, 7), (3, 6), (11, 12):
            np.testing.assert_array_equal(np.stack(order.rows(0, step, start, stop), 1), batch[start:stop])


def test_lanes_read_their_shards_one_after_the_other_and_windows_in_sequence():
    order = Order([40, 33, 50, 8, 27], batch_size=8, lanes=2, window=10, seed=4)
    for lane in whole_epoch(order, 3):
        shards = lane[:, 0]
        runs = np.split(lane, np.flatnonzero(np.diff(shards)) + 1)
        assert len(runs) == len(set(shards.tolist()))  # no shard is come back to
        for run in runs:
            low = run[:, 1].min()
            assert sorted(run[:, 1].tolist()) == list(range(low, low + len(run)))  # a contiguous piece of the shard,
            for i in range(0, len(run), 10):  # … ten by ten
                assert sorted(run[i : i + 10, 1].tolist()) == list(range(low + i, low + min(i + 10, len(run))))


def test_order_is_well_mixed():
    shards, size, batch = 64, 200, 64
    order = Order([size] * shards, batch_size=batch, lanes=64, window=200, seed=0)
    distinct, places = [], []
    for epoch in range(4):
        lanes = whole_epoch(order, epoch)
        distinct += [len(set(lanes[:, step, 0].tolist())) for step in range(order.steps)]
        position = np.empty((shards, size))
        position[lanes[..., 0], lanes[..., 1]] = np.arange(order.lane_length)[None]
        places.append(position.reshape(-1))
    assert min(distinct) == 64  # every batch draws from all the shards here
    # Where a sample stands in one epoch says nothing about the next; its correlation has a deviation of 0.009.
    assert np.abs(np.corrcoef(places) - np.eye(4)).max() < 0.05
    mean = np.mean(places)
    assert all(abs(np.mean(place[: shards * size // 2]) - mean) < 3 for place in places)  # one deviation is 0.5


def test_permutations_are_uniform():
    drawn = np.stack([permutation(6, 9, i) for i in range(6000)])
    counts = np.stack([np.bincount(drawn[:, i], minlength=6) for i in range(6)])
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_squared < 53  # 25 degrees of freedom, p = 0.001
    first_two = np.bincount(drawn[:, 0] * 6 + drawn[:, 1], minlength=36).reshape(6, 6)
    assert (np.abs(first_two[~np.eye(6, dtype=bool)] - 200) < 60).all()  # pairs are as good as single places


def test_weights_repeat_and_thin_out_corpora():
    order = Order([10, 10, 6, 9], batch_size=1, lanes=1, window=4, seed=0, corpus=[0, 0, 1, 2], weights=[1, 2.5, 0.5])
    assert order.slots_per_epoch == 20 + 15 + 5  # 4.5 slots are rounded up
    epochs = [whole_epoch(order, epoch).reshape(-1, 3) for epoch in range(18)]
    for slots in epochs:
        counts = np.bincount(slots[:, 0], minlength=4)
        assert counts[0] == counts[1] == 10
        assert counts[2] == 15
        assert counts[3] == 5
        assert len({tuple(slot) for slot in slots.tolist()}) == 40  # repeats are told apart by their visit
    both = np.concatenate(epochs[:2])
    assert set(np.bincount(both[both[:, 0] == 2][:, 1]).tolist()) == {5}  # 2 · 2.5 times each
    all_of_last = np.concatenate(epochs)
    assert set(np.bincount(all_of_last[all_of_last[:, 0] == 3][:, 1]).tolist()) == {10}  # 18 · 5 / 9, none is neglected


def test_weight_zero_leaves_a_corpus_out():
    order = Order([4, 4], batch_size=2, lanes=1, window=4, seed=0, corpus=[0, 1], weights=[1, 0])
    assert set(whole_epoch(order, 0)[..., 0].reshape(-1).tolist()) == {0}


def test_position_is_one_integer():
    order = Order([26], batch_size=8, lanes=2, window=4, seed=0)
    assert [order.locate(seen) for seen in (0, 8, 16, 24, 56)] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 1)]
    with pytest.raises(UserError, match="global batch that the run was started with"):
        order.locate(20)


def test_fifteen_million_samples_cost_little_memory():
    import tracemalloc

    tracemalloc.start()
    order = Order([10_000] * 1500, batch_size=1024, lanes=64, seed=0)
    for step in (0, 7_000, 14_000):
        order.rows(0, step, 0, 1024)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6


@pytest.mark.parametrize(("batch", "lanes"), [(1024, 64), (1000, 50), (7, 7), (127, 1), (96, 48), (1, 1)])
def test_default_lanes(batch, lanes):
    assert default_lanes(batch) == lanes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 8, "lanes": 3}, "Take one of these numbers of lanes: 1, 2, 4, 8"),
        ({"batch_size": 11}, "fewer than one global batch"),
        ({"batch_size": 0}, "must be at least 1"),
        ({"batch_size": 4, "window": 0}, "must be at least 1"),
        ({"batch_size": 4, "weights": [-1.0]}, "at least 0"),
        ({"batch_size": 4, "weights": [float("nan")]}, "at least 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Order([10], **settings)
