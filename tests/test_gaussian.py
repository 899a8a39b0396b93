import torch
from torch.distributions import Independent, Normal

from probemb import Gaussian


def make(n=4, d=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return Gaussian(torch.randn(n, d, generator=g, dtype=dtype), torch.randn(n, d, generator=g, dtype=dtype))


def test_moments_equal_torch_distributions():
    g = make()
    reference = Independent(Normal(g.mean, g.log_var.exp().sqrt()), 1)
    torch.testing.assert_close(g.uncertainty(), reference.variance.sum(-1))
    torch.testing.assert_close(g.log_det(), reference.variance.log().sum(-1))
    samples = g.sample(200_000, torch.Generator().manual_seed(1))  # (4, S, 3)
    assert samples.shape == (4, 200_000, 3)
    torch.testing.assert_close(samples.mean(1), g.mean, rtol=0, atol=0.02)
    torch.testing.assert_close(samples.var(1), g.var, rtol=0.02, atol=0)


def test_samples_carry_gradients_to_both_parameters():
    g = make()
    leaves = g.mean.requires_grad_(), g.log_var.requires_grad_()
    for grad in torch.autograd.grad(Gaussian(*leaves).sample(5).square().sum(), leaves):
        assert (grad != 0).all()


def test_uncertainty_of_half_precision_is_summed_in_float32():
    g = Gaussian(torch.zeros(1, 1024), torch.full((1, 1024), -5.0))
    assert g.to(torch.bfloat16).uncertainty().dtype == torch.float32
    torch.testing.assert_close(g.to(torch.bfloat16).uncertainty(), g.uncertainty())
