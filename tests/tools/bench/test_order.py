"""A rank of a large run: its start is quick and small, and it resumes at the right places."""

import numpy as np

from pretrain.stream.order import Order
from probemb.data.shards.index import read_index
from tools.bench.order import in_a_process, start_rank, write_corpus


def test_a_rank_of_1024_starts_and_resumes_in_a_tenth_of_2_billion_samples(tmp_path):
    write_corpus(tmp_path, 200_000_000, 20_000, columns=False)
    found = in_a_process(start_rank, str(tmp_path), 1024, 32_768, 3, False)
    assert found["cpu"] < 2.5  # a tenth of the corpus; the whole takes 2.3 to 2.9 s
    assert found["peak_mib"] < 40
    order = Order([shard.samples for shard in read_index(tmp_path)], batch_size=32_768, lanes=1024)
    assert found["kept"] == 200_000_000
    epoch, step = order.locate((3 * order.steps + order.steps // 2) * 32_768)
    assert epoch == 3
    np.testing.assert_array_equal(np.stack(order.rows(epoch, step, 0, 32_768))[:, -32:], found["slots"])


def test_filtered(tmp_path):
    """The numbers of the columns repeat every 2^20 samples, so the kept share is known."""
    write_corpus(tmp_path, 3 << 20, 300, columns=True)
    found = in_a_process(start_rank, str(tmp_path), 16, 512, 0, True)
    columns = {name: np.load(tmp_path / "columns" / f"{name}.npy") for name in ("width", "height", "fewest_words")}
    kept = np.minimum(columns["width"], columns["height"]) >= 100
    kept &= columns["fewest_words"] >= 100
    assert found["kept"] == kept.sum()
    assert 0.7 < kept.mean() < 0.95
    starts = np.cumsum([0, *(shard.samples for shard in read_index(tmp_path))])
    shard, index, _ = np.array(found["slots"])
    assert kept[starts[shard] + index].all()
    assert found["peak_mib"] < 60
    again = in_a_process(start_rank, str(tmp_path), 16, 512, 0, True)
    assert [again[key] for key in ("kept", "slots", "identity")] == [
        found[key] for key in ("kept", "slots", "identity")
    ]
    assert len(list((tmp_path / "columns").glob("*.counts"))) == 1
