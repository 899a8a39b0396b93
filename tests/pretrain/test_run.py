"""Pretraining runs as people start them: resumption, evaluations, the best checkpoint, a copy, a trace, bad input."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pretrain.run
from probemb import load_model
from probemb.cli.command import run_command
from probemb.runs.checkpoints import BEST
from probemb.runs.copy import Copy
from tests import forked

OPTIONS = {**forked.OPTIONS, "samples": 96, "log-every": 2, "save-every": 2, "optimizer.warmup_samples": 32}


def start(options: dict, *words: str, ranks: int = 0, code: int = 0) -> subprocess.CompletedProcess:
    """The command to its end, which this exit code must say, in processes forked from this one."""
    done = forked.finish({**OPTIONS, **options}, *words, ranks=ranks)
    assert done.returncode == code, done.stderr
    return done


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def here(monkeypatch, options: dict, *words: str) -> int:
    """The exit code of the command in this process, for what ends before anything starts."""
    argv = ["pretrain.run", *(f"--{k}={v}" for k, v in {**OPTIONS, **options}.items()), *words]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        run_command(pretrain.run.main)
    return ended.value.code


def test_a_run_in_two_processes_and_its_resumption(scenes, tmp_path):
    """Interrupted and resumed equals uninterrupted, bit for bit; what a person and a program read is there."""
    options = {"data.train": scenes / "train", "evaluate.classes": scenes / "classes", "evaluate.every_samples": 48}
    options |= {"evaluate.pairs": scenes / "val", "evaluate.batch_size": 5}
    whole = start({**options, "out": tmp_path / "whole"}, ranks=2)
    start({**options, "out": tmp_path / "half", "stop-at-step": 4}, ranks=2)
    rest = start({**options, "out": tmp_path / "half"}, "--resume", ranks=2)
    assert "resumed at step 4" in rest.stdout

    run = tmp_path / "whole"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-2", "step-4", "step-6"]
    assert any((run / "tensorboard").iterdir())
    assert "step 1/6 | loss " in whole.stdout
    assert "| first step " in whole.stdout
    firsts = [m["step"] for r in ("whole", "half") for m in metrics(tmp_path / r) if m.get("first_step", 0) > 0]
    assert firsts == [1, 1, 5]
    validated, half_validated = ([m for m in metrics(tmp_path / r) if "rsum" in m] for r in ("whole", "half"))
    assert [m["step"] for m in validated] == [3, 6]
    half_validated = [m for m in half_validated if m["step"] != 4]  # where it was stopped
    assert validated == [m | {"time": w["time"]} for m, w in zip(half_validated, validated, strict=True)]
    trained = [m for m in metrics(run) if "loss" in m and "first_step" not in m]
    assert [m["step"] for m in trained] == [2, 4, 6]
    assert trained[-1]["samples"] == 96
    keys = {"clip", "match", "scale", "shift", "u_image", "u_text", "images_per_second", "data_wait", "lr", "eta"}
    assert keys | {"gradient_norm", "clipped", "memory", "tokens_per_second"} <= set(trained[0])
    losses = {m["step"]: m["loss"] for m in metrics(tmp_path / "half") if "loss" in m and "first_step" not in m}
    assert losses == {m["step"]: m["loss"] for m in trained}

    model, resumed = load_model(run).model, load_model(tmp_path / "half").model
    for (name, a), b in zip(model.state_dict().items(), resumed.state_dict().values()):
        assert torch.equal(a, b), name
    assert "is finished: 6 of 6 steps" in start({**options, "out": run}, "--resume").stdout


BAD = {
    "unknown model": ({"model.name": "ViT-B-61"}, "no model 'ViT-B-61'. Did you mean 'ViT-B-", ""),
    "uneven batch": ({"engine.accumulation": 3}, "batch_size 16 cannot be shared evenly", "Set batch_size to 15 or 18"),
    "no data": ({"model.name": "scenes-cnn-gru", "data.train": "nowhere"}, "nowhere does not exist", ""),
    "no classes": ({"evaluate.classes": "nowhere"}, "nowhere does not exist", "--no-evaluate.classes"),
    "endless weight": ({"data.weights": "[.inf]"}, "data.weights", ""),
    "too few samples": ({"samples": 8}, "fewer samples than one batch", "Lower batch_size"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_in_two_lines_with_nothing_written(case, scenes, tmp_path, monkeypatch, capsys):
    options, what, remedy = BAD[case]
    code = here(monkeypatch, {"out": tmp_path / "run", "data.train": scenes / "train", **options})
    refused(code, capsys.readouterr().err, what, remedy)
    assert not (tmp_path / "run").exists()


def refused(code: int, stderr: str, what: str, remedy: str) -> None:
    assert code == 2, stderr
    lines = stderr.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) == 2, stderr
    assert what in lines[0]
    assert remedy in lines[1]


def test_a_run_folder_is_neither_overwritten_nor_resumed_by_another_run(scenes, tmp_path, monkeypatch, capsys):
    out, other = tmp_path / "run", tmp_path / "other"
    options = {"data.train": scenes / "train", "out": out, "samples": 32}
    start(options)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    refused(2, start(options, code=2).stderr, "already holds a run", "--resume")

    def refused_here(options: dict, *words: str, what: str, remedy: str) -> None:
        refused(here(monkeypatch, options, *words), capsys.readouterr().err, what, remedy)

    (out / "checkpoints").rename(tmp_path / "kept")
    refused_here(options, "--resume", what="a run without its checkpoints", remedy="put checkpoints/ back")
    (tmp_path / "kept").rename(out / "checkpoints")

    longer = {**options, "samples": 64}
    refused_here({**longer, "batch-size": 8}, "--resume", what="to: batch_size: 16 -> 8; samples: ", remedy="--out")
    refused_here({**longer, "model.n_unc_layers": 99}, "--resume", what="model.n_unc_layers: ", remedy="config.yaml")
    refused_here({**options, "data.resize": "pil"}, "--resume", what="data.resize: tensor", remedy="config.yaml")
    other.mkdir()
    (other / "thesis.tex").write_text("precious")
    refused_here({**options, "out": other}, what="something else than a run", remedy="--out")
    (other / "config.yaml").write_text("chapter: 1\n")
    refused_here({**options, "out": other}, "--resume", what="something else than a run", remedy="--out")
    assert sorted(p.name for p in other.iterdir()) == ["config.yaml", "thesis.tex"]
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_the_best_checkpoint_stays_and_survives_a_resumption(scenes, tmp_path):
    """Evaluated at steps 1 to 6 with a rate that spoils the weights, saved at each third, and stopped in between."""
    run = tmp_path / "run"
    options = {"data.train": scenes / "train", "evaluate.pairs": f"v={scenes}/val", "evaluate.every_samples": 16}
    options |= {"evaluate.best": "v/rsum", "save-every": 3, "keep-checkpoints": 1, "optimizer.lr": 0.02, "out": run}
    start({**options, "stop-at-step": 3})
    (run / "model-best" / "model.safetensors").write_bytes(b"half")  # as if killed while it was being written
    done = start(options, "--resume")
    values = {line["step"]: line["v/rsum"] for line in metrics(run) if "v/rsum" in line}
    assert sorted(values) == [1, 2, 3, 4, 5, 6]
    best = min(values, key=lambda step: (-values[step], step))
    assert best <= 3  # so that it was restored when the second part began
    so_far = [step for step in values if values[step] > max([-1.0, *(values[s] for s in range(1, step))])]
    assert [line["step"] for line in metrics(run) if line.get("is_best")] == so_far
    assert json.loads((run / "best.json").read_text())["step"] == best == so_far[-1]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-6", f"step-{best}"}
    weights = load_file(run / "checkpoints" / f"step-{best}" / "weights.safetensors")
    for name, value in load_model(run / "model-best").model.state_dict().items():
        assert torch.equal(value, weights.get(f"model.{name}", value)), name
    assert f"best    step {best}, v/rsum {values[best]:.4g}: {run}/checkpoints/step-{best}" in done.stdout


def test_a_finished_run_is_evaluated_on_a_further_set(scenes, tmp_path):
    run = tmp_path / "run"
    options = {"data.train": scenes / "train", "out": run, "samples": 32, "evaluate.pairs": f"a={scenes}/val"}
    start(options)
    options |= {"evaluate.pairs": f'["b={scenes}/val", "a={scenes}/val"]', "evaluate.best": "b/rsum"}
    options |= {"evaluate.every_samples": 16}
    for _ in range(2):
        done = start(options, "--resume")
        assert [len([line for line in metrics(run) if f"{name}/rsum" in line]) for name in "ab"] == [1, 1]
        assert json.loads((run / BEST).read_text())["step"] == 2
        assert (run / "model-best" / "model.safetensors").exists()
    assert "is finished: 2 of 2 steps" in done.stdout


@pytest.mark.slow
def test_a_run_continues_from_its_copy(scenes, tmp_path):
    """Two ranks; the run folder is lost in between."""
    address, run = f"file://{tmp_path}/copy", tmp_path / "run"
    options = {"data.train": scenes / "train", "remote-copy": address, "keep-checkpoints": 1, "out": run}
    half = start({**options, "stop-at-step": 4}, ranks=2)
    assert f"remote copy {address}: step 4 is complete" in half.stdout
    shutil.rmtree(run)
    rest = start(options, "--resume", ranks=2)
    assert rest.stdout.count(f"resume  fetched step 4 from {address}") == 1
    assert "resumed at step 4" in rest.stdout
    assert Copy(address).steps() == [6]
    steps = [line["step"] for line in metrics(run) if "loss" in line and "first_step" not in line]
    assert steps == [2, 4, 6]


def test_a_run_leaves_a_trace_of_the_steps_that_were_asked_for(scenes, tmp_path):
    done = start({"data.train": scenes / "train", "out": tmp_path / "run"}, "--profile", "2", "3")
    assert done.stderr == ""
    (path,) = (tmp_path / "run" / "profile").iterdir()
    assert path.name == "steps-2-3.json.gz"
    assert f"profile {path}" in done.stdout
    with gzip.open(path, "rt") as file:
        names = [one["name"] for one in json.load(file)["traceEvents"] if one.get("ph") == "X"]
    assert sorted(name for name in names if name.startswith("step ")) == ["step 2", "step 3"]
    assert any("Backward" in name for name in names)
