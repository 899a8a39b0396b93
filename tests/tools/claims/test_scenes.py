"""The claims in miniature: the plan, how verdicts follow from numbers, and one tiny run that is taken up again."""

import json
import math
import os
import time

import pytest
import torch

from finetune.loading.rows import epoch_order
from probemb.errors import UserError
from probemb.evaluation.embed_pairs import exact_match
from tools.claims import command as claims
from tools.claims.queue import Archive
from tools.claims.scenes.findings import PRETRAINING
from tools.claims.scenes.study import METHODS, Scenes
from tools.claims.scenes.training import CHOSEN, GRID, Settings, Training
from tools.claims.scenes.world import MemoryLoader, Sizes, draw_world
from tools.claims.verdicts import ALONE, FAILS, HOLDS, NOT_TOLD_APART, ONE_SEED, Value, compare, mark_family, value

SIZES = Sizes(pixels=16, pretraining=16, training=12, validation=8, test=12, class_images=128)
SETTINGS = Settings(
    SIZES, width=16, image_blocks=1, text_blocks=1, embed_dim=8, batch_size=30, pretraining_epochs=1, epochs=2
)
STUDY = Scenes(SETTINGS)


@pytest.fixture(scope="module")
def world():
    return draw_world(SIZES, [0])


def test_the_plan_has_every_variant_for_every_seed():
    plan = STUDY.plan(range(3))
    assert len(plan) == 63
    assert len({(one.name, one.seed) for one in plan}) == 63
    for one in plan:
        one.config(SETTINGS)  # finetune refuses options that a method does not use
    noisy = {one.name: one for one in plan if one.noise}
    assert noisy["pcmepp noise 20%"].pseudo_positive == 0.01
    assert noisy["pcmepp noise 50%"].pseudo_positive == 0.0
    assert {one.distance for one in plan if one.name == "wasserstein2"} == {"wasserstein2"}
    assert [(one.clip, one.pseudo_positive, one.mix) for one in plan if one.name == PRETRAINING] == [(1, 0, 0)] * 3
    assert set(GRID) == set(CHOSEN) == set(METHODS)


def test_verdicts_follow_the_interval_paired_over_seeds():
    one = value([1.0, 2.0, 3.0])
    assert one == Value(2.0, 1.0, (1.0, 2.0, 3.0))
    assert value([1.0, None]) is None
    found = compare("a", one, value([0.0, 0.5, 1.0]), factor=1)  # differences 1, 1.5 and 2
    half = 4.302652730 * 0.5 / math.sqrt(3)  # a table's t at 97.5 %, two degrees of freedom
    assert found["difference"] == 1.5
    assert (found["low"], found["high"]) == pytest.approx((1.5 - half, 1.5 + half))
    assert found["verdict"] == HOLDS
    assert compare("a", value([0.0, 0.5, 1.0]), one)["verdict"] == FAILS
    close = compare("a", one, value([0.5, 0.5, 1.0]))  # 0.5, 1.5 and 2: above its standard deviation, and no more
    assert close["verdict"] == NOT_TOLD_APART
    assert close["low"] < 0 < close["high"]
    assert compare("a", value([1.0]), value([0.0]))["verdict"] == ONE_SEED
    assert compare("a", None, one)["verdict"] == "undefined"


def test_holm_marks_what_does_not_count_among_many():
    def family(*p):
        return [{"p": one, "text": "", "verdict": HOLDS} for one in p]

    told = family(0.04, 0.001, 0.02)  # at 0.05 / 3, / 2, / 1: 0.001 and 0.02 count, and so 0.04 does
    mark_family([*told, {"p": None, "text": ""}])
    assert [one["text"] for one in told] == ["", "", ""]
    told = family(0.04, 0.001, 0.03, 0.9)  # 0.03 is above 0.05 / 3, and takes 0.04 with it
    mark_family(told)
    assert [one["text"] for one in told] == [ALONE, "", ALONE, ""]


