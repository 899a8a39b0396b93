"""A filter in the pretraining command: it is told, kept to, resumed on other ranks, and part of the run."""

import json
from pathlib import Path

from pretrain.stream.filter import Filter
from pretrain.stream.selection import Selection
from probemb.data.shards.index import read_index
from tests.pretrain.test_run import start
from tools.make_scenes import Plan, make
from tools.shards import main


def logged(run: Path, ranks: int) -> dict[int, list[str]]:
    """Keys of every step, all ranks' in their order."""
    steps: dict[int, list[str]] = {}
    for rank in range(ranks):
        for line in (run / "samples" / f"rank-{rank}.jsonl").read_text().splitlines():
            row = json.loads(line)
            steps.setdefault(row["step"], []).extend(row["keys"])
    return steps


def test_a_filtered_run_and_its_resumption(tmp_path):
    make(Plan(train=96, val=0, classes_images=0, size=32, shard_size=24), tmp_path / "world", workers=1)
    data = tmp_path / "world" / "train"
    options = {
        "data.train": data,
        "log-samples": "true",
        "data.filter.min_words": 3,
        "samples": 64,
        "out": tmp_path / "a",
    }
    bare = start(options)
    assert bare.returncode == 2
    assert f"tools.shards measure {data}" in bare.stderr
    assert main(["measure", str(data), "--workers", "1"]) == 0

    selection = Selection([read_index(data)], Filter(min_words=3))
    assert 16 <= selection.kept < 96
    whole = start(options)
    assert whole.returncode == 0, whole.stderr
    assert f"filter: {selection.kept} of 96 samples kept" in whole.stdout
    steps = logged(tmp_path / "a", 1)
    assert sorted(steps) == [1, 2, 3, 4]
    assert sum(map(len, steps.values())) == 64

    (tmp_path / "drop.txt").write_text("\n".join([*steps[1], "unknown"]))
    dropped = start({**options, "data.filter.drop": tmp_path / "drop.txt", "stop-at-step": 1, "out": tmp_path / "c"})
    assert dropped.returncode == 0, dropped.stderr
    assert "drop    drop.txt: 1 of 17 keys are not in the data; samples listed: 16\n" in dropped.stdout
    assert not {*logged(tmp_path / "c", 1)[1]} & {*steps[1]}

    options |= {"out": tmp_path / "b"}
    assert start(options, "--stop-at-step=2").returncode == 0
    other = start({**options, "data.filter.min_words": 4}, "--resume")
    assert other.returncode == 2
    assert "data.filter: min_words 3" in other.stderr
    assert start(options, "--resume", ranks=2).returncode == 0
    assert {step: keys for step, keys in logged(tmp_path / "b", 2).items() if step > 2} == {s: steps[s] for s in (3, 4)}
