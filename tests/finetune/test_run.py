"""The finetuning command as people type it: a run, its resumption, launchers, and everything that can be wrong."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import finetune.run
from finetune.config import Config, check, with_method_file
from finetune.loading.noise import NOISE_FILE
from finetune.methods import METHODS
from finetune.pair_feed import PairFeed
from finetune.selection import Validator
from probemb import load_model
from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config, to_yaml
from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from probemb.evaluation.tolerance import GRID
from probemb.metrics import retrieval_metrics, rsum
from probemb.models import create_model, save_model
from probemb.models.architectures import build_stock
from probemb.runs.preemption import REQUEUE
from tests.finetune.runs import ONE_EPOCH, OPTIONS, Job, checkpoint, metrics, run_here, saved, words

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def starting(request, scenes, tmp_path_factory):
    """accelerate as the documentation has it, torchrun with two, and accelerate that is asked for two and starts one.

    They begin with the first test of this file, and end beside the others.
    """
    started = {}
    if any("launched" in getattr(item, "fixturenames", ()) for item in request.session.items):
        folder = tmp_path_factory.mktemp("launched")
        accelerate = [sys.executable, "-m", "accelerate.commands.launch"]  # it looks for a configuration in HF_HOME
        commands = {
            "documented": [*accelerate, "-q", "--config_file", "finetune/accelerate.yaml"],
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            "alone": [*accelerate, "-q", "--num_processes=2", "--cpu"],
        }
        env = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home")}
        for name, command in commands.items():
            argv = words({"data.path": scenes, "out": folder / name, **ONE_EPOCH, "batch-size": 24})
            process = subprocess.Popen(
                [*command, "finetune/run.py", *argv], cwd=ROOT, env=env, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            started[name] = process, folder / name
    yield started
    for process, _ in started.values():
        process.kill()


@pytest.fixture(scope="module")
def launched(starting):
    """By name: exit code, stdout, stderr, run folder."""
    ended = {}
    for name, (process, run) in starting.items():
        out, err = process.communicate(timeout=300)
        ended[name] = (process.returncode, out, err, run)
    return ended


def resolved(*argv: str) -> Config:
    return parse_config(Config, "finetune/run.py", "", with_method_file(list(argv)))


# ------------------------------------------------------------------------------------------------------- configuration


def test_the_methods_file_then_config_files_then_options_decide(tmp_path):
    assert resolved().method == "pcmepp"
    assert resolved("--method", "vse").loss.margin == 0.2
    mine = tmp_path / "mine.yaml"
    mine.write_text("method: ncr\nepochs: 7\nloss: {margin: 0.3}\n")
    config = resolved("--config", str(mine))
    assert (config.method, config.epochs, config.loss.margin, config.loss.warmup_epochs) == ("ncr", 7, 0.3, 1)
    config = resolved("--loss.margin=0.4", "--method=vse", f"--config={mine}")  # options win wherever they stand
    assert (config.method, config.epochs, config.loss) == ("vse", 7, METHODS["vse"].Options(margin=0.4))
    assert resolved("--epochs", "3", "--config", str(mine)).epochs == 3


@pytest.mark.parametrize("method", ["pcmepp", "clip-zs"])
def test_a_written_configuration_reads_back(method, tmp_path):
    config = resolved("--method", method, "--out", str(tmp_path / "run"))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert resolved("--config", str(tmp_path / "config.yaml")) == config


def test_help_names_the_methods_own_options_without_loading_torch():
    code = "import sys; sys.argv = ['x', '--help-all', '--method', 'ncr']; import finetune.run as r\n"
    code += "try: r.main()\nexcept SystemExit: assert not {'torch', 'accelerate'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--save_every" in done.stdout
    assert "--loss.soft_margin {linear,exponential,sin}" in done.stdout
    assert "--loss.vib" not in done.stdout


# ---------------------------------------------------------------------------------------------------------------- runs


class Interruption:
    """Sends this process a signal in the middle of a step, and counts the steps that are trained."""

    def __init__(self, monkeypatch, at: int, number: int = signal.SIGTERM):
        inputs, self.steps = PairFeed.inputs, []

        def interrupted(feed, pairs, model, step):
            self.steps.append(step + 1)
            if step + 1 == at:
                os.kill(os.getpid(), number)
            return inputs(feed, pairs, model, step)

        monkeypatch.setattr(PairFeed, "inputs", interrupted)


@pytest.mark.parametrize(
    ("method", "more", "stops"),
    [
        ("infonce", {"swa-epochs": 2, "mix.ratio": 0.5, "log-every": 2}, (2, 6)),
        # Two networks: within an epoch of the first, between the two, within an epoch of the second, at the end.
        ("ncr", {"noise-ratio": 0.5, "loss.warmup_epochs": 0, "swa-epochs": 2}, (2, 3, 11, 12)),
        ("pvse", {"loss.embeddings": 3, "model.lock_image": "false"}, (2, 6)),
        # Between two log lines, after a step whose loss and only term are the same number.
        ("vse", {"log-every": 2, "loss.warmup_epochs": 0}, (1, 6)),
    ],
)
def test_stopped_and_resumed_equals_undisturbed(method, more, stops, scenes, tmp_path, monkeypatch, capsys):
    """Bit for bit: weights of models, method and average, optimizer, metrics; behind an epoch and within one."""
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
        number = (signal.SIGTERM, signal.SIGUSR1)[i % 2]
        with monkeypatch.context() as patch:
            interruption = Interruption(patch, at, number)
            assert run_here({**options, "out": stopped}, "--resume") == REQUEUE == 85
            assert interruption.steps == list(range(before + 1, at + 1))
        told = capsys.readouterr().out
        assert f"stopped by {signal.Signals(number).name}; continue with --resume" in told
    assert run_here({**options, "out": stopped}, "--resume") == 0
    assert f"resumed at step {last}" in capsys.readouterr().out

    for run in (out, stopped):
        assert metrics(run) == metrics(tmp_path / "whole")
        for step in (last // 2, last) if run == out else (last,):
            assert checkpoint(run, step) == checkpoint(tmp_path / "whole", step)
        for name in sorted(path.name for path in (tmp_path / "whole").glob("model*")):
            ours, theirs = saved(run, name), saved(tmp_path / "whole", name)
            assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    state = json.loads((out / f"checkpoints/step-{last}/state.json").read_text())
    assert len(state["adam_steps"]) > 50
    assert run_here({**options, "out": out}, "--resume") == 0
    assert f"is finished: {last} of {last} steps are done" in capsys.readouterr().out


def test_checkpoints_within_an_epoch_and_what_a_kill_loses(scenes, tmp_path, capsys):
    """Killed in its third step of four, with a checkpoint every two: it goes on behind the second."""
    options = {"data.path": scenes, "batch-size": 12, "save-every": 2, "log-every": 3, **ONE_EPOCH}
    job = Job({**options, "out": tmp_path / "run"}, ranks=1, output=tmp_path / "log", prepare=_die_at(4))
    assert job.wait() == [-signal.SIGKILL], job.text()
    (before,) = (tmp_path / "run/checkpoints").iterdir()
    assert before.name == "step-2"
    assert run_here({**options, "out": tmp_path / "run"}, "--resume") == 0
    assert "resumed at step 2" in capsys.readouterr().out
    assert run_here({**options, "out": tmp_path / "whole"}) == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert checkpoint(tmp_path / "run", 4) == checkpoint(tmp_path / "whole", 4)
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step-2", "step-4"]


def test_models_of_an_epoch_that_a_killed_run_does_not_know_go(scenes, tmp_path, capsys):
    """They wait in .next for the checkpoint of their step."""
    run, options = tmp_path / "run", {"data.path": scenes, **ONE_EPOCH}
    assert run_here({**options, "out": run}) == 0
    assert not (run / ".next").exists()
    weights, step = (run / "model" / "model.safetensors").read_bytes(), max(line["step"] for line in metrics(run))
    for of, taken in ((step + 1, False), (step, True)):
        (run / ".next" / "model").mkdir(parents=True)
        (run / ".next" / "model" / "model.safetensors").write_bytes(b"later")
        (run / ".next" / "step").write_text(f"{of}\n")
        assert run_here({**options, "out": run}, "--resume") == 0
        assert "is finished" in capsys.readouterr().out
        assert (run / "model" / "model.safetensors").read_bytes() == (b"later" if taken else weights)
        assert not (run / ".next").exists()


def test_what_the_launcher_says_of_accumulation_changes_no_step(scenes, tmp_path, monkeypatch):
    """`accelerate launch --gradient_accumulation_steps 3` sets the variable; it would leave out two steps of three."""
    options = {"data.path": scenes, **ONE_EPOCH}
    assert run_here({**options, "out": tmp_path / "plain"}) == 0
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    assert run_here({**options, "out": tmp_path / "told"}) == 0
    ours, theirs = (saved(tmp_path / name) for name in ("told", "plain"))
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


def _die_at(step: int):
    """Killed when the checkpoint before is written."""

    def prepare(rank: int) -> None:
        inputs = PairFeed.inputs

        def dying(feed, pairs, model, done):
            if done + 1 == step:
                while any(thread.name == "checkpoint-writer" for thread in threading.enumerate()):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return inputs(feed, pairs, model, done)

        PairFeed.inputs = dying

    return prepare


def test_two_processes_stop_together_and_go_on(scenes, tmp_path):
    """A signal to one rank ends both with a checkpoint; resumed on two and on one they train the same pairs."""
    options = {"method": "pcme", "data.path": scenes, "save-every": 0, "out": tmp_path / "run"}
    job = Job(options, ranks=2, output=tmp_path / "log", prepare=_signal_at(2, rank_of_signal=1))
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
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert checkpoint(tmp_path / "run", 6) == checkpoint(tmp_path / "whole", 6)
    assert run_here({**options, "out": tmp_path / "one"}, "--resume") == 0
    for ours, theirs in zip(metrics(tmp_path / "one"), metrics(tmp_path / "whole")):
        assert ours["step"] == theirs["step"]
        if "loss" in ours:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


@pytest.mark.slow
def test_a_signal_while_validating_spares_the_workers_and_stops_behind(scenes, tmp_path):
    """Schedulers signal the whole process group, workers included."""
    options = {"method": "vse", "data.path": scenes, "data.workers": 1, "out": tmp_path / "run"}
    job = Job(options, ranks=1, output=tmp_path / "log", prepare=_read_slowly)
    job.until("reading 4")
    job.signal(signal.SIGTERM)
    assert job.wait() == [REQUEUE], job.text()
    assert "step 3/6 | validation RSUM" in job.text()
    assert "step 4/6 | stopped by SIGTERM" in job.text()


def _read_slowly(rank: int) -> None:
    from probemb.data.image_loader import _Decoded

    getitem = _Decoded.__getitem__

    def slowly(data, index: int):
        if index == 4:
            print("reading 4", flush=True)
            time.sleep(1)
        return getitem(data, index)

    _Decoded.__getitem__ = slowly


def _signal_at(step: int, rank_of_signal: int):
    def prepare(rank: int) -> None:
        inputs = PairFeed.inputs

        def interrupted(feed, pairs, model, done):
            if rank == rank_of_signal and done + 1 == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return inputs(feed, pairs, model, done)

        PairFeed.inputs = interrupted

    return prepare


def test_the_best_epochs_model_is_kept_also_after_resuming(scenes, tmp_path, monkeypatch, capsys):
    """Whatever the validation says, in this order."""
    scores = iter([50.0, 90.0, 70.0, 80.0])
    ways = {f"{way}_r{k}": 0.0 for way in ("i2t", "t2i") for k in (1, 5, 10)}
    monkeypatch.setattr(Validator, "measure", lambda *_: {"rsum": next(scores), **ways})
    options = {"method": "vse", "data.path": scenes, "epochs": 4, "out": tmp_path / "run", "swa-epochs": 0}
    kept = []
    for last in (1, 2, 3, 4):
        assert run_here({**options, "stop-after-epochs": last}, "--resume") == 0
        kept.append(saved(tmp_path / "run"))
    same = [all(torch.equal(a[key], b[key]) for key in a) for a, b in pairwise(kept)]
    assert same == [False, True, True]
    assert [m["is_best"] for m in metrics(tmp_path / "run") if "rsum" in m] == [True, True, False, False]
    assert "is of epoch 2, validation RSUM 90.0" in capsys.readouterr().out.splitlines()[-1]
    last = load_safetensors(tmp_path / "run/checkpoints/step-12/weights.safetensors")
    assert any(not torch.equal(last[f"model.{key}"], value) for key, value in kept[-1].items())


def load_safetensors(path: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(path)


def test_averaged_weights_are_the_mean_of_the_last_epochs_checkpoints(scenes, tmp_path, monkeypatch):
    measured = []
    measure = Validator.measure

    def spy(validator, model):
        measured.append({key: value.clone() for key, value in model.state_dict().items()})
        return measure(validator, model)

    monkeypatch.setattr(Validator, "measure", spy)
    options = {"data.path": scenes, "epochs": 3, "swa-epochs": 2, "out": tmp_path / "run"}
    assert run_here(options) == 0
    ends = [load_safetensors(tmp_path / f"run/checkpoints/step-{step}/weights.safetensors") for step in (6, 9)]
    averaged, moved = saved(tmp_path / "run", "model-swa"), set()
    for key, value in averaged.items():
        torch.testing.assert_close(value, (ends[0][f"model.{key}"] + ends[1][f"model.{key}"]) / 2, msg=key)
        if not torch.equal(value, ends[1][f"model.{key}"]):
            moved.add(key.split(".")[0])
    assert {"visual", "text", "scale"} <= moved
    assert len(measured) == 4
    assert all(torch.equal(measured[-1][key], value) for key, value in averaged.items())  # evaluated with those
    assert "swa_rsum" in metrics(tmp_path / "run")[-1]


def test_two_networks_are_selected_averaged_and_saved_together(scenes, tmp_path, capsys):
    """What validation says is the RSUM of the mean of both similarities; the epoch that it chose is saved of both."""
    out, n = tmp_path / "run", 2
    options = {"method": "ncr", "data.path": scenes, "noise-ratio": 0.5, "epochs": 3, "swa-epochs": n, "out": out}
    assert run_here(options) == 0
    told = capsys.readouterr().out
    assert "ViT-Micro-32, 2 networks of together " in told
    assert "3 steps an epoch of each network" in told
    assert "step  4/18 | network 2 | epoch 0.67 | loss" in told
    assert "and so is model-second" in told.splitlines()[-1]

    validated = [m for m in metrics(out) if "rsum" in m]
    data = find_captions(scenes, "val")
    for name, told_rsum in (("model", max(m["rsum"] for m in validated)), ("model-swa", metrics(out)[-1]["swa_rsum"])):
        similarities = [similarity(load_model(out / folder), data) for folder in (name, f"{name}-second")]
        assert told_rsum == pytest.approx(rsum_of(sum(similarities) / 2, data))
        assert told_rsum != pytest.approx(rsum_of(similarities[0], data))

    ends = [load_safetensors(out / f"checkpoints/step-{step}/weights.safetensors") for step in (12, 18)]
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
    return rsum(retrieval_metrics(scores, match), retrieval_metrics(scores.T, match.T))


def test_room_on_the_disk_is_asked_for_both_networks(scenes, tmp_path, monkeypatch):
    model = create_model("ViT-Micro-32", head="gpo", embed_dim=16, probabilistic=False)
    one = sum(p.numel() for p in model.parameters())
    checkpoint_and_models = 20 * one  # the next model waits for its checkpoint
    monkeypatch.setattr("probemb.runs.folder.free_bytes", lambda _: checkpoint_and_models + 1000)
    options = {"data.path": scenes, **ONE_EPOCH}
    assert run_here({**options, "method": "vse", "out": tmp_path / "one"}) == 0
    with pytest.raises(UserError, match=f"{2 * one:,} parameters"):
        run_here({**options, "method": "ncr", "out": tmp_path / "two"})
    assert not (tmp_path / "two").exists()


def test_noisy_correspondence_is_kept_with_the_run(scenes, tmp_path, monkeypatch):
    """Training sees moved captions, validation clean ones; a run goes on with the file that it began with."""
    seen = {}
    loader, measure = finetune.loading.pair_loader.PairLoader, Validator.measure

    def spy_loader(captioned, *others, **options):
        seen["train"] = captioned
        return loader(captioned, *others, **options)

    def spy_measure(validator, model):
        seen["val"] = validator.captions
        return measure(validator, model)

    monkeypatch.setattr(finetune.loading.pair_loader, "PairLoader", spy_loader)
    monkeypatch.setattr(Validator, "measure", spy_measure)
    options = {"method": "vse", "data.path": scenes, "noise-ratio": 0.5, "out": tmp_path / "run", "swa-epochs": 0}
    assert run_here({**options, "stop-after-epochs": 1}) == 0
    clean = {split: find_captions(scenes, split) for split in ("train", "val")}
    image_of = np.load(tmp_path / "run" / NOISE_FILE)
    moved = (image_of != np.array(clean["train"].owner())).mean()
    assert 0.3 < moved <= 0.5
    first = seen["train"].captions
    assert first != clean["train"].captions
    assert sorted(seen["train"].flat()) == sorted(clean["train"].flat())
    assert seen["val"].captions == clean["val"].captions
    assert run_here(options, "--resume") == 0
    assert seen["train"].captions == first
    assert np.array_equal(np.load(tmp_path / "run" / NOISE_FILE), image_of)
    other = np.random.RandomState(5).permutation(image_of)
    np.save(tmp_path / "run" / NOISE_FILE, other)
    with pytest.raises(UserError, match=r"noise\.npy|the training pairs"):
        run_here({**options, "epochs": 2}, "--resume")


def test_a_damaged_checkpoint_is_passed_over_and_a_run_of_other_settings_refused(scenes, tmp_path, capsys):
    out = tmp_path / "run"
    options = {"data.path": scenes, "out": out, "epochs": 3, "swa-epochs": 0, "stop-after-epochs": 2}
    assert run_here(options) == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}

    def refused(changes: dict, *named: str) -> None:
        with pytest.raises(UserError) as caught:
            run_here({**options, **changes}, "--resume")
        for word in named:
            assert word in caught.value.what, caught.value
        assert "config.yaml" in caught.value.remedy

    refused(
        {"model.head": "clip", "model.embed_dim": 24, "size-augment": 0, "optimizer.lr": 1e-3},
        "model.head: gpo -> clip", "model.embed_dim: 16 -> 24", "optimizer.lr: 0.0005 -> 0.001",
    )  # fmt: skip
    refused({"method": "pcme", "batch-size": 8}, "method: pcmepp -> pcme", "loss.samples: None -> 8", "batch_size: 16")
    refused({"noise-ratio": 0.5}, "noise_ratio: 0.0 -> 0.5", "the training pairs")
    refused({"data.train": "val", "data.validation": "train"}, "data.validation: val -> train", "the training pairs")
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
    assert "It is skipped" in told
    assert "resumed at step 3" in told
    assert run_here({**options, "out": tmp_path / "whole"}) == 0
    assert checkpoint(out, 9)["weights.safetensors"] == checkpoint(tmp_path / "whole", 9)["weights.safetensors"]


def test_two_processes_in_bfloat16_with_mixed_images(scenes, tmp_path):
    """The module is wrapped again, autocast and all, when the backbone thaws."""
    options = {"data.path": scenes, "engine.precision": "bf16", "mix.ratio": 0.5, "out": tmp_path / "run"}
    job = Job(options, ranks=2, output=tmp_path / "log")
    assert job.wait() == [0, 0], job.text()
    assert "engine  2 x cpu, bf16, batch 16 = 2 ranks x 8" in job.text()
    assert len([m for m in metrics(tmp_path / "run") if "loss" in m]) == 6


@pytest.mark.slow
def test_training_in_bfloat16_and_with_recomputed_blocks(scenes, tmp_path, capsys):
    options = {"data.path": scenes, "engine.precision": "bf16", "engine.grad_checkpointing": "true", **ONE_EPOCH}
    assert run_here({**options, "out": tmp_path / "half"}) == 0
    assert ", bf16, " in capsys.readouterr().out
    assert run_here({"data.path": scenes, "out": tmp_path / "full", **ONE_EPOCH}) == 0
    half, full = metrics(tmp_path / "half"), metrics(tmp_path / "full")
    assert half != full
    for a, b in zip(half, full):
        if "loss" in a:
            assert a["loss"] == pytest.approx(b["loss"], rel=0.1)
    assert all(value.dtype == torch.float32 for value in saved(tmp_path / "half").values())


def test_no_validation_keeps_the_last_epochs_model(scenes, tmp_path, capsys):
    out = tmp_path / "run"
    options = {"method": "vse", "data.path": scenes / "train", "out": out}  # without splits
    assert run_here(options, "--no-data.train", "--no-data.validation") == 0
    assert all("loss" in m for m in metrics(out))
    last = load_safetensors(out / "checkpoints/step-6/weights.safetensors")
    assert all(torch.equal(last[f"model.{key}"], value) for key, value in saved(out).items())
    assert (out / "model-swa/model.safetensors").is_file()
    assert "is of epoch 2" in capsys.readouterr().out


def test_what_a_run_folder_holds_and_what_its_lines_say(scenes, tmp_path, capsys):
    out = tmp_path / "run"
    assert run_here({"data.path": scenes, "out": out, "data.workers": 1, "optimizer.scalars": 30}) == 0
    names = {p.name for p in out.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "model", "model-swa"}
    assert yaml.safe_load((out / "config.yaml").read_text())["loss"]["pseudo_positive"] == 0.1
    again = resolved("--config", str(out / "config.yaml"))
    check(again)
    assert again.loss.pseudo_positive == 0.1
    told = capsys.readouterr().out
    for word in (
        "method  pcmepp (csd)",
        "ViT-Micro-32",
        "48 pairs",
        "3 steps an epoch",
        "engine  1 x cpu, fp32, batch 16 = 1 ranks x 16",
        "step 1/6 | epoch 0.33 | loss",
        "pairs/s, data",
        "ETA",
        "2 epochs, 6 steps",
        "step 3/6 | validation RSUM",
        "(best)",
        "model-swa: mean of 1 epoch, validation RSUM",
    ):
        assert word in told, told
    assert max(map(len, told.splitlines())) < 220
    keys = {"loss", "epoch", "data_wait", "pairs_per_second", "eta", "gradient_norm", "lr"}
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert keys <= set(first)
    assert 0 < first["lr"] <= again.optimizer.lr  # of the heads, not of a and b


# ------------------------------------------------------------------------------------------------------ starting points


def test_starting_from_saved_models_and_from_open_clip_weights(scenes, tmp_path):
    """A folder of `save_model` (what a run of pretrain leaves in model/), and a file with open_clip's names."""
    torch.manual_seed(5)
    source = create_model("ViT-Micro-32", head="clip", n_unc_layers=1)
    save_model(source, tmp_path / "pretrained" / "model")
    stock = build_stock(source.config["architecture"])
    torch.save(stock.state_dict(), tmp_path / "open_clip.pt")
    given = {"pretrained": source.state_dict(), "open_clip.pt": stock.state_dict()}
    still = "visual.transformer.resblocks.0.mlp.c_fc.weight"  # frozen in the first epoch
    for name, state in given.items():
        out = tmp_path / f"from-{name}"
        options = {"model.pretrained": tmp_path / name, "data.path": scenes, "stop-after-epochs": 1, "out": out}
        options["ranking"] = "tolerance"
        argv = [w for w in words(options) if w != "--no-model.pretrained"]
        assert run_argv(argv) == 0
        assert torch.equal(saved(out)[still], state[still])
        assert metrics(out)[0]["scale"] == pytest.approx(5.0, abs=0.01)  # init_scale of the method, not of the source
        assert {metrics(out)[-1][f"tolerance_{way}"] for way in ("i2t", "t2i")} <= set(GRID)
    other = {
        "model.head": "clip",
        "model.embed_dim": 24,
        "size-augment": 0,
        "model.pretrained": tmp_path / "pretrained",
    }
    argv = [w for w in words({**other, "data.path": scenes, "out": tmp_path / "x"}) if "--no-" not in w]
    with pytest.raises(UserError, match=r"embed_dim \d+, this model has 24"):
        run_argv(argv)
    assert not (tmp_path / "x").exists()


