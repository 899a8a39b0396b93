"""Locked towers and learning rates by layer: engines of every stage against plain torch, and their checkpoints."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from pretrain.config import Engine
from pretrain.engine.checkpoint import load_checkpoint
from pretrain.engine.engine import make_engine, start_deepspeed
from pretrain.engine.state import full_state_dict
from pretrain.schedules import learning_rate, set_learning_rate
from pretrain.trainer import Trainer
from probemb.models import no_weight_decay
from probemb.models.layers import freeze_backbones, layer_rates
from tests.pretrain.engine.saving import save_checkpoint
from tests.pretrain.test_trainer import BATCH, CONFIG, CPU, LOSSES, STEPS, batches, plain_loss, tiny
from tests.ranks import run_ranks

DECAY = 0.5


def locked(objective):
    model = tiny(objective)
    freeze_backbones(model, True, objective == "pcmepp", image_groups=0 if objective == "clip" else 2)
    return model


def of(objective, **engine):
    optimizer = replace(CONFIG.optimizer, layer_decay=DECAY)
    return replace(CONFIG, objective=objective, loss=LOSSES[objective], optimizer=optimizer, engine=Engine(**engine))


@cache
def plain_torch(objective):
    model, o = locked(objective), of(objective).optimizer
    rates = layer_rates(model, DECAY)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [{"params": [p], "weight_decay": 0.0 if no_weight_decay(n, p) else o.weight_decay} for n, p in named]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)
    start = {n: p.detach().clone().numpy() for n, p in model.named_parameters()}
    for step, (images, tokens) in enumerate(batches(model), 1):
        for group, (name, _) in zip(optimizer.param_groups, named):
            group["lr"] = learning_rate(o, step * BATCH, STEPS * BATCH) * rates[name]
        loss = plain_loss(objective, model(images, tokens))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in named], o.clip_grad_norm)
        optimizer.step()
    return start, {n: p.detach().numpy() for n, p in model.named_parameters()}, {n for n, _ in named}


def on_engine(rank, world, objective, stage, parts, folder):
    start_deepspeed()
    config, n = of(objective, zero_stage=stage, accumulation=parts), BATCH // world
    model = locked(objective)
    model.set_grad_checkpointing(parts > 1)
    data = list(batches(model))
    engine = make_engine(model, config, "fp32", CPU, persistent_elements=0)
    for step, (images, tokens) in enumerate(data, 1):
        set_learning_rate(engine.optimizer, learning_rate(config.optimizer, step * BATCH, STEPS * BATCH))
        fit = Trainer(engine, None, config, CPU, STEPS)
        assert fit.train_step(images[rank * n : (rank + 1) * n], tokens[rank * n : (rank + 1) * n]) is not None
        if step == STEPS - 1:
            path = save_checkpoint(engine, folder, step, {})
    whole = full_state_dict(engine)
    load_checkpoint(engine, path)  # the last step once more
    set_learning_rate(engine.optimizer, learning_rate(config.optimizer, STEPS * BATCH, STEPS * BATCH))
    fit.train_step(images[rank * n : (rank + 1) * n], tokens[rank * n : (rank + 1) * n])
    again = full_state_dict(engine)
    return {name: (x.numpy(), again[name].numpy()) for name, x in whole.items()}


@pytest.mark.parametrize(
    ("objective", "world", "stage", "parts"),
    [("clip", 2, 0, 1), ("pcmepp", 2, 1, 2), ("clip", 2, 2, 2), ("siglip", 4, 2, 1), ("pcmepp", 2, 3, 1)],
)
def test_steps_of_a_locked_model_equal_plain_torch(objective, world, stage, parts, tmp_path):
    start, expected, names = plain_torch(objective)
    found = run_ranks(world, on_engine, objective, stage, parts, tmp_path)[0]
    assert 0 < len(names) < len(expected)
    for name, value in expected.items():
        once, again = found[f"model.{name}"]
        np.testing.assert_allclose(once, value, atol=2e-4, err_msg=name)
        np.testing.assert_array_equal(once, again, err_msg=name)
        assert (once == start[name]).all() or name in names, name
