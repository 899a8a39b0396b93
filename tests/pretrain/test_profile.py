"""The trace of some steps, on request."""

import gzip
import json

import pytest
import torch

from pretrain import profile
from pretrain.config import Config, Data
from pretrain.contradictions import check
from pretrain.profile import StepProfiler
from probemb import UserError
from tests.pretrain.test_run import scenes, start  # noqa: F401

CPU = torch.device("cpu")


def ranges(path):
    """Names and durations of the ranges of steps, in order, and the names of everything else."""
    with gzip.open(path, "rt") as file:
        events = [one for one in json.load(file)["traceEvents"] if one.get("ph") == "X"]
    steps = sorted((one for one in events if one["name"].startswith("step ")), key=lambda one: one["ts"])
    return [one["name"] for one in steps], {one["name"] for one in events}


def test_a_run_leaves_a_trace_of_the_steps_that_were_asked_for(scenes, tmp_path):  # noqa: F811
    done = start({"data.train": scenes / "train", "out": tmp_path / "run"}, "--profile", "2", "3", ranks=2)
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = (tmp_path / "run" / "profile").iterdir()
    assert path.name == "steps-2-3.json.gz"
    assert f"profile {path}" in done.stdout
    steps, others = ranges(path)
    assert steps == ["step 2", "step 3"]
    assert any("scaled_dot_product" in name for name in others)
    assert any("Backward" in name for name in others)


def run_steps(profiler, last):
    for step in range(1, last + 1):
        profiler.begin(step)
        torch.ones(3).add(1)
        profiler.end(step)


def test_a_run_that_stops_leaves_what_there_is(tmp_path):
    profiler = StepProfiler(tmp_path, 2, 5, CPU)
    run_steps(profiler, 3)
    profiler.begin(4)  # and no batch comes
    profiler.close()
    profiler.close()
    assert ranges(tmp_path / "profile" / "steps-2-5.json.gz")[0] == ["step 2", "step 3", "step 4"]


def test_a_trace_that_is_too_large_or_cannot_be_written_costs_only_itself(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(profile, "LARGEST", 1000)
    run_steps(StepProfiler(tmp_path, 1, 2, CPU), 3)
    assert not any((tmp_path / "profile").iterdir())
    (tmp_path / "file").write_text("")
    run_steps(StepProfiler(tmp_path / "file", 1, 2, CPU), 3)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert "profile fewer steps" in told[0]
    assert "Not a directory" in told[1]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"profile": [3]}, r"profile is \[3\]"),
        ({"profile": [5, 4]}, r"profile is \[5, 4\]"),
        ({"profile": [10, 30]}, "are 21 steps"),
        ({"profile": [9, 11], "samples": 10_000, "batch_size": 1000}, "beyond the run's last step, 10"),
        ({"profile": [9, 11], "stop_at_step": 10}, "beyond the run's last step, 10"),
    ],
)
def test_steps_that_cannot_be_traced_are_refused(given, what):
    with pytest.raises(UserError, match=what):
        check(Config(data=Data(train="data"), **given), 1)
