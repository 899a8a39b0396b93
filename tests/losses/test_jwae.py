"""jWAE's losses against loops, torch.distributions and numbers with known truth."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from probemb import Gaussian
from probemb.losses import jwae
from tests.losses.points import close

G = torch.Generator().manual_seed(5)


def normal(*shape):
    return torch.randn(*shape, generator=G, dtype=torch.float64)


@pytest.mark.parametrize("norm", ["l1", "l2", "squared"])
def test_reconstruction_equals_the_loop(norm):
    x, y, mask = normal(3, 4, 5).requires_grad_(), normal(3, 4, 5).requires_grad_(), torch.rand(3, 4, generator=G) < 0.6
    size = {"l1": lambda d: sum(map(abs, d)), "l2": lambda d: math.hypot(*d), "squared": lambda d: math.hypot(*d) ** 2}
    each = [[size[norm]((a - b).tolist()) for a, b in zip(xs, ys)] for xs, ys in zip(x.detach(), y.detach())]
    close(jwae.reconstruction(x, y, norm), sum(map(sum, each)) / 3)
    counted = sum(e for row, keep in zip(each, mask) for e, k in zip(row, keep) if k)
    close(jwae.reconstruction(x, y, norm, mask), counted / 3)
    close(jwae.reconstruction(x[:, 0], y[:, 0], norm), sum(row[0] for row in each) / 3)
    jwae.reconstruction(x, y, norm).backward()
    assert x.grad is None  # features are a target
    assert y.grad.abs().sum() > 0


@pytest.mark.parametrize(("n", "d"), [(7, 4), (4, 7)])
def test_statistics_of_codes_are_those_of_their_eigenvalues(n, d):
    codes = 2 * normal(n, d) + 1
    eigenvalues = torch.linalg.eigvalsh(torch.cov(codes.T))
    found = jwae.code_statistics(codes)
    close(found["code_square"], codes.square().sum(1).mean() / d)
    close(found["code_dimensions"], eigenvalues.sum() ** 2 / eigenvalues.square().sum())
    prior = jwae.code_statistics(normal(4000, 20))
    assert prior["code_square"] == pytest.approx(1, abs=0.02)
    assert prior["code_dimensions"] == pytest.approx(4000 * 20 / 4020, rel=0.01)


def test_adversarial_losses_are_cross_entropies_and_their_bound_is_the_divergence():
    """For the optimal discriminator of two known densities, the bound is their Jensen-Shannon divergence."""
    p, q = Normal(0.0, 1.0), Normal(torch.tensor(1.5, dtype=torch.float64), 0.7)
    real, fake = normal(400_000), q.loc + q.scale * normal(400_000)

    def logit(z):
        return p.log_prob(z) - q.log_prob(z)

    loss = jwae.discriminator_loss(logit(real), logit(fake))
    bce = torch.nn.functional.binary_cross_entropy
    close(loss, bce(logit(real).sigmoid(), torch.ones_like(real)) + bce(logit(fake).sigmoid(), torch.zeros_like(fake)))
    close(jwae.encoder_loss(logit(fake)), bce(logit(fake).sigmoid(), torch.ones_like(fake)))
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    a, b = p.log_prob(z).exp(), q.log_prob(z).exp()
    m = (a + b) / 2
    js = torch.trapezoid(a * (a / m).log() / 2 + b * (b / m).log().nan_to_num(neginf=0) / 2, z)
    assert abs(jwae.js_bound(loss) - js) < 2e-3
    assert jwae.js_bound(torch.tensor(5.0)) == 0


def test_code_mse_and_kl_equal_loops_and_torch():
    a, b, log_var = normal(4, 3), normal(4, 3), normal(4, 3)
    close(jwae.code_mse(a, b), sum(sum((x - y) ** 2 for x, y in zip(r, s)) for r, s in zip(a.tolist(), b.tolist())) / 4)
    each = kl_divergence(Normal(a, (0.5 * log_var).exp()), Normal(0.0, 1.0))
    close(jwae.vae_kl(Gaussian(a, log_var)), each.sum(1).mean())


def looped_mmd(x, y, kernel, base):
    def k(a, b, c):
        d = sum((p - q) ** 2 for p, q in zip(a, b))
        return math.exp(-d / (2 * c)) if kernel == "rbf" else c / (c + d)

    x, y = x.tolist(), y.tolist()
    total = 0.0
    for c in (scale * base for scale in jwae.SCALES):
        xx = [k(a, b, c) for i, a in enumerate(x) for j, b in enumerate(x) if i != j]
        yy = [k(a, b, c) for i, a in enumerate(y) for j, b in enumerate(y) if i != j]
        xy = [k(a, b, c) for a in x for b in y]
        total += sum(xx) / len(xx) + sum(yy) / len(yy) - 2 * sum(xy) / len(xy)
    return total / len(jwae.SCALES)


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
def test_mmd_equals_the_loop(kernel):
    x, y = normal(5, 3), normal(4, 3) + 0.7
    base = torch.pdist(torch.cat([x, y])).square().mean().item()
    close(jwae.mmd(x, y, kernel), looped_mmd(x, y, kernel, base))
