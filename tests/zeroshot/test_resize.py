"""`--resize` of every command: uint8 of either kind reaches the model; what changes pixels works on exact floats."""

import json

import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2

from probemb.data.captions.find import find_captions
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.uncertainty import erase
from probemb.models import create_model, load_model, save_model
from tools.make_scenes import Plan, make
from zeroshot import composed, ellipses, localisation, retrieval, set_algebra, union
from zeroshot.config import AlgebraConfig
from zeroshot.opening import Opened

BOXES, CONCEPTS = Plan(train=0, val=8, classes_images=0, size=48, boxes=True), 1000
COMMANDS = {
    "retrieval": (retrieval.main, "val", "--erased=0", "--rankings=mean", "--no-split"),
    "ellipses": (ellipses.main, "val", "--split=null", "--groups=4"),
    "localisation": (localisation.main, "entities", "--workers=0", "--grid.scales=[0.8]", "--grid.ratios=[1.0]"),
    "union": (union.main, "visual_genome", "--workers=0", "--areas=[0.9]", "--rankings=mean"),
    "composed": (composed.main, "compositions", "--workers=0", "--k=2", "--setup=seen", "--queries=8"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    out = tmp_path_factory.mktemp("world")
    make(BOXES, out / "scenes", workers=1)
    make(Plan(train=0, val=0, classes_images=0, size=48, compositions=CONCEPTS), out / "composed", workers=1)
    (out / "composed" / "compositions").rename(out / "scenes" / "compositions")
    torch.manual_seed(0)
    save_model(create_model("ViT-Micro-32", composer="product"), out / "model")
    return out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_resizes_as_it_is_told(world, tmp_path, name, monkeypatch):
    main, data, *options = COMMANDS[name]
    whole, seen = Embedder.pixels, {}

    def noted(embedder, batches, *others):
        batches = list(batches)
        seen.setdefault(resize, []).extend(image for batch in batches for image in batch)
        return whole(embedder, batches, *others)

    monkeypatch.setattr(Embedder, "pixels", noted)
    for resize in ("default", "tensor"):
        words = [f"--model={world / 'model'}", f"--data={world / 'scenes' / data}", f"--out={tmp_path / resize}"]
        more = [] if resize == "default" else [f"--resize={resize}"]
        assert main([*words, "--device=cpu", *options, *more]) == 0
        config = json.loads((tmp_path / resize / "results.json").read_text())["config"]
        assert config["resize"] == ("tensor" if more else "pil")
    pil, tensor = (torch.stack(images) for images in seen.values())
    assert pil.dtype == tensor.dtype == torch.uint8
    away = (pil.int() - tensor.int()).abs()
    assert 0 < away.max() <= 8  # lines of a pixel's width overshoot
    assert away.float().mean() < 0.5


@pytest.fixture(scope="module")
def both_kinds(world):
    """Embedders that read uint8, and floats from open_clip's own transform."""
    model, tokenizer, transforms = load_model(world / "model")
    floats = image_transform_v2(PreprocessCfg(**model.config["preprocess"]), is_train=False)
    return [Embedder(model, tokenizer, transform) for transform in (transforms.evaluate, floats)]


def test_erased_pixels_are_those_of_floats(world, both_kinds):
    captions = find_captions(world / "scenes" / "val", None)
    found, expected = (erase(embedder, captions, range(8)) for embedder in both_kinds)
    assert found["pixels"] == expected["pixels"]
    assert len(set(found["pixels"]["uncertainty"])) > 5


def test_mixed_pixels_are_those_of_floats(world, both_kinds, tmp_path):
    captions = find_captions(world / "scenes" / "val", None)
    found, expected = (
        set_algebra.measure(AlgebraConfig(inputs=6, examples=1), Opened(embedder, captions, tmp_path))
        for embedder in both_kinds
    )
    assert found["mixing"] == expected["mixing"]
    assert found["erasing"] == expected["erasing"]
