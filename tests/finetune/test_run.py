"""The finetuning command as people type it: a run, its interruption and resumption, launchers, and wrong input."""

import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import finetune.run
from finetune.config import Config, check, with_method_file
from finetune.task import PairTask
from probemb import load_model
from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config
from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from probemb.metrics.retrieval import Positives, mean_metrics, rsum, score_metrics
from probemb.runs.preemption import REQUEUE
from tests.finetune.runs import ONE_EPOCH, Job, checkpoint, metrics, run_here, saved, words

ROOT = Path(__file__).resolve().parents[2]


# ----------------------------------------------------------------------------------------- interruption and resumption


def sending(name: str, number: int, when=lambda *args: True):
    """PairTask's method of this name, which first sends this process a signal, where `when` says so."""
    whole = getattr(PairTask, name)

    def send(*args):
        if when(*args):
            os.kill(os.getpid(), number)
        return whole(*args)

    return send


def assert_same_run(ours: Path, theirs: Path, step: int) -> None:
    """Bit for bit: weights of models, method and average, optimizer, metrics."""
    assert metrics(ours) == metrics(theirs)
    assert checkpoint(ours, step) == checkpoint(theirs, step)
    for name in sorted(path.name for path in theirs.glob("model*")):
        assert all(torch.equal(saved(ours, name)[key], value) for key, value in saved(theirs, name).items())


@pytest.mark.parametrize(
    ("method", "more", "stops"),
    [
        ("infonce", {"swa-epochs": 2, "mix.ratio": 0.5, "log-every": 2}, (2, 6)),
        # Two networks: within an epoch of the first, between the two, within an epoch of the second, at the end.
        ("ncr", {"noise-ratio": 0.5, "loss.warmup_epochs": 0, "swa-epochs": 2}, (2, 3, 11, 12)),
    ],
)
def test_stopped_and_resumed_equals_undisturbed(method, more, stops, scenes, tmp_path, monkeypatch, capsys):
    options = {"method": method, "data.path": scenes, **more}
    last = stops[-1]
    assert run_here({**options, "out": tmp_path / "whole"}) == 0
    # Behind an epoch, by choice.
    out = tmp_path / "epochs"
    assert run_here({**options, "out": out, "stop-after-epochs": 1}) == 0
    assert run_here({**options, "out": out}, "--resume") == 0
    # In the middle of an epoch, and at the last step of all, by a signal.
    stopped = tmp_path / "signals"
    for i, (before, at) in enumerate(pairwise((0, *stops))):
        number, steps = (signal.SIGTERM, signal.SIGUSR1)[i % 2], []
        with monkeypatch.context() as patch:
            in_step = sending("inputs", number, lambda *args: steps.append(args[-1] + 1) or steps[-1] == at)  # noqa: B023
            patch.setattr(PairTask, "inputs", in_step)
            assert run_here({**options, "out": stopped}, "--resume") == REQUEUE == 85
        assert steps == list(range(before + 1, at + 1))
        assert f"stopped by {signal.Signals(number).name}; continue with --resume" in capsys.readouterr().out
    assert run_here({**options, "out": stopped}, "--resume") == 0
    assert f"resumed at step {last}" in capsys.readouterr().out
    for run in (out, stopped):
        assert_same_run(run, tmp_path / "whole", last)
    assert run_here({**options, "out": out}, "--resume") == 0
    assert f"is finished: {last} of {last} steps are done" in capsys.readouterr().out


def test_a_preparation_ends_at_once_by_ctrl_c_and_a_validation_by_any_signal_with_what_is_trained(
    scenes, tmp_path, monkeypatch
):
    options = {"method": "vse", "data.path": scenes, "swa-epochs": 2}
    assert run_here({**options, "out": tmp_path / "whole"}) == 0
    out = tmp_path / "run"

    def interrupted(name, number):
        with monkeypatch.context() as patch:
            patch.setattr(PairTask, name, sending(name, number))
            return run_here({**options, "out": out}, "--resume")

    with pytest.raises(KeyboardInterrupt):
        interrupted("prepare", signal.SIGINT)
    assert not out.exists()
    for number, code in (
        (signal.SIGINT, 130),
        (signal.SIGINT, 130),
        (signal.SIGTERM, REQUEUE),
        (signal.SIGUSR1, REQUEUE),
    ):
        assert interrupted("measure", number) == code
        assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-3"]
    assert run_here({**options, "out": out}, "--resume") == 0
    assert_same_run(out, tmp_path / "whole", 6)


