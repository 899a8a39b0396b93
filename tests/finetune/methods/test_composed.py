"""MPC and its rivals: what a step sees on any number of ranks, a run that learns and resumes, and refusals."""

import json
import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from finetune.config import Config, with_method_file
from finetune.config import Optimizer as Rates
from finetune.loading.feature_cache import cache_features, unchanged
from finetune.loading.tuple_loader import TupleLoader
from finetune.methods.registry import METHODS
from finetune.network import Network
from finetune.pair_feed import Moment
from finetune.recipe import create_optimizer, make_schedule, parameter_groups
from finetune.run import make_feed, make_loader
from finetune.trainer import Hooks, Joint, State, Trainer
from probemb.cli.configuration import parse_config
from probemb.data.compositions.find import find_compositions
from probemb.errors import UserError
from probemb.evaluation.composed import embed_queries, measure_composed
from probemb.evaluation.embedding import Embedder
from probemb.models import create_model, create_tokenizer, create_transforms, load_model
from tests.finetune.runs import run_here
from tests.ranks import run_ranks
from tools.make_scenes import Plan, make

COMPOSED = [name for name, method in METHODS.items() if method.composes]
BATCH = 24
UNCHANGED = ("--augment.cutout=0", "--augment.word_dropping=0")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    out = tmp_path_factory.mktemp("composed") / "scenes"
    make(Plan(train=0, val=0, classes_images=0, size=32, compositions=1200, shard_size=500), out, workers=1)
    return out / "compositions"


def configured(method, *words):
    base = [f"--method={method}", "--data.path=x", "--epochs=1", f"--batch_size={BATCH}", "--optimizer.decay_epochs=0"]
    more = ["--model.head=clip", "--log_every=1", "--augment.cutout=0.2", "--augment.word_dropping=0.3"]
    return parse_config(Config, "test", "", with_method_file([*base, *more, *words]))


def make_trainer(config, data, rank, world, **hooks):
    torch.manual_seed(0)
    method = METHODS[config.method]
    model = create_model("ViT-Micro-32", head="clip", n_unc_layers=0, **method.model_options(config))
    joint = Joint(model, method(config, model, data))
    for name in ("scale", "shift", "logit_scale"):
        getattr(model, name).requires_grad_(False)
    joint.double()
    loader = TupleLoader(
        data, create_transforms(model).train, create_tokenizer(model), BATCH, config.seed, rank, world
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])
    optimizer = create_optimizer(parameter_groups(model, joint.method, Rates(lr=0.01)), "adam")
    feed = make_feed(config, loader, data, joint.objective, accelerator.device)
    schedule = make_schedule(config, 1, loader.steps)
    return Trainer(accelerator, State(joint, optimizer), loader, feed, schedule, config, Hooks(**hooks))


def trained(rank, world, drawn, methods):
    """Losses and weights after two steps, by method."""
    torch.set_num_threads(1)
    found = {}
    for name in methods:
        told = []
        trainer = make_trainer(
            configured(name), find_compositions(drawn, "train"), rank, world,
            report=lambda step, values, told=told: told.append(values["loss"]),
        )  # fmt: skip
        trainer.hooks.stop = lambda trainer=trainer: trainer.step == 1
        assert trainer.fit()
        found[name] = told, {key: value.numpy() for key, value in trainer.joint.state_dict().items()}
    return found


@pytest.fixture(scope="module")
def alone(drawn):
    return run_ranks(1, trained, drawn, COMPOSED)[0]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_equal_one_process(world, drawn, alone):
    """Also where ranks have other numbers of images and texts among their parts, and batch norms."""
    for one in run_ranks(world, trained, drawn, COMPOSED):
        for name in COMPOSED:
            (losses, state), (expected, weights) = one[name], alone[name]
            assert len(losses) == 2
            np.testing.assert_allclose(losses, expected, rtol=1e-7, err_msg=name)
            for key, value in weights.items():
                np.testing.assert_allclose(state[key], value, rtol=0, atol=2e-7, err_msg=f"{name} {key}")


