"""One short training of every method through the command: what it logs, saves and ranks by, and resuming within it."""

import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from finetune.methods import METHODS
from probemb import load_model
from probemb.cross_attention import CrossAttention
from tests.finetune.runs import checkpoint, metrics, run_here, saved
from tests.world import encode, write_samples
from zeroshot.retrieval import main as retrieval

OWN = {  # options of a method, beside the base
    "pcme": {"loss.uniformity": 0.1},
    "jwae-mh": {"data.unpaired": "SCENES", "data.unpaired-batch": 20},
    "jwae-mse": {"model.name": "resnet-words-small", "model.embed_dim": 8},  # mean word vectors
    "jwae-scan": {"loss.published": "true", "loss.direction": "i2t", "loss.image_norm": "l1"},
    "prob-vsepp": {"model.name": "scenes-cnn-gru", "loss.covariance": "spherical-mean"},
}
EPOCHS = 2


@pytest.fixture(scope="session")
def run_of(scenes, regions, queries, tmp_path_factory):
    """method -> its run of two epochs of two steps, with the backbone frozen and thawed and behind the warm-up of the
    losses that have one, and its options; each made once, with a checkpoint of every step.
    """
    made = {}

    def of(name):
        if name not in made:
            method, out = METHODS[name], tmp_path_factory.mktemp("methods") / name
            options = {"method": name, "data.path": scenes, "batch-size": 24, "out": out}
            options |= {"save-every": 1, "keep-checkpoints": 9, "epochs": EPOCHS}
            if hasattr(method.Options, "word_width") and name != "prob-vsrn":
                options |= {"loss.hidden": 8, "loss.word_width": 8}  # CLIP's vocabulary is large
            if method.over_regions or name == "jwae-scan":
                model = "vsrn-scenes-gru" if method.over_regions else "scan-scenes-gru"
                options |= {"data.path": regions, "batch-size": 60, "model.name": model, "model.embed_dim": "null"}
            if method.composes:
                options |= {"data.path": queries, "model.name": "scenes-cnn-gru", "model.head": "clip"}
                options |= {"model.embed_dim": "null", "batch-size": 60, "swa-epochs": 0, "compose.queries": 60}
                options |= {"optimizer.lr": 3e-3, "augment.cutout": 0}
            options |= {k: scenes if v == "SCENES" else v for k, v in OWN.get(name, {}).items()}
            assert run_here(options) == 0
            made[name] = out, options
        return made[name]

    return of


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_validates_and_saves(name, run_of):
    (out, _), method = run_of(name), METHODS[name]
    lines, networks = metrics(out), method.networks
    metric = "r_precision" if method.composes else "rsum"
    trained, validated = [m for m in lines if "loss" in m], [m for m in lines if metric in m]
    steps = len(trained) // networks // EPOCHS
    assert steps >= 2
    assert [m["step"] for m in trained] == list(range(1, steps * networks * EPOCHS + 1))
    assert [m["step"] for m in validated] == [steps * networks, 2 * steps * networks]
    turns = [1] * steps + [2] * steps
    assert [m["network"] for m in trained if "network" in m] == (turns * EPOCHS if networks == 2 else [])
    assert all(math.isfinite(m["loss"]) and m["gradient_norm"] > 0 for m in trained)
    assert {"loss", "gradient_norm", "lr"} <= set(trained[-1])
    folders = ["model", *(["model-second"] if networks == 2 else [])]
    if not method.composes:
        assert {"swa_rsum", "swa_t2i_r1"} <= set(lines[-1])
        folders += [f"model-swa{folder.removeprefix('model')}" for folder in folders]
    assert sorted(path.name for path in out.glob("model*")) == sorted(folders)
    for folder in folders:
        model = load_model(out / folder).model
        assert model.probabilistic == method.probabilistic
        assert model.match_model.matches == (method.match != "none" and model.probabilistic)
        assert (model.match_model.temperature is None) == (name not in ("infonce", "pcmepp-clip", "prolip"))
        assert (model.match_model.form == "samples") == (name == "pcme")
        assert (model.composer is not None) == method.composes
        assert not [key for key in model.state_dict() if "decoder" in key]


@pytest.mark.parametrize("name", ["ncr", "jwae-mh", "jwae-scan", "vsrn", "mpc"])
def test_it_resumes_bit_for_bit_in_the_middle_of_an_epoch(name, run_of, tmp_path):
    """Two networks, a discriminator and unpaired data, one that keeps its gradients, a decoder, composed queries."""
    whole, options = run_of(name)
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    steps = sorted(int(path.name.removeprefix("step-")) for path in (part / "checkpoints").glob("step-*"))
    for later in steps[1:]:
        shutil.rmtree(part / "checkpoints" / f"step-{later}")
    assert run_here({**options, "out": part}, "--resume") == 0
    assert checkpoint(part, steps[-1]) == checkpoint(whole, steps[-1])
    assert metrics(part) == metrics(whole)
    torch.testing.assert_close(saved(part), saved(whole), rtol=0, atol=0)


def test_a_cross_entropy_above_a_random_choices_is_told(run_of, tmp_path, capsys):
    assert run_here({**run_of("mpc")[1], "out": tmp_path / "run", "loss.temperature": 0.1}) == 0
    assert "query_to_target is above 4.09, a random choice's" in capsys.readouterr().out