def test_two_processes_stop_together_and_go_on(scenes, tmp_path):
    """A signal to one rank ends both with a checkpoint; resumed on two and on one they train the same pairs."""
    options = {"method": "pcme", "data.path": scenes, "save-every": 0, "out": tmp_path / "run"}

    def signal_rank_1(rank: int) -> None:
        PairTask.inputs = sending("inputs", signal.SIGTERM, lambda *args: (rank, args[-1]) == (1, 1))

    job = Job(options, ranks=2, output=tmp_path / "log", prepare=signal_rank_1)
    assert job.wait() == [REQUEUE, REQUEUE], job.text()
    assert "engine  2 x cpu, fp32, batch 16 = 2 ranks x 8" in job.text()
    assert "stopped by a signal to another rank; continue with --resume" in job.text()
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-2"]
    shutil.copytree(tmp_path / "run", tmp_path / "one")
    on = Job(options, "--resume", ranks=2, output=tmp_path / "on")
    assert on.wait() == [0, 0], on.text()
    whole = Job({**options, "out": tmp_path / "whole"}, ranks=2, output=tmp_path / "whole.log")
    assert whole.wait() == [0, 0], whole.text()
    assert "Warning" not in whole.text()
    assert_same_run(tmp_path / "run", tmp_path / "whole", 6)
    assert run_here({**options, "out": tmp_path / "one"}, "--resume") == 0
    for ours, theirs in zip(metrics(tmp_path / "one"), metrics(tmp_path / "whole")):
        assert ours["step"] == theirs["step"]
        if "loss" in ours:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


def test_a_damaged_checkpoint_is_passed_over_and_a_run_of_other_settings_refused(scenes, tmp_path, capsys):
    out = tmp_path / "run"
    options = {"data.path": scenes, "out": out, "epochs": 3, "swa-epochs": 0, "stop-after-epochs": 2}
    assert run_here(options) == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    for changes, named in (
        ({"method": "pcme", "batch-size": 8}, ("method: pcmepp -> pcme", "loss.samples: None -> 8", "batch_size: 16")),
        ({"noise-ratio": 0.5, "model.n_unc_layers": 99}, ("noise_ratio: 0.0 -> 0.5", "model.n_unc_layers: ")),
        ({"data.train": "val"}, ("data.pairs: ",)),
    ):
        with pytest.raises(UserError) as caught:
            run_here({**options, **changes}, "--resume")
        for word in named:
            assert word in caught.value.what, caught.value
    with pytest.raises(UserError, match="already holds a run"):
        run_here(options)
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}

    moved = tmp_path / "moved"
    shutil.copytree(scenes, moved)
    newest = out / "checkpoints/step-6/optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    del options["stop-after-epochs"]
    capsys.readouterr()
    assert run_here({**options, "data.path": moved, "log-every": 3}, "--resume") == 0
    told = capsys.readouterr().out
    assert "step-6 is damaged" in told
    assert "resumed at step 3" in told


# ---------------------------------------------------------------------------------------------------- what a run leaves


def test_the_best_epochs_model_is_kept_also_after_resuming(scenes, tmp_path, monkeypatch, capsys):
    """Whatever the validation says, in this order."""
    scores = iter([50.0, 90.0, 70.0, 80.0])
    ways = {f"{way}_r{k}": 0.0 for way in ("i2t", "t2i") for k in (1, 5, 10)}
    monkeypatch.setattr(PairTask, "measure", lambda *_: {"rsum": next(scores), **ways})
    options = {"method": "vse", "data.path": scenes, "epochs": 4, "out": tmp_path / "run", "swa-epochs": 0}
    kept = []
    for last in (1, 2, 3, 4):
        assert run_here({**options, "stop-after-epochs": last}, "--resume") == 0
        kept.append(saved(tmp_path / "run"))
    same = [all(torch.equal(a[key], b[key]) for key in a) for a, b in pairwise(kept)]
    assert same == [False, True, True]
    assert [m["is_best"] for m in metrics(tmp_path / "run") if "rsum" in m] == [True, True, False, False]
    assert "is of epoch 2, validation RSUM 90.0" in capsys.readouterr().out.splitlines()[-1]


def test_two_networks_are_selected_averaged_and_saved_together(scenes, tmp_path, capsys):
    """Validation reports the RSUM of the mean of both similarities; the epoch it chooses is saved for both."""
    out = tmp_path / "run"
    options = {"method": "ncr", "data.path": scenes, "noise-ratio": 0.5, "epochs": 3, "swa-epochs": 2, "out": out}
    assert run_here(options) == 0
    told = capsys.readouterr().out
    assert "ViT-Micro-32, 2 networks of together " in told
    assert "3 steps an epoch of each network" in told
    assert "step  4/18 | network 2 | epoch 0.67 | loss" in told
    assert "and so is model-second" in told.splitlines()[-1]
    validated, data = [m for m in metrics(out) if "rsum" in m], find_captions(scenes, "val")
    for name, told_rsum in (("model", max(m["rsum"] for m in validated)), ("model-swa", metrics(out)[-1]["swa_rsum"])):
        similarities = [similarity(load_model(out / folder), data) for folder in (name, f"{name}-second")]
        assert told_rsum == pytest.approx(rsum_of(sum(similarities) / 2, data))
    ends = [load_file(out / f"checkpoints/step-{step}/weights.safetensors") for step in (12, 18)]
    for name, prefix in (("model-swa", "model"), ("model-swa-second", "second")):
        for key, value in saved(out, name).items():
            torch.testing.assert_close(value, (ends[0][f"{prefix}.{key}"] + ends[1][f"{prefix}.{key}"]) / 2, msg=key)