def test_a_step_sees_the_targets_the_parts_and_what_is_correct(drawn):
    """Parts are the embeddings of what the batch says, and a target is correct if it has all concepts."""
    data = find_compositions(drawn, "train")
    trainer = make_trainer(configured("mpc", *UNCHANGED), data, 0, 1)
    given = next(trainer.loader.epoch(0))
    inputs, drawn_numbers = trainer.feed.inputs(given, trainer.model, 0)
    images, tokens = inputs[:2]
    model = trainer.model.eval()
    with torch.no_grad():
        image, text = model.encode_image(images), model.encode_text(tokens)
        embedded = (image.mean, image.log_var, text.mean, text.log_var)
        batch = trainer.feed.gather(embedded, given, drawn_numbers, Moment(0, 0, 0))
    assert batch.texts is None
    assert batch.parts.shape == (BATCH, 2, model.embed_dim)
    for row in range(BATCH):
        torch.testing.assert_close(batch.image.mean[row], image.mean[row])
        for place, at in enumerate(given.part_rows[row].tolist()):
            source, index = (image, BATCH + at) if at >= 0 else (text, -at - 1)
            torch.testing.assert_close(batch.parts.mean[row, place], source.mean[index])
            torch.testing.assert_close(batch.parts.log_var[row, place], source.log_var[index])
        for column, target in enumerate(given.target_index.tolist()):
            has_all = set(given.concepts[row].tolist()) <= data.holds[target]
            assert bool(batch.match[row, column]) == has_all
    assert batch.match.diagonal().all()
    assert batch.match.sum() > BATCH  # some other target of the batch is correct too


def test_mpc_learns_a_batch_at_its_default_temperature(drawn):
    trainer = make_trainer(configured("mpc", *UNCHANGED), find_compositions(drawn, "train"), 0, 1)
    given = next(trainer.loader.epoch(0))
    network = Network(trainer.model, trainer.joint.objective)
    optimizer = torch.optim.Adam(trainer.model.parameters(), 3e-3)
    values = []
    for step in range(30):
        inputs, numbers = trainer.feed.inputs(given, trainer.model, step)
        batch = trainer.feed.gather(network(*inputs), given, numbers, Moment(0, step, 0))
        out = trainer.joint.objective.loss(batch, trainer.model)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        values.append(out.terms["query_to_target"].item())
    assert values[-1] < 0.5 * math.log(BATCH)


def test_cutout_is_that_of_normalised_floats(drawn):
    data = find_compositions(drawn, "train")
    trainer = make_trainer(configured("mpc"), data, 0, 1)
    given = next(trainer.loader.epoch(0))
    assert given.images.dtype == torch.uint8
    floats = given._replace(images=trainer.model.normalized(given.images))
    (images, *_), (expected, *_) = (trainer.feed.inputs(one, trainer.model, 0)[0] for one in (given, floats))
    assert torch.equal(images, expected)
    assert ((images == 0).all(1).double().mean((1, 2)) - 0.2).abs().max() < 0.03


def test_a_text_tower_without_texts_gets_a_gradient_of_zero(drawn):
    """DDP waits for the gradient of every parameter."""
    trainer = make_trainer(configured("mpc"), find_compositions(drawn, "train"), 0, 1)
    given = next(trainer.loader.epoch(0))
    b, k = given.part_rows.shape
    images = torch.cat([given.images[:b], given.images[:b], given.images[:b]])
    given = given._replace(
        images=images, tokens=given.tokens[:1], text_used=torch.tensor([False]),
        part_rows=torch.arange(b * k).view(b, k),
    )  # fmt: skip
    inputs, _ = trainer.feed.inputs(given, trainer.model, 0)
    image, text = (trainer.model.encode_image(inputs[0].double()), trainer.model.encode_text(inputs[1]))
    batch = trainer.feed.gather((image.mean, image.log_var, text.mean, text.log_var), given, None, Moment(0, 0, 0))
    trainer.joint.objective.loss(batch, trainer.model).loss.backward()
    grads = [p.grad for name, p in trainer.model.text.named_parameters() if p.requires_grad]
    assert all(grad is not None and not grad.any() for grad in grads)