def run_argv(argv: list[str]) -> int:
    from accelerate.state import AcceleratorState, GradientState

    before, sys.argv = sys.argv, ["finetune/run.py", *argv]
    try:
        return finetune.run.main()
    finally:
        sys.argv = before
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


# ------------------------------------------------------------------------------------------------------------ bad input


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def without_images(folder: Path) -> Path:
    """Karpathy's json that names two images of which neither is here."""
    folder.mkdir()
    rows = [
        {"filename": f"{split}.jpg", "split": split, "imgid": i, "sentids": [i], "sentences": [{"raw": "a cat"}] * 3}
        for i, split in enumerate(("train", "val"))
    ]
    for i, row in enumerate(rows):
        row["sentences"] = [{"raw": "a cat", "sentid": 3 * i + j} for j in range(3)]
        row["sentids"] = [3 * i + j for j in range(3)]
    (folder / "dataset_x.json").write_text(json.dumps({"images": rows, "dataset": "x"}))
    return folder


def without_captions(folder: Path) -> Path:
    path = without_images(folder)
    file = path / "dataset_x.json"
    content = json.loads(file.read_text())
    for row in content["images"]:
        row |= {"sentences": [], "sentids": []}
    file.write_text(json.dumps(content))
    return path


BAD = {
    "no data": ({"data.path": "null"}, "--data.path is missing", "make_scenes"),
    "missing data": ({"data.path": "absent"}, "absent", ""),
    "empty data": ({"data.path": empty}, "no webdataset shards", "make_scenes"),
    "images that are not here": ({"data.path": without_images}, "1 of the 1 images", "folder that holds them"),
    "captions without images": ({"data.path": without_captions}, "has no caption", ""),
    "no such split": (
        {"data.train": "trian"},
        "no split 'trian', only train and val. Did you mean 'train'",
        "Name one",
    ),
    "no such validation": ({"data.validation": "tset"}, "no split 'tset'", "Name one"),
    "no such format": ({"data.format": "shards"}, "'shards' is no format", "webdataset"),
    "large batch": ({"batch-size": 64}, "48 pairs", "from 1 to 48"),
    "unknown method": ({"method": "pcmep"}, "no method 'pcmep'. Did you mean 'pcmepp'", "clip-zs, daa, decl"),
    "unknown distance": ({"distance": "cds"}, "distance is 'cds'. Did you mean 'csd'", "wasserstein2"),
    "unknown model": ({"model.name": "ViT-B-61"}, "no model 'ViT-B-61'. Did you mean", ""),
    "unknown head": ({"model.head": "gop"}, "no head 'gop'. Did you mean 'gpo'", ""),
    "unknown key": ({"optimizer.lrr": 1}, "no option --optimizer.lrr. Did you mean '--optimizer.lr'", "--help"),
    "unknown precision": ({"engine.precision": "bf61"}, "Did you mean 'bf16'", "fp32"),
    "no epochs": ({"epochs": 0}, "epochs is 0", "1 or more"),
    "wrong type": ({"epochs": "many"}, "epochs", "--help"),
    "negative seed": ({"seed": -1}, "seed is -1", "from 0"),
    "no log": ({"log-every": 0}, "log-every is 0", "from 1 on"),
    "no rows": ({"batch-size": 1}, "batch-size is 1", "from 2"),
    "stop before it begins": ({"stop-after-epochs": 0}, "stop-after-epochs is 0", "from 1 on"),
    "negative saves": ({"save-every": -1}, "save-every is -1", "from 0 on"),
    "no time": ({"engine.timeout": 0}, "engine.timeout is 0", "minutes"),
    "negative workers": ({"data.workers": -1}, "data.workers is -1", "from 0"),
    "no evaluation batch": ({"engine.eval_batch_size": 0}, "eval_batch_size is 0", "from 1"),
    "share": ({"noise-ratio": 1.5}, "noise-ratio is 1.5", "from 0 to 1"),
    "size augment": ({"size-augment": -0.1}, "size-augment is -0.1", "from 0 to 1"),
    "scale": ({"augment.scale": "[1.0, 0.5]"}, "augment.scale is 1 to 0.5", "smaller number first"),
    "smoothing": ({"mix.smoothing": 0.5}, "mix.smoothing is 0.5", "below 0.5"),
    "nothing to mix": ({"mix.mixup": 0, "mix.cutmix": 0}, "are both 0", "mix.ratio"),
    "negative mixup": ({"mix.mixup": -1}, "mix.mixup is -1", "from 0"),
    "rate": ({"optimizer.lr": 0}, "optimizer.lr is 0", "above 0"),
    "always frozen": ({"optimizer.freeze-epochs": 2}, "freeze_epochs is 2 of 2 epochs", "less than 2"),
    "longer frozen": (
        {"optimizer.freeze-epochs": 3, "model.lock-image": "true"},
        "freeze_epochs is 3 of 2 epochs",
        "less than 2",
    ),
    "blocks": ({"model.n_unc_layers": 9}, "n_unc_layers is 9", "from 0 to"),
    "no dimension": ({"model.embed_dim": 0}, "model.embed_dim is 0", "from 1"),
    "pretrained": ({"model.pretrained": "absent.pt"}, "absent.pt", ""),
    "no out": ({"out": ""}, "--out is empty", "Name the folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_in_two_lines_with_nothing_written(case, scenes, tmp_path, monkeypatch, capsys):
    options, what, remedy = BAD[case]
    options = {k: v(tmp_path / "given") if callable(v) else v for k, v in options.items()}
    out, given = tmp_path / "run", sorted(tmp_path.rglob("*"))
    argv = words({"data.path": scenes, "out": out, **options})
    argv = argv[1:] if "model.pretrained" in options else argv
    monkeypatch.setattr(sys, "argv", ["finetune/run.py", *argv])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_command(finetune.run.main)
    reset()
    refused(ended.value.code, capsys.readouterr().err, what, remedy)
    assert sorted(tmp_path.rglob("*")) == given


def reset() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def refused(code: int, stderr: str, what: str, remedy: str) -> None:
    assert code == 2, stderr
    lines = stderr.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) == 2, stderr
    assert what in lines[0]
    assert remedy in lines[1]


def test_a_batch_that_ranks_cannot_share_is_refused():
    config = resolved("--data.path=x", "--batch-size=16")
    with pytest.raises(UserError, match=r"batch_size is 16, which 3 processes cannot share evenly. Set it to .* 18"):
        check(config, 3)


def test_wandb_that_is_not_installed_is_refused_before_anything_is_written(scenes, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb was asked for and is not installed"):
        run_here({"data.path": scenes, "out": tmp_path / "run", "wandb": "project"})
    assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_and_a_locked_one_stay_as_they_are(scenes, tmp_path):
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    for more in ((), ("--resume",)):
        with pytest.raises(UserError, match="something else"):
            run_here({"data.path": scenes, "out": out}, *more)
    assert [p.name for p in out.iterdir()] == ["thesis.tex"]
    locked = tmp_path / "locked"
    locked.mkdir()
    with open(locked / ".lock", "w") as lock:
        lock.write("node7 123\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is in use: process 123 on node7"):
            run_here({"data.path": scenes, "out": locked}, "--resume")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="holds something else"):
        run_here({"data.path": scenes, "out": tmp_path / "file"})
    assert [p.name for p in locked.iterdir()] == [".lock"]


def test_mirrored_images_are_warned_of_and_train_another_model(scenes, tmp_path, capsys):
    options = {"method": "vse", "data.path": scenes, **ONE_EPOCH, "augment.scale": "[0.9, 1.0]"}
    for name, more in (("plain", {}), ("mirrored", {"augment.hflip": 1.0})):
        assert run_here({**options, **more, "out": tmp_path / name}) == 0
        told = capsys.readouterr().out
        assert ("captions say left or right, which is wrong of a mirrored image" in told) == bool(more)
    assert metrics(tmp_path / "plain") != metrics(tmp_path / "mirrored")


def test_a_run_whose_checkpoints_were_removed_is_not_begun_again(scenes, tmp_path):
    """One that was killed before its first checkpoint is."""
    options = {"method": "vse", "data.path": scenes, "out": tmp_path / "run", **ONE_EPOCH}
    run_here(options)
    shutil.rmtree(tmp_path / "run/checkpoints")
    model, log = (tmp_path / "run" / name for name in ("model/model.safetensors", "metrics.jsonl"))
    before = model.read_bytes(), log.read_bytes()
    with pytest.raises(UserError, match="a run without its checkpoints"):
        run_here(options, "--resume")
    shutil.move(tmp_path / "run/model", tmp_path / "model")
    with pytest.raises(UserError, match="a run without its checkpoints"):
        run_here(options, "--resume")
    assert ((tmp_path / "model" / model.name).read_bytes(), log.read_bytes()) == before
    (tmp_path / "run/checkpoints").mkdir()
    assert run_here(options, "--resume") == 0
    assert model.read_bytes() == before[0]


def test_images_that_do_not_decode_stop_the_run_and_are_named(scenes, tmp_path):
    """In training, and in validation: there after the first epoch, on all ranks."""
    for split in ("train", "val"):
        folder = tmp_path / split
        shutil.copytree(scenes, folder)
        (shard,) = (folder / split).glob("*.tar")
        with tarfile.open(shard) as tar:
            first = tar.getnames()[0].split(".")[0]
        raw = bytearray(shard.read_bytes())
        place = 0
        while (place := raw.find(b"\xff\xd8\xff", place)) >= 0:
            raw[place : place + 3] = b"bad"
        shard.write_bytes(raw)
        with pytest.raises(UserError) as caught:
            run_here({"method": "vse", "data.path": folder, "out": tmp_path / f"run-{split}", "batch-size": 24})
        assert first in caught.value.what or "Not one image of a whole batch" in caught.value.what


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_a_sentence(scenes, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("probemb.runs.checkpoints.write_checkpoint", full)
    with pytest.raises(UserError, match=r"step-3 could not be written.*No space left") as caught:
        run_here({"method": "vse", "data.path": scenes, "out": tmp_path / "run"})
    assert "--resume" in caught.value.remedy


def test_the_run_is_described_by_its_defaults():
    assert OPTIONS["batch-size"] == 16
    config = resolved()
    assert (config.batch_size, config.epochs, config.save_every, config.swa_epochs) == (128, 25, 1000, 10)


# ------------------------------------------------------------------------------------------------------------ launchers


def test_accelerate_as_documented_is_one_process_and_warns_of_nothing(launched):
    code, out, err, run = launched["documented"]
    assert (code, err) == (0, "")
    assert "engine  1 x cpu, fp32, batch 24 = 1 ranks x 24" in out
    assert load_model(run).model.embed_dim == 16


def test_every_documented_launch_names_the_configuration():
    pages = [ROOT / "README.md", ROOT / "finetune" / "run.py"]
    pages += [*(ROOT / "docs").glob("*.md"), *(ROOT / "finetune").rglob("*.yaml")]
    launch = re.compile(r"accelerate launch (.*finetune/run\.py)")
    launches = [found for page in pages for found in launch.findall(page.read_text(encoding="utf-8"))]
    assert len(launches) >= 8
    assert all(one.startswith("-q --config_file finetune/accelerate.yaml ") for one in launches), launches


def test_torchrun_with_two_processes_is_two_and_equals_one(launched):
    code, out, err, _ = launched["torchrun"]
    assert code == 0, err
    assert "engine  2 x cpu, fp32, batch 24 = 2 ranks x 12" in out
    assert out.count("method  pcmepp") == 1  # one of them speaks
    losses = {
        name: [m["loss"] for m in metrics(launched[name][3]) if "loss" in m] for name in ("documented", "torchrun")
    }
    assert losses["torchrun"] == pytest.approx(losses["documented"], rel=0.05)


def test_accelerate_that_starts_fewer_processes_than_asked_for_is_refused(launched):
    code, _, err, run = launched["alone"]
    assert code == 1  # accelerate's, whatever the run ends with
    what, remedy = err.splitlines()[-2:]  # -q leaves out accelerate's traceback
    assert what == "error: accelerate was asked for several processes, but it has started one."
    assert remedy.startswith("       Add --multi_gpu")
    assert not run.exists()
