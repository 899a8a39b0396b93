"""GPO against the authors' numbers, against a direct computation, and its two paths against each other."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from probemb.models.encoder import l2_normalize
from probemb.models.pooling import GPO, length_mask, positional_codes, size_augment_mask

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


def reference(parity, config, dtype):
    arrays = parity("03_gpo_pooling")
    take = {key.removeprefix(f"{config}__"): torch.as_tensor(value) for key, value in arrays.items()}
    state = {key.removeprefix("param__"): value for key, value in take.items() if key.startswith("param__")}
    hidden_dim, code_dim = state["gru.weight_hh_l0"].shape[1], state["gru.weight_ih_l0"].shape[1]
    gpo = GPO(code_dim, hidden_dim)
    gpo.load_state_dict(state)
    prefix = "f64__" if dtype == torch.float64 else "f32__"
    return gpo.to(dtype), take, {k.removeprefix(prefix): v for k, v in take.items() if k.startswith(prefix)}


@pytest.mark.parametrize("config", ["a", "b"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parity(parity, config, dtype):
    gpo, given, expected = reference(parity, config, dtype)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    features = given["features"].to(dtype).requires_grad_()
    pooled = gpo(features, length_mask(given["lengths"], features.shape[1]))
    (pooled * given["grad_output"]).sum().backward()
    assert_close(pooled, expected["pooled"], **tolerance)
    assert_close(l2_normalize(pooled), expected["l2norm_pooled"], **tolerance)
    assert_close(features.grad, expected["grad_features"], **tolerance)
    assert_close(positional_codes(*expected["pe"].shape), expected["pe"].float(), rtol=0, atol=0)
    lengths = given["lengths"].sort(descending=True)
    weights = gpo.weights(lengths.values.tolist())
    assert_close(weights, expected["pool_weights"][lengths.indices].squeeze(-1), **tolerance)
    for name, parameter in gpo.named_parameters():
        if f"grad__{name}" in expected:  # stored for float64; the large ones rounded to float32
            gradient = expected[f"grad__{name}"]
            rounding = 1e-6 if gradient.dtype == torch.float32 else TOLERANCE[dtype]
            assert_close(parameter.grad, gradient.to(dtype), rtol=rounding, atol=rounding)


def test_weights_sum_to_one_and_end_with_the_length():
    gpo = GPO(8, 8)
    weights = gpo.weights([6, 4, 1])
    assert_close(weights.sum(1), torch.ones(3))
    assert (weights[1, 4:] == 0).all()
    assert weights[2, 0] == 1


def test_equals_a_direct_computation_per_item():
    torch.manual_seed(0)
    gpo = GPO(8, 8).double()
    features = torch.randn(3, 7, 5, dtype=torch.float64)
    mask = torch.rand(3, 7) > 0.4
    pooled = gpo(features, mask)
    for item in range(3):
        kept = features[item, mask[item]]
        weights = gpo.weights([len(kept)])[0]
        ranked = np.sort(kept.numpy(), axis=0)[::-1]
        assert_close(pooled[item], torch.as_tensor((weights.detach().numpy()[:, None] * ranked).sum(0)))


def test_an_item_without_tokens_pools_to_zero_with_finite_gradients():
    gpo = GPO(8, 8)
    features = torch.randn(2, 5, 3, requires_grad=True)
    pooled = gpo(features, torch.tensor([[True] * 5, [False] * 5]))
    pooled.sum().backward()
    assert (pooled[1] == 0).all()
    assert torch.isfinite(features.grad).all()


def test_size_augment_drops_the_stated_share_and_repeats_from_its_seed():
    masks = [size_augment_mask(4000, 50, 0.2, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*masks)
    whole = masks[0].all(1)
    # p > 0.2 drops each token with probability 0.2·p; p averages 0.6 there. A few such images also stay whole.
    assert 0.2 < whole.float().mean() < 0.25
    assert masks[0][~whole].logical_not().float().mean().item() == pytest.approx(0.2 * 0.6, abs=0.01)
