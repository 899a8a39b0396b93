"""A locked image tower: its trunk stays, its features are kept, and what is saved reads pixels again."""

import pytest
import torch

from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.rankings import evaluate_retrieval
from probemb.models import load_model
from tests.finetune.runs import metrics, run_here, saved
from tests.world import captioned  # noqa: F401 - fixture

LOCKED = {"model.lock_image": "true", "optimizer.freeze-epochs": 0, "model.n_unc_layers": 0, "mix.ratio": 0}


def options(out, data, **more):
    """Of a run whose image tower stays as it is."""
    return {**LOCKED, "data.path": data, "data.train": "train", "data.validation": "val", "out": out, **more}


def test_the_trunk_stays_and_the_rest_trains(scenes, tmp_path):
    for name, more in (("short", {"stop-after-epochs": 1}), ("long", {})):
        assert run_here(options(tmp_path / name, scenes, **more) | {"data.validation": "null"}) == 0
    model = load_model(tmp_path / "long").model
    short, long = saved(tmp_path / "short"), saved(tmp_path / "long")
    moved = {name for name in long if not torch.equal(short[name], long[name])}
    assert {model.place(name)[:2] for name in moved} >= {("image", "head"), ("text", "trunk"), ("text", "head")}
    assert ("image", "trunk") not in {model.place(name)[:2] for name in moved}


def test_features_are_kept_and_the_saved_model_reads_pixels(scenes, tmp_path, capsys):
    words = options(tmp_path / "run", scenes, **{"data.cache_features": tmp_path / "features"})
    assert run_here(words) == 0
    assert "features: " in capsys.readouterr().err
    assert len(list((tmp_path / "features").iterdir())) == 2  # of both splits
    model, tokenizer, transforms = load_model(tmp_path / "run")
    captions = find_captions(scenes, "val")
    found = evaluate_retrieval(Embedder(model, tokenizer, transforms.evaluate), captions)
    best = max(line["rsum"] for line in metrics(tmp_path / "run") if "rsum" in line)
    assert found["rsum"] == pytest.approx(best, abs=3)  # the ranking of float16's features may differ a little
    again = options(tmp_path / "again", scenes, **{"data.cache_features": tmp_path / "features"})
    assert run_here(again) == 0
    assert "features: " not in capsys.readouterr().err
    for name, tensor in saved(tmp_path / "run").items():
        assert torch.equal(tensor, saved(tmp_path / "again")[name]), name


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"model.lock_image": "false"}, "the tower is trained"),
        ({"mix.ratio": 0.5}, "no pixels that mix.ratio could change"),
        ({"augment.cutout": 0.2}, "no pixels that augment.cutout could change"),
        ({"augment.hflip": 0.5}, "no pixels that augment.hflip could change"),
        ({"augment.scale": "[0.5, 1.0]"}, "no pixels that augment.scale could change"),
        ({"model.n_unc_layers": 1}, "blocks of its own"),
    ],
)
def test_what_does_not_go_together_is_refused(scenes, tmp_path, more, what):
    with pytest.raises(UserError, match=what):
        run_here(options(tmp_path / "run", scenes, **{"data.cache_features": tmp_path / "features", **more}))
    assert not (tmp_path / "run").exists()
