"""Locks against open_clip's own, and learning rates by layer against their definition."""

import pytest
import timm
import torch

from pretrain.config import Optimizer
from pretrain.engine.engine import parameter_groups
from probemb.models import create_model
from probemb.models.architectures import architecture, build_stock
from probemb.models.layers import freeze_backbones, layer_rates
from probemb.models.towers.timm_image import TimmTower

NAME = "ViT-Micro-32"  # two blocks in each tower
LAST_NORM = ("visual.ln_post.", "text.ln_final.")


def trained(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(("groups", "tower"), [(0, "image"), (1, "text"), (2, "image"), (3, "text")])
def test_locks_are_open_clips(tower, groups):
    theirs = build_stock(architecture(NAME))
    getattr(theirs, f"lock_{tower}_tower")(groups)
    ours = create_model(NAME, n_unc_layers=1)
    before = trained(ours)
    assert freeze_backbones(ours, tower == "image", tower == "text", groups, groups)
    own = before - set(dict(theirs.named_parameters()))
    assert {"uncertainty_transformer", "log_var_head"} <= {name.split(".")[1] for name in own if "." in name}
    expected = (trained(theirs) & before) | own
    if groups == 1:  # there the last norm belongs to the last block
        expected |= {name for name in before if name.startswith(LAST_NORM[tower == "text"])}
    assert trained(ours) == expected
    assert freeze_backbones(ours, False)
    assert trained(ours) == before


def test_rates_fall_from_the_last_block_to_the_embeddings():
    model = create_model(NAME, n_unc_layers=1)
    rates = layer_rates(model, 0.5)
    expected = {
        **dict.fromkeys(("visual.conv1.weight", "text.token_embedding.weight", "text.positional_embedding"), 0.125),
        **dict.fromkeys(("visual.transformer.resblocks.0.ln_1.weight", "text.transformer.resblocks.0.ln_1.bias"), 0.25),
        **dict.fromkeys(("visual.transformer.resblocks.1.ln_1.weight", "text.transformer.resblocks.1.ln_1.bias"), 0.5),
        "visual.uncertainty_transformer.resblocks.0.ln_1.weight": 0.5,
        **dict.fromkeys(("visual.proj", "visual.ln_post.weight", "text.ln_final.bias", "logit_scale", "scale"), 1.0),
        "visual.log_var_head.weight": 1.0,
    }
    assert {name: rates[name] for name in expected} == expected
    assert layer_rates(model, 0.5, stem=False)["visual.conv1.weight"] == 1.0
    assert set(layer_rates(model, 1.0).values()) == {1.0}


def test_a_transformer_of_timm_has_the_depths_of_open_clips():
    """timm counts the norms before and behind the blocks to the last block."""
    with torch.device("meta"):
        stock = timm.create_model("vit_base_patch32_clip_224", num_classes=0, depth=2)
    tower = TimmTower.__new__(TimmTower)
    torch.nn.Module.__init__(tower)
    tower.trunk = stock
    places = {name: (tower.place(name).depth, tower.in_stem(name)) for name, _ in tower.named_parameters()}
    expected = {"norm.weight": (0, False), "blocks.1.norm1.weight": (1, False), "blocks.0.mlp.fc1.bias": (2, False)}
    expected |= dict.fromkeys(("norm_pre.bias", "patch_embed.proj.weight", "pos_embed", "cls_token"), (3, True))
    assert {name: places[f"trunk.{name}"] for name in expected} == expected


def test_groups_have_every_trained_parameter_once():
    model = create_model(NAME, n_unc_layers=1)
    freeze_backbones(model, True)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, Optimizer(weight_decay=0.3, layer_decay=0.5))
    held = [names[id(p)] for group in groups for p in group["params"]]
    assert sorted(held) == sorted(trained(model))
    assert [group["weight_decay"] for group in groups] == sorted((g["weight_decay"] for g in groups), reverse=True)
    rates = layer_rates(model, 0.5)
    assert all(rates[names[id(p)]] == group["multiplier"] for group in groups for p in group["params"])
    assert len(parameter_groups(create_model(NAME), Optimizer())) == 2
