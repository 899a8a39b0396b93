"""Validation loss and retrieval while training, on real engines, against one model and plain loops."""

import numpy as np
import pytest
import torch

from pretrain.config import Config, Data, Engine, Evaluate
from pretrain.evaluate import make_evaluators
from probemb import create_model
from probemb.data.captions.find import find_captions
from probemb.distances import csd
from probemb.errors import UserError
from probemb.losses import clip_loss, pairwise_match_loss
from probemb.models import create_tokenizer, create_transforms
from tests.ranks import run_ranks
from tests.steps import engine_of
from tools.make_scenes.command import Plan, make


def tiny():
    torch.manual_seed(0)
    return create_model("ViT-Micro-32", n_unc_layers=1)


def measured(rank, world, config):
    """The values, and how often the rank called `meet`; or the error, as text."""
    model, met = tiny(), []
    transform, tokenizer = create_transforms(model).evaluate, create_tokenizer(model)
    engine, (validator,) = engine_of(config, model), make_evaluators(config, transform, tokenizer, rank, world)
    try:
        return validator(engine, lambda: met.append(None)), len(met)
    except UserError as error:
        return str(error), len(met)


def by_hand(path, batch):
    """Recall from the whole distance matrix, and the losses of whole batches."""
    model, captions = tiny().eval(), find_captions(path, "val")
    transform, tokenizer = create_transforms(model).evaluate, create_tokenizer(model)
    pixels = torch.stack([transform(captions.images.open(i)) for i in range(len(captions))])
    with torch.no_grad():
        images, texts = model.encode_image(pixels), model.encode_text(tokenizer(captions.flat()))
        distance_NM, owner = csd(images, texts), torch.tensor(captions.owner())
        i2t = [owner[row.argsort()[:5]].eq(i).any() for i, row in enumerate(distance_NM)]
        t2i = [column.argsort()[:5].eq(owner[j]).any() for j, column in enumerate(distance_NM.T)]
        first = torch.tensor([captions.owner().index(i) for i in range(len(captions))])
        losses = []
        for start in range(0, len(captions) - batch + 1, batch):
            rows = slice(start, start + batch)
            image, text = images[rows], texts[first[rows]]
            match = pairwise_match_loss(image, text, scale=model.scale, shift=model.shift, vib=1e-4)
            losses.append(clip_loss(image.mean, text.mean, model.logit_scale.exp()).loss + match.loss)
    percent = [100 * torch.stack(hits).float().mean().item() for hits in (i2t, t2i)]
    return torch.stack(losses).mean().item(), *percent


@pytest.mark.parametrize(("world", "stage"), [(2, 1), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_loss_and_recall_are_those_of_one_model_on_all_pairs(world, stage, tmp_path):
    """Eleven images: shares of the ranks, and their numbers of batches, differ."""
    make(Plan(train=0, val=11, classes_images=0, size=32, shard_size=32), tmp_path / "world", workers=1)
    pairs = Evaluate(pairs=str(tmp_path / "world"), batch_size=2)
    config = Config(batch_size=6, evaluate=pairs, engine=Engine(zero_stage=stage), data=Data(workers=0))
    loss, i2t, t2i = by_hand(tmp_path / "world", batch=6)
    found = run_ranks(world, measured, config)
    assert len({met for _, met in found}) == 1  # or a rank would wait for others in vain
    for values, _ in found:
        np.testing.assert_allclose(values["validation_loss"], loss, rtol=1e-5)
        np.testing.assert_allclose([values["i2t_r5"], values["t2i_r5"]], [i2t, t2i], rtol=1e-5)
        assert 0 < values["rsum"] < 600


@pytest.mark.parametrize(("max_bad", "refused"), [(0.2, True), pytest.param(0.4, False, marks=pytest.mark.slow)])
def test_unreadable_images_are_judged_over_all_ranks(max_bad, refused, tmp_path):
    """Two of six, both of rank 1's three."""
    make(Plan(train=0, val=6, classes_images=0, size=32, shard_size=32), tmp_path / "world", workers=1)
    (tar,) = tmp_path.glob("world/val/*.tar")
    places = find_captions(str(tmp_path / "world"), "val").images.places
    with tar.open("r+b") as file:
        for bad in (1, 3):
            file.seek(places[bad].offset)
            file.write(bytes(places[bad].size))
    given = Evaluate(pairs=str(tmp_path / "world"), batch_size=2, max_bad=max_bad)
    found = run_ranks(2, measured, Config(batch_size=6, evaluate=given, data=Data(workers=0)))
    assert len({met for _, met in found}) == 1
    for values, _ in found:
        if refused:
            assert values.startswith("2 of 6 images of ")
            assert "allow more than 20% with --evaluate.max-bad" in values
        else:
            assert 0 < values["rsum"] < 600
