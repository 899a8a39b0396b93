"""The study of the variance: its loader and labels against plain loops, and one tiny run that is reported again."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from probemb.evaluation.tolerance import sweep
from tests.truth import matches
from tools.claims import command as claims
from tools.claims.ambiguity.findings import CLOSELY, NAMES
from tools.claims.ambiguity.measuring import LAMBDAS
from tools.claims.ambiguity.study import Ambiguity
from tools.claims.ambiguity.training import AllTrue, Settings, create, fit
from tools.claims.ambiguity.world import OneCaption, Sizes, draw_world
from tools.claims.embeddings import read_embeddings

SIZES = Sizes(pixels=16, start=26, training=24, validation=16, test=16)
SETTINGS = Settings(SIZES, batch_size=12, start_epochs=1, random_epochs=1, epochs=1)
STUDY = Ambiguity(SETTINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("scenes")


@pytest.fixture(scope="module")
def world(folder):
    return draw_world(SETTINGS.name, SIZES, [0], folder)


def test_an_epoch_has_every_scene_once_and_five_have_every_caption(world):
    loader = OneCaption(world.start, 12, seed=3)
    assert loader.steps == 2
    seen = []
    for epoch in range(5):
        batches = list(loader.epoch(epoch))
        images = torch.cat([batch.image_index for batch in batches])
        pairs = torch.cat([batch.pair_index for batch in batches])
        assert len(images.unique()) == 24
        assert torch.equal(torch.tensor(world.start.dataset.owner())[pairs], images)
        assert torch.equal(batches[1].tokens, world.start.tokens[pairs[12:]])
        seen += pairs.tolist()
    assert len(set(seen)) == 120
    assert len({pair % 5 for pair in seen[:24]}) > 1  # an epoch has exact and vague captions
    again = OneCaption(world.start, 12, seed=3)
    assert np.array_equal(loader.order(2), again.order(2))
    assert torch.equal(next(again.epoch(4, start_step=1)).pair_index, torch.tensor(seen[-12:]))


def test_every_true_match_of_a_batch_is_labelled(world, monkeypatch):
    model = create(world, SETTINGS, 0, 5.0)
    method = AllTrue(STUDY.plan([0])[1].config(SETTINGS), model, world.test.dataset)
    pairs = next(OneCaption(world.test, 12, 0).epoch(0))
    labelled = {}
    monkeypatch.setattr(method, "match_loss", lambda batch, *rest: labelled.update(match=batch.match))
    batch = SimpleNamespace(match=torch.eye(12), image_index=pairs.image_index, pair_index=pairs.pair_index)
    method.loss(batch, model)
    scenes = [scene for scene, _ in world.test.dataset.scenes]
    captions = [caption for _, told in world.test.dataset.scenes for caption in told]
    for i, image in enumerate(pairs.image_index.tolist()):
        for j, pair in enumerate(pairs.pair_index.tolist()):
            assert labelled["match"][i, j] == float(matches(captions[pair], scenes[image]))
    assert labelled["match"].sum() > 12


def test_frozen_heads_keep_their_weights_and_others_do_not(world):
    model = create(world, SETTINGS, 0, 5.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = next(one for one in STUDY.plan([0]) if one.name == "recipe frozen").config(SETTINGS)
    fit(model, config, world.training[0], lambda: None, frozen=True)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    kept = set(before) - changed
    assert {"visual.log_var_head.weight", "visual.log_var_head.bias", "text.log_var_head.weight"} <= kept
    assert {"visual.mean_head.weight", "text.mean_head.weight", "visual.stem.0.weight", "scale"} <= changed


def test_a_run_and_its_report(folder, world, tmp_path, capsys):
    torch.set_num_threads(1)
    out = tmp_path / "claims"
    out.mkdir()
    (out / "scenes").symlink_to(folder)
    content = claims.run(STUDY, out, n_seeds=1)
    assert {one["name"] for one in content["trainings"]} == set(NAMES)
    assert [len(claim["rows"]) for claim in content["claims"]] == [len(NAMES), len(NAMES), len(CLOSELY), 6]
    assert (out / "report.html").read_text().count("<svg") == 2
    found = {one["name"]: one for one in content["trainings"]}
    images, texts = read_embeddings(out / "embeddings" / "start-seed-0.safetensors")["test"]
    curve = sweep(images, texts, world.test.positives, "map_at_r", LAMBDAS)
    assert found["start"]["curve"]["i2t"] == pytest.approx(curve)
    start = found["start"]["retrieval"]
    for weight, name in ((1.0, "csd"), (0.0, "mean")):
        assert start[name]["true"]["i2t"]["map_at_r"] == pytest.approx(curve[LAMBDAS.index(weight)], abs=1e-6)
    chosen = found["start"]["chosen_by"]["tolerance"]
    assert chosen["chosen"].startswith("chosen on")
    assert start["tolerance"]["true"]["i2t"]["map_at_r"] == pytest.approx(curve[LAMBDAS.index(chosen["i2t"])], abs=1e-6)
    again = claims.run(STUDY, out, n_seeds=1, report_only=True)
    for one, other in zip(content["trainings"], again["trainings"], strict=True):
        assert one["retrieval"] == other["retrieval"]
    assert "1. What the variance" in capsys.readouterr().out
