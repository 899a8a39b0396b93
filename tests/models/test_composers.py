"""Composers against the authors' code and loops."""

import pytest
import torch

from probemb import Gaussian
from probemb.compose import COMPOSERS, MRNComposer

# The reference's parameter names, and the composers' own.
NAMES = {
    "mlp": {"combiner.0": "layers.0", "combiner.1": "layers.1", "combiner.3": "layers.3"},
    "relationship": {"relationship.0": "relation.0", "relationship.1": "relation.1", "fc.0": "out"},
    "film": {
        "fc11.0": "widen.0", "fc12.0": "modulated.0", "fc12.1": "modulated.1",
        "fc2_gamma.0": "scale", "fc2_beta.0": "shift", "fc.0": "out",
    },
    "mrn": {
        "residual_conv": "blocks.0.residual",
        "f1_conv1": "blocks.0.of_first.0", "f1_conv2": "blocks.0.of_first.2",
        "f2_conv1": "blocks.0.of_second.0", "f2_conv2": "blocks.0.of_second.2",
    },
    "tirg": {
        **{f"gated_feature_composer.{i}": f"gate.{i - 1}" for i in (1, 3)},
        **{f"res_info_composer.{i}": f"residual.{i - 1}" for i in (1, 3, 5)},
    },
}  # fmt: skip


def load(name, arrays, prefix):
    """The composer with the reference's parameters; every one of them is used, and every one of ours is set."""
    dim = 8 if name == "mlp" else 6
    composer = MRNComposer(dim, blocks=1) if name == "mrn" else COMPOSERS[name](dim)
    state = {}
    for key, array in arrays.items():
        if not key.startswith(prefix):
            continue
        value, key = torch.from_numpy(array), key.removeprefix(prefix)
        if key == "a":  # the other two are never used
            state |= {"gate_weight": value[0], "residual_weight": value[1]}
            continue
        module, leaf = key.rsplit(".", 1)
        state[f"{NAMES[name][module]}.{leaf}"] = value.flatten(1) if value.dim() == 4 else value
    composer = composer.double()
    composer.load_state_dict(state, strict=True)
    return composer


def points(features):
    """(k, N, D) features as parts (N, k, D)."""
    mean = torch.from_numpy(features).transpose(0, 1)
    return Gaussian(mean, torch.full_like(mean, 7.0))


@pytest.mark.parametrize("name", ["relationship", "film", "mrn", "tirg"])
def test_authors_rivals(parity, name):
    arrays = parity("08b_mpc_competitors")
    for case, k, training in (("eval_k2", 2, False), ("eval_k3", 3, False), ("train_k2", 2, True)):
        composer = load(name, arrays, f"{name}__param__").train(training)
        found = composer(points(arrays["features"][:k]))
        expected = torch.from_numpy(arrays[f"{name}__{case}"])
        torch.testing.assert_close(found.gaussian.mean, expected, rtol=1e-9, atol=1e-12)
        assert not found.gaussian.log_var.any()
        assert not found.log_normaliser.any()
    whole = composer.eval()(points(arrays["features"]))
    one = composer(points(arrays["features"][:, 2:3]))  # a batch of one is not squeezed away
    torch.testing.assert_close(one.gaussian.mean, whole.gaussian.mean[2:3])


def test_authors_probabilistic_composers(parity):
    arrays = parity("08a_mpc")
    parts = Gaussian(*(torch.from_numpy(arrays[name]).transpose(0, 1) for name in ("means", "logvars")))
    found = {
        "pcme_addition": COMPOSERS["addition"](8)(parts),
        "pcme_mlp": load("mlp", arrays, "pcme_mlp__param__").eval()(parts),
        "mpc_k3": COMPOSERS["product"](8)(parts),
    }
    for name, product in found.items():
        for value, part in ((product.gaussian.mean, "mean"), (product.gaussian.log_var, "logvar")):
            torch.testing.assert_close(value, torch.from_numpy(arrays[f"{name}__{part}"]), atol=1e-6, rtol=0)
    expected = torch.from_numpy(arrays["mpc_k3__logZ_total"])
    torch.testing.assert_close(found["mpc_k3"].log_normaliser, expected, rtol=1e-5, atol=1e-5)  # they add 1e-6


@pytest.mark.parametrize("name", COMPOSERS)
def test_a_single_part_is_its_own_composition(name):
    parts = Gaussian(torch.randn(3, 1, 16), torch.randn(3, 1, 16))
    product = COMPOSERS[name](16).eval()(parts)
    assert torch.equal(product.gaussian.mean, parts.mean[:, 0])
    assert not product.log_normaliser.any()


@pytest.mark.parametrize("name", COMPOSERS)
def test_autocast_changes_nothing_and_gradients_reach_everything(name):
    torch.manual_seed(0)
    composer = COMPOSERS[name](8).eval()  # in training a bias before a batch norm has no gradient
    parts = Gaussian(torch.randn(6, 3, 8).requires_grad_(), torch.randn(6, 3, 8).requires_grad_())
    product = composer(parts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = composer(parts)
    assert torch.equal(inside.gaussian.mean, product.gaussian.mean)
    (product.gaussian.mean.square().sum() + product.gaussian.log_var.square().sum()).backward()
    for x in (parts.mean, *composer.parameters(), *([parts.log_var] if composer.probabilistic else [])):
        assert x.grad is not None
        assert x.grad.abs().max() > 0