def similarity(loaded, data) -> torch.Tensor:
    """Cosines of all images and captions."""
    with torch.no_grad():
        pixels = torch.stack([loaded.transforms.evaluate(data.images.open(i)) for i in range(len(data.images))])
        return loaded.model.encode_image(pixels).mean @ loaded.model.encode_text(loaded.tokenizer(data.flat())).mean.T


def rsum_of(scores: torch.Tensor, data) -> float:
    match = torch.tensor(data.owner()) == torch.arange(len(scores))[:, None]
    ways = ((scores, match), (scores.T, match.T))
    return rsum(*(mean_metrics(score_metrics(s.__getitem__, Positives.from_matrix(m))) for s, m in ways))


def test_what_a_run_folder_holds_and_what_its_lines_say(scenes, shards, tmp_path, capsys):
    out = tmp_path / "run"
    options = {"data.path": scenes, "out": out, "data.workers": 1, "optimizer.scalars": 30}
    options["evaluate.classes"] = shards
    assert run_here(options) == 0
    names = {p.name for p in out.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "model", "model-swa"}
    again = parse_config(Config, "", "", with_method_file(["--config", str(out / "config.yaml")]))
    check(again)
    told = capsys.readouterr().out
    for word in (
        "engine  1 x cpu, fp32, batch 16 = 1 rank x 16",
        "step 1/6 | epoch 0.33 | loss",
        "step 3/6 | validation RSUM",
        "step 3/6 | zero-shot top-1",
        "| best so far",
        "model-swa: mean of 1 epoch, validation RSUM",
    ):
        assert word in told, told
    assert max(map(len, told.splitlines())) < 220
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert {"loss", "epoch", "data_wait", "pairs_per_second", "eta", "gradient_norm", "lr"} <= set(first)
    assert 0 < first["lr"] <= again.optimizer.lr  # of the heads, not of a and b


# ---------------------------------------------------------------------------------------------------------- wrong input


SCAN = {"method": "scan", "model.name": "scan-scenes-gru", "model.embed_dim": 8, "batch-size": 12}
WRONG = {  # options, on scenes or regions; what is said, and the remedy
    "no such split": ({"data.train": "trian"}, "no split 'trian', only train and val. Did you mean 'train'", ""),
    "large batch": ({"batch-size": 64}, "48 pairs", "from 1 to 48"),
    "pixels for regions": ({"method": "vsrn", "size-augment": 0, "model.head": "clip", "model.embed_dim": "null"},
                           "vsrn reasons over an image's regions, and ViT-Micro-32 reads none", "vsrn-regions"),
    "another shape": ({**SCAN, "model.name": "scan-regions-gru"}, "36 regions of 2048 numbers", ""),
    "cutout of regions": ({**SCAN, "augment.cutout": 0.2}, "augment.cutout is 0.2", "Set"),
    "cache of regions": ({**SCAN, "model.lock_image": "true", "data.cache_features": "x", "optimizer.freeze-epochs": 0},
                         "need no cache", "data.cache_features"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_ends_in_two_lines_with_nothing_written(case, scenes, regions, tmp_path, monkeypatch, capsys):
    options, what, remedy = WRONG[case]
    data = regions if options.get("method") == "scan" else scenes
    argv = words({"data.path": data, "out": tmp_path / "run", **options})
    monkeypatch.setattr(sys, "argv", ["finetune/run.py", *argv])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_command(finetune.run.main)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2, lines
    assert lines[0].startswith("error: ")
    assert what in lines[0]
    assert remedy in lines[1]
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ launchers


def test_accelerates_sharded_engines_are_refused_and_its_choice_of_the_cpu_is_kept(scenes, tmp_path, monkeypatch):
    for name, value in {"USE_FSDP": "true", "USE_CPU": "True"}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="accelerate is configured for FSDP"):
        run_here({"data.path": scenes, "out": tmp_path / "run"})
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_accelerate_as_documented_is_one_process_and_warns_of_nothing(scenes, tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home")}  # of its configuration
    launch = [sys.executable, "-m", "accelerate.commands.launch", "-q", "--config_file", "finetune/accelerate.yaml"]
    argv = words({"data.path": scenes, "out": tmp_path / "run", **ONE_EPOCH, "batch-size": 24})
    command = [*launch, "finetune/run.py", *argv]
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert "engine  1 x cpu, fp32, batch 24 = 1 rank x 24" in done.stdout
    assert load_model(tmp_path / "run").model.embed_dim == 16
