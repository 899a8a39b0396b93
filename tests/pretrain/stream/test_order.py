"""The order of an epoch: a permutation, pure, well mixed, sequential in shards, fair to the corpora of a mixture."""

import numpy as np
import pytest

from pretrain.stream.order import Order, draw, permutation


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
        assert len(everything) - len(used) < batch


def test_order_is_the_same_on_every_machine_and_in_every_release():
    """Runs are resumed with newer code and libraries: these numbers must never change."""
    assert draw(0) == 0x6E789E6AA1B965F4  # the second number that published SplitMix64 code gives for seed 0
    assert permutation(8, 1, 2).tolist() == [0, 1, 5, 2, 7, 6, 3, 4]
    order = Order([5, 4, 6], batch_size=4, lanes=2, window=3, seed=7)
    lanes = [[(0, 0), (0, 2), (0, 1), (0, 3), (0, 4), (2, 0)], [(2, 2), (2, 3), (2, 1), (2, 5), (2, 4), (1, 0)]]
    assert pairs(whole_epoch(order, 2)) == lanes[0] + lanes[1]


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
