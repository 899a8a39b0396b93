"""The product of normals against torch.distributions, numeric integration and the authors' code."""

import math

import pytest
import torch
from torch.distributions import Normal

from probemb import Gaussian, UserError
from probemb.compose import compose


def draw(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return Gaussian(
        torch.randn(*shape, generator=g, dtype=torch.float64), torch.randn(*shape, generator=g, dtype=torch.float64) - 1
    )


@pytest.mark.parametrize("k", [2, 3])
def test_reference_of_mpc(tensors, k):
    arrays = tensors("08a_mpc")
    parts = Gaussian(arrays["means"][:k].requires_grad_(), arrays["logvars"][:k].requires_grad_())
    product = compose(parts, added_variance=1e-6)
    torch.testing.assert_close(product.gaussian.mean, arrays[f"mpc_k{k}__mean"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(product.gaussian.log_var, arrays[f"mpc_k{k}__logvar"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(product.log_normaliser, arrays[f"mpc_k{k}__logZ_total"], rtol=1e-6, atol=1e-6)


def exact(parts, weights):
    """Mean, variance and log-integral of the product of powers, by completing the square in float64."""
    mean, precision = parts.mean.double(), (-parts.log_var.double()).exp()
    w = torch.as_tensor(weights, dtype=torch.float64)
    w = w.view(*w.shape, *[1] * (mean.dim() - w.dim()))
    total = (w * precision).sum(0)
    centre = (w * precision * mean).sum(0) / total
    terms = (w * (precision * (mean - centre).square() + math.log(2 * math.pi) + parts.log_var.double())).sum(0)
    return centre, 1 / total, 0.5 * (math.log(2 * math.pi) - total.log() - terms).sum(-1)


@pytest.mark.parametrize("weights", [[2.0], [1.0, 0.0, 2.5], [-0.02, 2.0, 1.0, -0.1]])
def test_weights_are_powers_of_the_densities(weights):
    parts = draw(len(weights), 4, 6, seed=2)
    product = compose(Gaussian(parts.mean, 0.3 * parts.log_var), weights=weights)
    x = torch.randn(4, 6, dtype=torch.float64)
    each = Normal(parts.mean, (0.15 * parts.log_var).exp()).log_prob(x).sum(-1)
    whole = Normal(product.gaussian.mean, product.gaussian.std).log_prob(x).sum(-1) + product.log_normaliser
    torch.testing.assert_close(whole, (torch.tensor(weights, dtype=torch.float64)[:, None] * each).sum(0))


@pytest.mark.parametrize("weights", [[0.7, 1.6, 1.0], [1.5, -0.2, -0.3]])
def test_normaliser_of_powers_is_the_integral(weights):
    parts = Gaussian(torch.tensor([[0.3], [-0.8], [1.1]]).double(), torch.tensor([[-1.0], [0.2], [0.4]]).double())
    x = torch.linspace(-60, 60, 120_001, dtype=torch.float64)
    w = torch.tensor(weights, dtype=torch.float64)[:, None]
    density = (w * Normal(parts.mean, parts.std).log_prob(x)).sum(0).exp()
    product = compose(parts, weights=weights)
    torch.testing.assert_close(product.log_normaliser, torch.trapezoid(density, x).log())
    mean = torch.trapezoid(density * x, x) / torch.trapezoid(density, x)
    torch.testing.assert_close(product.gaussian.mean[0], mean)


@pytest.mark.parametrize(("k", "weighted"), [(2, False), (10, True)])
def test_float32_is_stable_at_many_dimensions_and_extreme_variances(k, weighted):
    g = torch.Generator().manual_seed(k)
    parts = Gaussian(torch.randn(k, 7, 512, generator=g), 40 * torch.rand(k, 7, 512, generator=g) - 20)
    weights = (0.2 + 2 * torch.rand(k, generator=g)) if weighted else torch.ones(k)
    found = compose(parts, weights=weights if weighted else None)
    # The reference leaves float64's range as little as float32's.
    mean, var, log_z = exact(parts, weights)
    torch.testing.assert_close(found.gaussian.mean.double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.gaussian.log_var.double(), var.log(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_normaliser.double(), log_z, rtol=1e-4, atol=1e-3)


def test_gradients_of_powers_and_division():
    parts = draw(3, 2, 4, seed=11)
    leaves = [parts.mean.requires_grad_(), (0.2 * parts.log_var).requires_grad_()]

    def outputs(mean, log_var):
        product = compose(Gaussian(mean, log_var), weights=[1, 0.5, -0.1])
        return product.gaussian.mean, product.gaussian.log_var, product.log_normaliser

    assert torch.autograd.gradcheck(outputs, leaves)


def test_division_without_anything_left_is_refused():
    wide = Gaussian(torch.zeros(1, 3), torch.zeros(1, 3))
    narrow = Gaussian(torch.zeros(1, 3), torch.tensor([[1.0, -1.0, 1.0]]))
    parts = Gaussian.stack([wide, narrow, wide])
    with pytest.raises(UserError, match=r"part 2 of the.* 1 of 3 dimensions"):
        compose(parts, weights=[1, -1, 1])
    assert torch.isfinite(compose(parts, weights=[1, -0.73, 1]).gaussian.log_var).all()
    same = draw(1, 4, 6)
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(UserError, match="no density: in 6 of 6"):
            compose(Gaussian.cat([same, same]).to(dtype), weights=[1, -1])
