"""The trace of some steps, on request."""

import gzip
import json

from tests.pretrain.test_run import start


def ranges(path):
    """Names and durations of the ranges of steps, in order, and the names of everything else."""
    with gzip.open(path, "rt") as file:
        events = [one for one in json.load(file)["traceEvents"] if one.get("ph") == "X"]
    steps = sorted((one for one in events if one["name"].startswith("step ")), key=lambda one: one["ts"])
    return [one["name"] for one in steps], {one["name"] for one in events}


def test_a_run_leaves_a_trace_of_the_steps_that_were_asked_for(scenes, tmp_path):
    done = start({"data.train": scenes / "train", "out": tmp_path / "run"}, "--profile", "2", "3")
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = (tmp_path / "run" / "profile").iterdir()
    assert path.name == "steps-2-3.json.gz"
    assert f"profile {path}" in done.stdout
    steps, others = ranges(path)
    assert steps == ["step 2", "step 3"]
    assert any("scaled_dot_product" in name for name in others)
    assert any("Backward" in name for name in others)
