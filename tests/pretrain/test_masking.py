"""Patch dropout and masked copies: the draws, and steps on engines against one process on the whole batch."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from pretrain.config import Config, Engine, Model
from pretrain.objectives import ProLIP, draw_masks
from probemb import Gaussian
from probemb.losses import prolip_loss
from probemb.losses.prolip import inclusion_loss
from probemb.models.encoder import chances
from tests.devices import elsewhere
from tests.ranks import run_ranks
from tests.steps import random_pairs, take_step, trainer_of

B = 32
CONFIG = Config(
    batch_size=B,
    objective="prolip",
    loss=ProLIP(vib=1e-2, inclusion=1e-2, masked_inclusion=0.5, inclusion_scale=2.0),
    model=Model(name="ViT-Micro-32", patch_dropout=0.5),
)


def model_and_batch(config=CONFIG):
    torch.manual_seed(0)
    return config.create_model(), *random_pairs(B)


def test_chances_are_uniform_and_functions_of_their_place():
    draws = chances(7, torch.arange(1000))(100)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = torch.histc(draws, 10, 0, 1)
    assert (counts - 10_000).abs().max() < 400  # four deviations
    for shift in (draws[1:] * draws[:-1], draws[:, 1:] * draws[:, :-1]):
        assert shift.mean().item() == pytest.approx(0.25, abs=0.003)
    assert torch.equal(chances(7, torch.arange(500, 510))(50), draws[500:510, :50])
    assert (chances(8, torch.arange(1000))(100) == draws).float().mean() < 1e-3


def test_masks_depend_on_the_samples_seen_and_keep_their_shares():
    model, images, tokens = model_and_batch()
    masks = draw_masks(CONFIG, model, images, tokens, 320)
    n = model.image_tower.n_tokens - 1
    assert masks.kept.shape == (B, round(n / 2))
    assert masks.masked_image.shape == (B // 8, round(n / 4))
    assert len(masks.masked_text) == B // 8
    assert masks.masked_text.shape[1] < model.context_length / 2
    for one, other in zip(masks, draw_masks(CONFIG, model, images, tokens, 320)):
        assert torch.equal(one, other)
    assert not torch.equal(masks.kept, draw_masks(CONFIG, model, images, tokens, 352).kept)
    assert not torch.equal(masks.kept, draw_masks(replace(CONFIG, seed=1), model, images, tokens, 320).kept)
    bare = replace(CONFIG, model=Model(name="ViT-Micro-32"), loss=ProLIP())
    assert draw_masks(bare, model, images, tokens, 0) == (None, None, None)


@cache
def by_hand():
    """Loss and gradients of one process, from the library's functions."""
    model, images, tokens = model_and_batch()
    masks, o = elsewhere(draw_masks)(CONFIG, model, images, tokens, 0), CONFIG.loss
    image, text = elsewhere(model.encode_image)(images, kept=masks.kept), model.encode_text(tokens)
    a, b = model.match_scalars()
    options = dict(vib=o.vib, inclusion=o.inclusion, inclusion_scale=o.inclusion_scale)
    plain = prolip_loss(image, text, 2 * a, b - 2 * a, **options).loss
    copies = (
        (image, model.encode_image(images[::8], kept=masks.masked_image)),
        (text, elsewhere(model.encode_text)(tokens[::8], kept=masks.masked_text)),
    )
    inside = [inclusion_loss(Gaussian(g.mean[::8], g.log_var[::8]), copy, o.inclusion_scale) for g, copy in copies]
    loss = plain + o.masked_inclusion * sum(inside)
    loss.backward()
    return loss.item(), [x.item() for x in inside], {n: p.grad.numpy() for n, p in model.named_parameters()}


def on_engine(rank, world, stage, parts):
    model, images, tokens = model_and_batch()
    trainer = trainer_of(replace(CONFIG, engine=Engine(zero_stage=stage, accumulation=parts)), model)
    mine = slice(rank * B // world, (rank + 1) * B // world)
    found = take_step(trainer, images[mine], tokens[mine])
    return [found[name] for name in ("loss", "image_inclusion", "text_inclusion")], found["gradient_norm"]


@pytest.mark.parametrize(("world", "stage", "parts"), [(2, 1, 2), pytest.param(2, 3, 2, marks=pytest.mark.slow)])
def test_a_step_is_that_of_one_process_with_the_same_patches(world, stage, parts):
    loss, inside, grads = by_hand()
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    for values, found in run_ranks(world, on_engine, stage, parts):
        np.testing.assert_allclose(values, [loss, *inside], rtol=2e-5)
        assert found == pytest.approx(norm, rel=1e-4)
