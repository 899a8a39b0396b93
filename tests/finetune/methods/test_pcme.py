"""PCME by its own recipe: two phases, class-level matches, its encoders, uniformity."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from finetune.config import Config, with_method_file
from finetune.loading.pair_loader import PairLoader
from finetune.pair_feed import Moment, PairFeed
from finetune.run import make_networks
from probemb import load_model
from probemb.cli.configuration import parse_config
from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from probemb.evaluation.embed_pairs import embed_pairs
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.scores import match_probability_scores
from probemb.metrics import retrieval_metrics, rsum
from tests.birds import names, write_cub
from tests.finetune.runs import ONE_EPOCH, metrics, run_here, words
from tools.build_vocabulary import main as build_vocabulary
from tools.make_scenes import Plan, make
from zeroshot.retrieval import main as retrieval

SMALL = {
    "method": "pcme", "model.name": "pcme-small", "model.head": "pie", "model.embed_dim": 32,
    "model.n_unc_layers": "[0,1]", "data.positives": "class", "batch-size": 24, "size-augment": 0, "swa-epochs": 0,
    "optimizer.layer_decay": 1,
    "optimizer.image_backbone": 1, "optimizer.text_backbone": 1, "optimizer.lr": 1e-3, "optimizer.schedule": "cosine",
    "optimizer.warmup_epochs": 0, "optimizer.freeze_text": "true", "augment.cutout": 0.2, "augment.word_dropping": 0.1,
    "loss.uniformity": 0.1, "loss.vib": 1e-5, "loss.vib_form": "sum", "loss.samples": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    """48 images of 48 classes with two captions each; 6 of val."""
    out = tmp_path_factory.mktemp("birds") / "world"
    make(Plan(train=0, val=0, classes_images=0, size=32, shard_size=48, captions=2, class_captions=48), out, workers=1)
    return out / "by-class"


@pytest.fixture(scope="module")
def run(birds, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    torch.set_num_threads(1)
    assert run_here({**SMALL, "data.path": birds, "out": out}) == 0
    return out


def weights(run, step):
    return load_file(run / "checkpoints" / f"step-{step}" / "weights.safetensors")


def configured(birds, **more) -> Config:
    return parse_config(Config, "", "", with_method_file(words({**SMALL, "data.path": birds, **more})))


def test_the_heads_come_first_then_everything(run, birds):
    """In the first phase the CNN and the word vectors stand still; the GRU starts from random weights and trains."""
    start = {f"model.{k}": v for k, v in make_networks(configured(birds), None, print)[0].state_dict().items()}
    first, second = weights(run, 4), weights(run, 8)
    for after, before, thawed in ((first, start, False), (second, first, True)):
        moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
        for name in ("text.layers.0.forwards.weight_hh_l0", "text.branch.0.backwards.weight_ih_l0", "scale", "shift"):
            assert f"model.{name}" in moved
        for name in ("visual.mean_head.fc.weight", "visual.log_var_head.attention.scores.weight"):
            assert f"model.{name}" in moved
        assert ("model.text.embedding.weight" in moved) == thawed
        assert any(name.startswith("model.visual.trunk.") for name in moved) == thawed


def test_the_validation_counts_the_class_and_ranks_by_match_probability(run, birds):
    loaded = load_model(run)
    assert loaded.model.ranking == "match-probability"
    data = find_captions(birds, "val")
    pairs = embed_pairs(Embedder(loaded.model, loaded.tokenizer, loaded.transforms.evaluate), data)
    model = loaded.model
    scores = match_probability_scores(pairs.images, pairs.texts, model.scale.item(), model.shift.item())(slice(None))
    names = [data.classes[i] for i in pairs.kept]
    match = torch.tensor([[a == names[owner] for owner in pairs.owner.tolist()] for a in names])
    ways = [retrieval_metrics(s, m) for s, m in ((scores, match), (scores.T, match.T))]
    best = max(line["rsum"] for line in metrics(run) if "rsum" in line)
    assert rsum(*ways) == pytest.approx(best, abs=1e-4)


def test_captions_of_the_class_match(birds):
    """The labels of a batch, as the trainer makes them."""
    config = configured(birds)
    data = find_captions(birds, "train")
    twice = replace(data, classes=["red circle", "blue square"] * 24)
    for dataset, positives in ((twice, "class"), (twice, "image")):
        loader = PairLoader(dataset, lambda image: torch.zeros(3, 2, 2), lambda texts: torch.ones(len(texts), 2).long(),
                            24, positives=positives)  # fmt: skip
        pairs = next(loader.epoch(0))
        feed = PairFeed(config, loader.groups, torch.device("cpu"), wants_words=False)
        batch = feed.gather([torch.zeros(24, 4)] * 4, pairs, None, Moment(0, 0, 0))
        owner = pairs.image_index
        key = owner % 2 if positives == "class" else owner
        assert torch.equal(batch.match, (key[:, None] == key[None, :]).float())
    assert 24 < (owner[:, None] % 2 == owner[None, :] % 2).sum() < 24 * 24


def test_what_it_logs_and_that_it_resumes_exactly(run, birds, tmp_path):
    lines = [line for line in metrics(run) if "loss" in line]
    assert len(lines) == 8
    assert {"match", "vib", "uniformity", "scale", "shift", "u_image", "u_text"} <= set(lines[-1])
    options = {**SMALL, "data.path": birds, "out": tmp_path / "run"}
    assert run_here({**options, "stop-after-epochs": 1}) == 0
    assert run_here(options, "--resume") == 0
    again = weights(tmp_path / "run", 8)
    assert all(torch.equal(value, again[name]) for name, value in weights(run, 8).items())


def test_cub_as_it_is_published(tmp_path, capsys):
    """Build the vocabulary, train with matches of the class, validate on held-out images, measure other classes."""
    data = write_cub(tmp_path / "cub", captions=4)
    (data / "seen_test_images.txt").write_text(names()[0] + "\n" + names()[4] + "\n")
    assert build_vocabulary([str(data), "--split=train", f"--out={data / 'vocabulary.txt'}", "--min-count=1"]) == 0
    options = {**SMALL, **ONE_EPOCH, "optimizer.freeze_text": "false", "batch-size": 14, "data.path": data}
    assert run_here({**options, "out": tmp_path / "run"}) == 0
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2]  # 7 x 4 captions
    words = ["--model", str(tmp_path / "run"), "--data", str(data), "--rankings", "match-probability,mean"]
    assert retrieval([*words, "--erased=0", "--device=cpu", "--workers=0"]) == 0
    rows = json.loads((tmp_path / "run" / "retrieval" / "results.json").read_text())["rows"]
    found = {row["positives"]: row for row in rows if row["ranking"] == "match-probability"}
    assert set(found) == {"own captions", "captions of the class"}
    assert found["captions of the class"]["t2i"]["r_precision"] == 1  # the test split has one class


REFUSED = {
    "no classes": ({}, "does not say of which class", "by-class"),
    "no first phase": ({"optimizer.freeze-epochs": 0}, "optimizer.freeze_text is for the first", "freeze_epochs to 1"),
    "cached": (
        {"model.lock_image": "true", "data.cache_features": "x"},
        "no pixels that augment.cutout",
        "Set augment",
    ),
    "vib": ({"loss.vib_form": "mean"}, "vib_form is 'mean'", "kl"),
    "cutout": ({"augment.cutout": 1.5}, "augment.cutout is 1.5", "0 to 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, scenes, tmp_path):
    options, what, remedy = REFUSED[case]
    with pytest.raises(UserError) as caught:
        run_here({**SMALL, "data.path": scenes, "out": tmp_path / "run", "batch-size": 8, **options})
    assert what in caught.value.what
    assert remedy in caught.value.remedy
    assert not (tmp_path / "run").exists()
