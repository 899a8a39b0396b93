"""Each objective through the trainer: several ranks against one, rings against gathered losses, its kind of model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pretrain.config import Config, Model
from pretrain.objectives import CLIP, OBJECTIVES, PCMEPlusPlus, ProLIP, SigLIP
from pretrain.trainer import loss_and_terms
from probemb import Gaussian, distributed
from probemb.options import to_dict
from tests.devices import elsewhere
from tests.losses.points import pairs
from tests.ranks import run_ranks

SCALE, BIAS = 7.0, -3.0
SCALARS = {"cosine": (SCALE, SCALE / 2, SCALE + BIAS)}
LOSSES = {
    "pcmepp": PCMEPlusPlus(clip=0.7, match=0.4, vib=1e-2, exchange="ring"),
    "pcmepp, gathered": PCMEPlusPlus(clip=0.7, match=0.4, vib=1e-2),
    "pcmepp, pseudo-positives": PCMEPlusPlus(pseudo_positive=0.1, vib=1e-2),
    "pcmepp, wasserstein2": PCMEPlusPlus(distance="wasserstein2", exchange="ring"),
    "clip": CLIP(exchange="ring"),
    "clip, gathered": CLIP(),
    "siglip": SigLIP(),
    "prolip": ProLIP(vib=0.1, inclusion=0.2, inclusion_scale=3.0),
}


def scalars_of(name: str) -> torch.Tensor:
    match = LOSSES[name].model_options.get("match")
    return torch.tensor(SCALARS.get(match, (SCALE, 2.0, 1.5)), dtype=torch.float64)


def through_the_trainer(name: str, image: Gaussian, text: Gaussian):
    """This rank's loss, terms and gradients."""
    leaves = [x.clone().requires_grad_() for x in (image.mean, image.log_var, text.mean, text.log_var)]
    leaves.append(scalars_of(name).requires_grad_())
    loss, terms = elsewhere(loss_and_terms)(LOSSES[name], leaves)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return loss.item(), terms, [g.numpy() for g in grads]


def share(rank: int, world: int, total: int) -> dict:
    """Every objective on this rank's items, and one of them by rank 0 alone."""
    image, text = pairs(total, 4, seed=3)
    rows = slice(rank * total // world, (rank + 1) * total // world)
    found = {name: through_the_trainer(name, image[rows], text[rows])[::2] for name in LOSSES}
    with distributed.alone():  # as the validation loss
        alone = through_the_trainer("prolip", image, text)[0] if rank == 0 else None
    return {**found, "alone": alone}


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 5, 8))])
def test_ranks_equal_one_process(world):
    total = 3 * world
    whole, found = share(0, 1, total), run_ranks(world, share, total)
    assert found[0]["alone"] == pytest.approx(whole["prolip"][0], rel=1e-12)
    for name in LOSSES:
        value, grads = whole[name]
        assert np.mean([one[name][0] for one in found]) == pytest.approx(value, rel=1e-12), name
        for i, expected in enumerate(grads[:4]):
            rows = np.concatenate([one[name][1][i] for one in found])
            np.testing.assert_allclose(rows / world, expected, rtol=0, atol=1e-12, err_msg=name)
        means = np.mean([one[name][1][4] for one in found], axis=0)
        np.testing.assert_allclose(means, grads[4], rtol=1e-10, atol=1e-12, err_msg=name)


def test_each_makes_its_kind_of_model():
    for name, objective in OBJECTIVES.items():
        loss = objective()
        config = Config(objective=name, loss=loss)
        model = replace(config, model=Model(name="ViT-Micro-32")).create_model()
        assert model.objective == name
        assert model.match_model.temperature is not None
        assert model.probabilistic == objective.probabilistic
        assert model.config["n_unc_layers"] == (2 if objective.probabilistic else 0)
        scalars = {n for n, _ in model.named_parameters() if "." not in n}
        sigmoid = name in ("siglip", "prolip")
        assert scalars == {"logit_scale", *(["logit_bias"] if sigmoid else ["scale", "shift"])}
        if sigmoid:
            assert model.inverse_temperature().item() == pytest.approx(10)
            assert model.match_model.numbers == pytest.approx((5, 0), abs=1e-5)
        assert to_dict(config)["loss"] == vars(loss)
        if objective.probabilistic:
            start = replace(config, loss=replace(loss, log_var=-3.0), model=Model(name="ViT-Micro-32")).create_model()
            log_var = start.encode_text(torch.ones(2, start.context_length, dtype=torch.long)).log_var
            assert log_var.mean().item() == pytest.approx(-3, abs=0.1)
    assert PCMEPlusPlus(clip=0).model_options["temperature_trained"] is False