def options(drawn, out, **more):
    return {
        "data.path": drawn, "out": out, "model.name": "scenes-cnn-gru", "model.head": "clip", "model.embed_dim": "null",
        "model.image_weights": "null", "epochs": 2, "batch-size": 64, "optimizer.decay-epochs": 0,
        "optimizer.lr": 3e-3, "engine.threads": 1, "data.workers": 0, "compose.queries": 60, "log-every": 4,
        "augment.cutout": 0, "augment.word_dropping": 0, "compose.repeats": 2, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(drawn, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "mpc"
    assert run_here({"method": "mpc", **options(drawn, out)}) == 0
    return out


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_it_validates_and_its_model_composes(run, drawn):
    told = [line for line in lines(run) if "r_precision" in line]
    assert len(told) == 2
    loaded = load_model(run)
    assert loaded.model.composer is not None
    data = find_compositions(drawn, "val")
    embedder = Embedder(loaded.model.eval(), loaded.tokenizer, loaded.transforms.evaluate)
    gallery, queries = embedder.images(data.images), embed_queries(embedder, data, data.sampled_queries(60))
    found = measure_composed(gallery, data, queries, "density")
    best = max(told, key=lambda one: one["r_precision"])
    assert 100 * found["all"]["r_precision"] == pytest.approx(best["r_precision"], rel=1e-4)
    assert found["all"]["r_precision"] != measure_composed(gallery, data, queries, "cosine")["all"]["r_precision"]
    assert found["all"]["queries"] == sum(found[kind]["queries"] for kind in ("images", "mixed", "texts")) == 60


def test_pairs_of_the_setup_unseen_fill_a_batch(drawn):
    data = find_compositions(drawn, "train", setup="unseen")
    assert len(data.tuples) < 128
    loader = make_loader(configured("mpc", "--batch_size=128"), data, None, None, Accelerator(cpu=True))
    assert loader.steps == 1
    loader.close()


@pytest.mark.slow
def test_a_loss_above_chance_is_told(drawn, tmp_path, capsys):
    assert run_here({"method": "mpc", **options(drawn, tmp_path / "out", **{"loss.temperature": 1})}) == 0
    assert "choosing among the 64 targets of a batch at random has 4.16" in capsys.readouterr().out


def test_it_resumes_exactly(run, drawn, tmp_path):
    out = tmp_path / "stopped"
    given = {"method": "mpc", **options(drawn, out)}
    assert run_here({**given, "stop-after-epochs": 1}) == 0
    assert run_here({**given, "resume": True}) == 0
    ours, theirs = (load_model(one).model.state_dict() for one in (out, run))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_kept_features_are_those_of_images_and_of_what_queries_are_cut_from(drawn, tmp_path):
    data = find_compositions(drawn, "train")
    model = create_model("ViT-Micro-32", n_unc_layers=0)
    settings = create_tokenizer(model), BATCH
    pixels = next(TupleLoader(data, create_transforms(model).evaluate, *settings).epoch(0))
    with torch.no_grad():
        expected = model.encode_image(pixels.images).mean
    cached = cache_features([model], data, tmp_path)
    rows = next(TupleLoader(cached, unchanged, *settings).epoch(0))
    with torch.no_grad():
        torch.testing.assert_close(model.encode_image(rows.images).mean, expected, rtol=0, atol=2e-3)
    assert all(torch.equal(a, b) for a, b in zip(rows[1:], pixels[1:]))
    boxes = {crop for one in data.crops for crop in one if crop.box}
    assert len(cached.images.rows) == len(data) + len(boxes) > 2 * len(data)


@pytest.mark.slow
def test_it_trains_on_kept_features_and_the_saved_model_reads_pixels(drawn, tmp_path):
    locked = {"model.lock_image": True, "model.n_unc_layers": 0, "data.cache_features": tmp_path / "features"}
    assert run_here({"method": "mpc", **options(drawn, tmp_path / "run", **locked, epochs=1)}) == 0
    (told,) = (line["r_precision"] for line in lines(tmp_path / "run") if "r_precision" in line)
    loaded, data = load_model(tmp_path / "run"), find_compositions(drawn, "val")
    embedder = Embedder(
        loaded.model.eval(), loaded.tokenizer, create_transforms(loaded.model, resize="tensor").evaluate
    )
    gallery, queries = embedder.images(data.images), embed_queries(embedder, data, data.sampled_queries(60))
    found = measure_composed(gallery, data, queries, "density")["all"]["r_precision"]
    assert 100 * found == pytest.approx(told, abs=1)  # features are float16


@pytest.mark.parametrize(
    ("method", "more", "message"),
    [
        ("mpc", {"noise-ratio": 0.2}, "which noise_ratio is not for"),
        ("mpc", {"size-augment": 0.2, "model.head": "gpo"}, "which size_augment is not for"),
        ("mpc", {"data.positives": "class"}, "which data.positives is not for"),
        ("infonce", {"compose.parts": 3}, "has no queries of several parts"),
        ("mpc", {"compose.parts": 1}, "compose.parts"),
        ("mpc", {"mix.ratio": 0.5}, "cannot learn from mixed images"),
        ("tirg", {"compose.ranking": "density"}, "so compose.ranking cannot be density"),
        ("tirg", {"swa-epochs": 1}, "the composer tirg has batch norms"),
        ("mpc", {"loss.similarity": "expected", "loss.samples": 50}, "mpc does not use loss.samples, which is 50"),
    ],
)
def test_what_has_no_use_is_refused(drawn, tmp_path, method, more, message, capsys):
    given = {"method": method, **options(drawn, tmp_path / "out"), **more}
    if method == "infonce":
        given = {key: value for key, value in given.items() if not key.startswith("compose.") or key in more}
    with pytest.raises((UserError, SystemExit)) as error:
        run_here(given)
    told = str(error.value) + capsys.readouterr().err
    assert message in " ".join(told.split())
    assert not (tmp_path / "out").exists()