@pytest.fixture
def stripes(tmp_path):
    """Pictures of three of eight colours in stripes, which are their concepts."""
    colours, random = list(itertools.product((0, 255), repeat=3)), np.random.RandomState(0)
    rows = [{"id": number, "name": f"colour{number}"} for number in range(len(colours))]
    (tmp_path / "categories.json").write_text(json.dumps(rows))
    for split, n in (("train", 240), ("val", 60), ("test", 60)):
        samples = []
        for _ in range(n):
            held = random.permutation(len(colours))[:3].tolist()
            pixels = Image.fromarray(np.array([[colours[one] for one in held]], np.uint8))
            data = encode(pixels.resize((24, 24), Image.Resampling.NEAREST), "PNG")
            samples.append({"png": data, "json": {"categories": held}})
        write_samples(tmp_path / split / "0.tar", samples)
    return tmp_path


@pytest.mark.slow
def test_mpc_learns_to_compose(stripes, run_of, tmp_path):
    """From random weights; every pair of colours is in a tenth of the pictures."""
    options = {**run_of("mpc")[1], "data.path": stripes, "out": tmp_path / "run", "epochs": 4, "compose.repeats": 43}
    options |= {"optimizer.freeze-epochs": 0, "optimizer.warmup-epochs": 0.5, "optimizer.decay-epochs": 0}
    assert run_here({**options, "save-every": 0, "loss.spare_correct": "true"}) == 0
    trained = [line["query_to_target"] for line in metrics(tmp_path / "run") if "loss" in line]
    found = [line["r_precision"] for line in metrics(tmp_path / "run") if "r_precision" in line]
    assert sum(trained[-10:]) / 10 < math.log(60) - 0.4
    assert found[-1] > 30


@pytest.mark.parametrize("head", ["pie", "clip", "mlp", "gpo", "average"])
def test_pcme_in_two_dimensions(head, scenes, tmp_path, capsys):
    """As PCME's Fig. 5 shows it."""
    options = {"method": "pcme", "data.path": scenes, "model.embed_dim": 2, "model.head": head, "swa-epochs": 0}
    assert run_here({**options, "out": tmp_path, "size-augment": 0}) == 0
    assert "PCME's own: --config finetune/recipes/pcme-coco.yaml" in capsys.readouterr().out
    model, tokenizer, _ = load_model(tmp_path)
    images, texts = torch.randn(3, 3, *model.image_tower.image_size), tokenizer(["a red circle", "a star", "two dogs"])
    for found in (model.encode_image(images), model.encode_text(texts)):
        assert found.mean.shape == (3, 2)
        assert len(found.mean.unique(dim=0)) == 3


RANKED = {"order": "order", "pvse": "multi-instance", "vsepp": "mean", "scan": "attention", "pcme": "match-probability"}


@pytest.mark.parametrize("name", RANKED)
def test_validation_and_retrieval_rank_as_the_method_compares(name, run_of, scenes, tmp_path):
    (out, _), measured = run_of(name), tmp_path / "measured"
    best = max(line["rsum"] for line in metrics(out) if "rsum" in line)
    assert load_model(out).model.ranking == RANKED[name]
    words = ["--model", str(out), "--data", str(scenes), "--split", "val", "--out", str(measured), "--erased", "0"]
    assert retrieval(words) == 0
    rows = json.loads((measured / "results.json").read_text())["rows"]
    rows = {row["ranking"]: row for row in rows if row["positives"] == "own captions"}
    assert rows[RANKED[name]]["rsum"] == pytest.approx(best, abs=1e-4)
    if name == "scan":
        assert load_model(out).model.attention == CrossAttention()


def test_mean_word_vectors_and_cached_features_through_the_command(scenes, tmp_path, capsys):
    out = tmp_path / "run"
    options = {"method": "jwae-mh", "data.path": scenes, "out": out, "data.cache-features": tmp_path / "features"}
    options |= {"model.name": "resnet-words-small", "model.embed_dim": 8, "optimizer.freeze-epochs": 0}
    options["optimizer.lr"] = 0.003
    assert run_here(options) == 0
    told = capsys.readouterr().out
    assert "random vectors, which do not train: name word vectors with --model.word-vectors" in told
    features = {path: path.stat().st_mtime_ns for path in (tmp_path / "features").iterdir()}
    lines = [line for line in metrics(out) if "loss" in line]
    assert all(lines[-1][side] < lines[0][side] for side in ("image", "text"))
    means = load_model(out).model.encode_text(torch.tensor([[2, 3, 4], [5, 6, 0]])).mean
    torch.testing.assert_close(means.norm(dim=1), torch.ones(2))  # what people rank are unit means
    trunk = {key for key in saved(out) if key.startswith("visual.trunk")}
    first = load_file(out / "checkpoints" / "step-3" / "weights.safetensors")
    assert all(torch.equal(saved(out)[key], first[f"model.{key}"]) for key in trunk)
    assert run_here({**options, "out": tmp_path / "again"}) == 0
    assert features == {path: path.stat().st_mtime_ns for path in (tmp_path / "features").iterdir()}
    assert metrics(tmp_path / "again") == metrics(out)
