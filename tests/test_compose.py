"""The product of normals against torch.distributions, numeric integration and the authors' code."""

import pytest
import torch
from torch.distributions import Normal

from probemb import Gaussian, UserError
from probemb.compose import as_query, compose


def draw(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return Gaussian(
        torch.randn(*shape, generator=g, dtype=torch.float64),
        torch.randn(*shape, generator=g, dtype=torch.float64) - 1,
    )


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_density_is_the_product_of_the_densities(k):
    parts = draw(k, 4, 6)
    product = compose(parts)
    x = torch.randn(4, 6, dtype=torch.float64)
    each = Normal(parts.mean, parts.std).log_prob(x).sum(dim=(0, -1))
    whole = Normal(product.gaussian.mean, product.gaussian.std).log_prob(x).sum(-1) + product.log_normaliser
    torch.testing.assert_close(whole, each)


def test_normaliser_is_the_integral():
    parts = draw(3, 1, seed=3)
    x = torch.linspace(-30, 30, 60_001, dtype=torch.float64)
    density = Normal(parts.mean, parts.std).log_prob(x).sum(0).exp()
    torch.testing.assert_close(compose(parts).log_normaliser, torch.trapezoid(density, x).log())


def test_order_does_not_matter():
    parts = draw(4, 3, 5, seed=1)
    forwards, backwards = compose(parts), compose(parts[[3, 1, 0, 2]])
    torch.testing.assert_close(forwards.gaussian.mean, backwards.gaussian.mean)
    torch.testing.assert_close(forwards.gaussian.log_var, backwards.gaussian.log_var)
    torch.testing.assert_close(forwards.log_normaliser, backwards.log_normaliser)


@pytest.mark.parametrize("k", [2, 3])
def test_reference_of_mpc(parity, k):
    arrays = {name: torch.from_numpy(array) for name, array in parity("08a_mpc").items() if array.dtype.kind == "f"}
    parts = Gaussian(arrays["means"][:k].requires_grad_(), arrays["logvars"][:k].requires_grad_())
    product = compose(parts, added_variance=1e-6)
    torch.testing.assert_close(product.gaussian.mean, arrays[f"mpc_k{k}__mean"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(product.gaussian.log_var, arrays[f"mpc_k{k}__logvar"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(product.log_normaliser, arrays[f"mpc_k{k}__logZ_total"], rtol=1e-6, atol=1e-6)


def test_far_apart_variances_stay_finite():
    parts = Gaussian(torch.tensor([[1.0], [-1.0]]), torch.tensor([[-90.0], [90.0]])).to(torch.float32)
    product = compose(parts)
    assert product.gaussian.mean.item() == pytest.approx(1)
    assert product.gaussian.log_var.item() == pytest.approx(-90)
    assert torch.isfinite(product.log_normaliser)


def test_a_certain_part_counts_more_and_all_make_more_certain():
    parts = Gaussian(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[-4.0, -4.0], [0.0, 0.0]]))
    product = compose(parts).gaussian
    assert product.mean[0] > 10 * product.mean[1]
    assert product.uncertainty() < parts.uncertainty().min()
    query = as_query(product)
    assert query.mean.norm().item() == pytest.approx(1)
    assert torch.equal(query.log_var, product.log_var)


def test_what_cannot_be_composed():
    with pytest.raises(ValueError, match="at least 1"):
        compose(Gaussian(torch.zeros(0, 3), torch.zeros(0, 3)))
    opposite = Gaussian(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.zeros(2, 2))
    with pytest.raises(UserError, match="cancel each other out"):
        as_query(compose(opposite).gaussian)
