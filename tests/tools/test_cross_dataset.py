"""Generalisation across datasets: the plan, means over seeds, and the command on two small worlds."""

import json
import os
import signal
import sys
import threading

import pytest

from probemb.errors import UserError
from tools.cross_dataset import main, read_plan, run_to_the_end, summarise
from tools.make_scenes import Plan, make

DATA = ["--data", "a=one", "--data", "b=two"]


def test_the_plan_trains_every_method_on_every_dataset_with_a_training_split():
    words = [*DATA, "--methods", "vse,jwae-mh", "--seeds", "2", "--train-split", "b=none", "--test-split", "b=all"]
    plan, device = read_plan([*words, "--images", "a=pictures", "--", "--epochs", "3"])
    assert [(run.method, run.dataset, run.seed) for run in plan.runs()] == [
        ("vse", "a", 0), ("vse", "a", 1), ("jwae-mh", "a", 0), ("jwae-mh", "a", 1),
    ]  # fmt: skip
    assert plan.options == ["--epochs", "3"]
    assert (plan.datasets["a"].images, plan.datasets["b"].images) == ("pictures", None)
    assert (plan.datasets["b"].train, plan.datasets["b"].test, device) == (None, "all", "auto")
    assert plan.runs()[0].folder(plan.out).name == "vse-a-0"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (DATA[:2], "There are 1 datasets"),
        ([*DATA, "--data", "a=three"], "names a twice"),
        ([*DATA, "--images", "c=x"], "--images is of c"),
        (["--data", "one", "--data", "b=two"], "--data is 'one'"),
        (["--data", "../x=one", "--data", "b=two"], "--data is '../x=one'"),
        ([*DATA, "--methods", "jwae"], "no method 'jwae'"),
        ([*DATA, "--methods", "clip-zs"], "no method 'clip-zs' to train"),
        ([*DATA, "--seeds", "0"], "nothing to train"),
        ([*DATA, "--train-split", "a=none", "--train-split", "b=none"], "No dataset has a split to train on"),
    ],
)
def test_wrong_plans_are_refused(words, what):
    with pytest.raises(UserError, match=what):
        read_plan(words)


def row(method, trained, measured, seed, r1):
    ways = {way: {f"r@{k}": r1 * k / 10 for k in (1, 5, 10)} for way in ("i2t", "t2i")}
    return {"method": method, "trained": trained, "measured": measured, "seed": seed, "rsum": 600 * r1, **ways}


def test_means_over_seeds_and_what_is_kept():
    rows = [row("vse", "a", "a", 0, 0.6), row("vse", "a", "a", 1, 0.8)]
    rows += [row("vse", "b", "a", 0, 0.2), row("vse", "b", "a", 1, 0.3), row("vse", "a", "b", 0, 0.1)]
    table = {(line["trained"], line["measured"]): line for line in summarise(rows)}
    assert table["a", "a"]["rsum"] == pytest.approx(420)
    assert table["b", "a"]["kept"] == pytest.approx(0.25 / 0.7)
    assert table["b", "a"]["i2t_r5"] == pytest.approx(12.5)
    assert table["b", "a"]["seeds"] == 2
    assert table["a", "b"]["kept"] is None  # nothing was trained on b and measured there


@pytest.mark.slow
def test_the_command_trains_measures_and_keeps(tmp_path, capfd):
    for name, train in (("a", 16), ("b", 8)):
        plan = Plan(train=train, val=8, classes_images=0, size=32, shard_size=16, captions=3)
        make(plan, tmp_path / name, workers=1)
    words = ["--data", f"a={tmp_path / 'a'}", "--data", f"b={tmp_path / 'b'}", "--train-split", "b=none"]
    words += ["--test-split", "a=val", "--test-split", "b=val", "--methods", "jwae-mh", "--out", str(tmp_path / "out")]
    options = ["--device", "cpu", "--", "--model.name", "resnet-words-small", "--no-model.pretrained", "--epochs", "1"]
    options += ["--optimizer.decay-epochs", "0", "--swa-epochs", "0", "--batch-size", "16", "--engine.threads", "1"]
    words += [*options, "--data.workers", "0", "--model.embed-dim", "8", "--no-model.image-weights"]  # no network
    assert main(words) == 0
    found = json.loads((tmp_path / "out" / "cross_dataset.json").read_text())
    assert [(line["trained"], line["measured"]) for line in found["table"]] == [("a", "a"), ("a", "b")]
    assert all(line["rsum"] > 0 for line in found["table"])
    assert "jwae-mh" in (tmp_path / "out" / "report.html").read_text()
    kept = tmp_path / "out" / "jwae-mh-a-0" / "cross_dataset.json"
    before = kept.stat().st_mtime_ns
    capfd.readouterr()
    assert main(words) == 0
    assert "is finished" in capfd.readouterr().out
    assert kept.stat().st_mtime_ns == before
    assert json.loads((tmp_path / "out" / "cross_dataset.json").read_text())["table"] == found["table"]


def test_a_signal_reaches_the_training():
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(85)); print(1, flush=True); "
    before = signal.getsignal(signal.SIGTERM)
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    assert run_to_the_end([sys.executable, "-c", code + "time.sleep(30)"]) == 85
    assert signal.getsignal(signal.SIGTERM) is before
