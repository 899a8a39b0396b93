"""Locks against open_clip's own, and learning rates by layer against their definition."""

import open_clip
import pytest

from probemb.models import create_model
from probemb.models.dual_encoder import freeze_backbones, layer_rates

NAME = "ViT-Micro-32"  # two blocks in each tower
LAST_NORM = ("visual.ln_post.", "text.ln_final.")


def trained(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(("groups", "tower"), [(0, "image"), (1, "text"), (2, "image"), (3, "text")])
def test_locks_are_open_clips(tower, groups):
    theirs = open_clip.create_model(NAME, force_custom_text=True, nonscalar_logit_scale=True)
    getattr(theirs, f"lock_{tower}_tower")(groups)
    ours = create_model(NAME, n_unc_layers=1)
    before = trained(ours)
    freeze_backbones(ours, tower == "image", tower == "text", groups, groups)
    own = before - set(dict(theirs.named_parameters()))
    assert {"uncertainty_transformer", "log_var_head"} <= {name.split(".")[1] for name in own if "." in name}
    expected = (trained(theirs) & before) | own
    if groups == 1:  # there the last norm belongs to the last block
        expected |= {name for name in before if name.startswith(LAST_NORM[tower == "text"])}
    assert trained(ours) == expected
    freeze_backbones(ours, False)
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