def test_the_world_is_as_its_scenes_say(world):
    part = world.training[0]
    assert len(part.pixels) == 12
    assert len(part.tokens) == 60
    assert int(part.tokens.max()) == world.vocabulary - 1  # the end token
    assert all((part.tokens == world.vocabulary - 1).sum(1) == 1)
    assert len(world.pretraining[0].tokens) == 48
    match = exact_match(part.dataset, range(12))
    assert torch.equal(part.positives.counts, match.sum(1))
    assert match[part.dataset.owner(), range(60)].all()
    assert world.classes.tokens.shape[:2] == (64, 80)
    again = draw_world(SIZES, [0])
    assert torch.equal(again.test.pixels, world.test.pixels)


def test_noise_moves_tokens_with_their_captions(world):
    clean, noisy = world.training[0], world.training[0].noisy(0.5, 0)
    tokens = dict(zip(clean.dataset.flat(), clean.tokens))
    assert noisy.dataset.flat() != clean.dataset.flat()
    for text, row in zip(noisy.dataset.flat(), noisy.tokens):
        assert torch.equal(tokens[text], row)


def test_batches_come_in_finetunes_order(world):
    part = world.training[0]
    loader = MemoryLoader(part, 7, seed=3)
    order = epoch_order(loader.n_pairs, 7, seed=3, epoch=2)
    for batch, pairs in zip(loader.epoch(2), order):
        assert batch.pair_index.tolist() == pairs.tolist()
        assert batch.image_index.tolist() == [part.dataset.owner()[pair] for pair in pairs]
        assert batch.images.shape == (7, 3, 16, 16)
    assert len(list(loader.epoch(0, start_step=loader.steps - 1))) == 1


def test_a_tiny_run_and_going_on_with_it(tmp_path, capsys):
    torch.set_num_threads(1)
    content = claims.run(STUDY, tmp_path / "claims", n_seeds=1)
    assert len(content["trainings"]) == 21
    assert [len(claim["comparisons"]) for claim in content["claims"]] == [6, 6, 3, 10, 6, 4]
    written = json.loads((tmp_path / "claims" / "claims.json").read_text())
    assert [claim["title"] for claim in written["claims"]] == [claim["title"] for claim in content["claims"]]
    page = (tmp_path / "claims" / "report.html").read_text()
    assert page.count("<svg") == 9
    out = capsys.readouterr().out
    assert "left]" in out
    assert "4. What the uncertainty" in out

    lost = tmp_path / "claims" / "trainings" / "vse-seed-0.json"
    stamps = {path: path.stat().st_mtime_ns for path in lost.parent.iterdir() if path != lost}
    before = json.loads(lost.read_text())["found"]
    os.remove(lost)
    time.sleep(0.01)
    claims.run(STUDY, tmp_path / "claims", n_seeds=1)
    assert {path: path.stat().st_mtime_ns for path in lost.parent.iterdir() if path != lost} == stamps
    kept = lost.read_text()
    after = json.loads(kept)["found"]
    assert after["retrieval"] == before["retrieval"]  # the same training gives the same numbers
    assert "20 of 21 trainings are kept" in capsys.readouterr().out

    os.remove(lost)
    with pytest.raises(UserError, match="No seed is finished"):
        claims.run(STUDY, tmp_path / "claims", n_seeds=1, report_only=True)
    lost.write_text(kept)
    assert claims.run(STUDY, tmp_path / "claims", report_only=True)["seeds"] == [0]
    told = (tmp_path / "claims" / "claims.md").read_text()
    assert "\n| PCME++ | " in told
    assert told.count("###") == 6

    with pytest.raises(UserError, match="other settings"):
        Archive(tmp_path / "claims", Scenes())


def test_a_kept_training_with_other_values_is_not_used(tmp_path):
    archive = Archive(tmp_path, STUDY)
    archive.write(Training("vse", 0, "vse"), {"x": 1})
    assert archive.read(Training("vse", 0, "vse")) == {"x": 1}
    assert archive.read(Training("vse", 0, "vse", chosen=(("lr", 0.1),))) is None
    assert archive.read(Training("vse", 1, "vse")) is None


def test_arguments_are_checked():
    with pytest.raises(UserError, match="seeds"):
        claims.main(["--seeds", "0"])
