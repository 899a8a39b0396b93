"""Every distance against torch.distributions or numeric integration, and against the authors' numbers."""

import math

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence
from torch.utils._python_dispatch import TorchDispatchMode

from probemb import Gaussian, distances
from probemb.distances import DISTANCES, csd, elk, match_log_odds_of_samples, match_probability_of_samples


def gaussians(n=5, m=7, d=6, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *s: torch.randn(*s, generator=g, dtype=dtype)  # noqa: E731
    return Gaussian(rand(n, d), rand(n, d)), Gaussian(rand(m, d) + 0.5, rand(m, d) - 0.5)


def pairwise(a, b, term):
    return torch.stack([torch.stack([term(a[i], b[j]) for j in range(len(b))]) for i in range(len(a))])


def normal(g):
    return Independent(Normal(g.mean, g.std), 1)


def integral(a, b, f):
    """Sum over D of log of the integral over x of f(p_a(x), p_b(x)); the densities factorise."""
    x = torch.linspace(-60, 60, 240_001, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for k in range(a.mean.shape[-1]):
        p_a = Normal(a.mean[k], a.std[k]).log_prob(x)
        p_b = Normal(b.mean[k], b.std[k]).log_prob(x)
        total += torch.trapezoid(f(p_a, p_b), x).log()
    return total


def test_kl_equals_torch_distributions():
    a, b = gaussians()
    expected = pairwise(a, b, lambda p, q: kl_divergence(normal(p), normal(q)))
    backwards = pairwise(a, b, lambda p, q: kl_divergence(normal(q), normal(p)))
    torch.testing.assert_close(distances.kl(a, b), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(distances.symmetric_kl(a, b), (expected + backwards) / 2, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(distances.min_kl(a, b), torch.minimum(expected, backwards), rtol=1e-10, atol=1e-10)


def test_elk_and_bhattacharyya_equal_numeric_integrals():
    a, b = gaussians(n=2, m=3, d=3)
    expected = pairwise(a, b, lambda p, q: -integral(p, q, lambda x, y: (x + y).exp()))
    torch.testing.assert_close(elk(a, b), expected, rtol=1e-7, atol=1e-7)
    expected = pairwise(a, b, lambda p, q: -integral(p, q, lambda x, y: (0.5 * (x + y)).exp()))
    torch.testing.assert_close(distances.bhattacharyya(a, b), expected, rtol=1e-7, atol=1e-7)


def test_inclusion_equals_numeric_integrals():
    a, b = gaussians(n=2, m=3, d=3)

    def ratio(p, q):
        return integral(p, q, lambda x, y: (2 * x + y).exp()) - integral(p, q, lambda x, y: (x + 2 * y).exp())

    torch.testing.assert_close(distances.inclusion(a, b), pairwise(a, b, ratio), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(distances.inclusion(b, a).T, -distances.inclusion(a, b))
    narrow, wide = Gaussian(a.mean, torch.full_like(a.mean, -3)), Gaussian(a.mean, torch.zeros_like(a.mean))
    assert (distances.inclusion(narrow, wide).diag() > 0).all()


def test_csd_is_the_expected_squared_distance_of_samples():
    a, b = gaussians(n=3, m=2, d=4)
    z_a, z_b = normal(a).sample((400_000,)), normal(b).sample((400_000,))  # (S, N, D), (S, M, D)
    sampled = (z_a[:, :, None] - z_b[:, None]).square().sum(-1).mean(0)
    torch.testing.assert_close(csd(a, b), sampled, rtol=0.01, atol=0.01)


def test_wasserstein_equals_the_distance_of_quantiles():
    """In one dimension W2^2 is the integral over p of (F_a^-1(p) - F_b^-1(p))^2."""
    a, b = gaussians(n=3, m=2, d=1)
    p = (torch.arange(2_000_000, dtype=torch.float64) + 0.5) / 2_000_000
    expected = pairwise(
        a, b, lambda x, y: (Normal(x.mean, x.std).icdf(p) - Normal(y.mean, y.std).icdf(p)).square().mean()
    )
    torch.testing.assert_close(distances.wasserstein2(a, b), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DISTANCES)
def test_gradients(name):
    a, b = gaussians(n=2, m=3, d=3)
    leaves = [t.clone().requires_grad_() for t in (a.mean, a.log_var, b.mean, b.log_var)]

    def value(mu_a, log_var_a, mu_b, log_var_b):
        torch.manual_seed(0)
        return DISTANCES[name](Gaussian(mu_a, log_var_a), Gaussian(mu_b, log_var_b))

    assert torch.autograd.gradcheck(value, leaves)


@pytest.mark.parametrize("name", DISTANCES)
def test_precision_under_autocast(name):
    a, b = gaussians(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(0)
        inside = DISTANCES[name](a, b)
        half = DISTANCES[name](a.to(torch.bfloat16), b.to(torch.bfloat16))
    torch.manual_seed(0)
    torch.testing.assert_close(inside, DISTANCES[name](a, b), rtol=0, atol=0)
    assert inside.dtype == half.dtype == torch.float32
    assert DISTANCES[name](*gaussians()).dtype == torch.float64


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("name", DISTANCES)
def test_nothing_of_size_n_m_d_is_allocated(name):
    n, m, d = 40, 48, 64
    a, b = gaussians(n, m, d, torch.float32)
    a = Gaussian(a.mean.requires_grad_(), a.log_var.requires_grad_())
    with LargestTensor() as seen:
        DISTANCES[name](a, b).sum().backward()
    assert 0 < seen.numel <= n * m * d // 2


def test_float32_survives_a_common_offset_of_the_means():
    a, b = gaussians()
    shifted = [Gaussian((g.mean + 100).float(), (g.log_var - 4).float()) for g in (a, b)]
    exact = distances.kl(*(Gaussian(g.mean.double(), g.log_var.double()) for g in shifted))
    torch.testing.assert_close(distances.kl(*shifted).double(), exact, rtol=1e-4, atol=1e-3)
    for distance in (distances.wasserstein2, csd):
        exact = distance(*(Gaussian(g.mean.double(), g.log_var.double()) for g in shifted))
        torch.testing.assert_close(distance(*shifted).double(), exact, rtol=1e-4, atol=1e-3)
    samples = [g.mean.double()[:, None] for g in shifted]
    exact = distances.mean_distance_of_samples(*samples)
    found = distances.mean_distance_of_samples(*(z.float() for z in samples))
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-3)


def test_authors_closed_forms(parity):
    v = parity("04b_gaussian_distances")
    a, b = (
        Gaussian(torch.from_numpy(v[f"mu{i}"]), 2 * torch.from_numpy(v[f"log_sigma{i}"])) for i in (1, 2)
    )  # that code predicts log sigma
    expected = {
        "kl_12": distances.kl(a, b),
        "kl_21": distances.kl(b, a).T,
        "jeffreys_sum": 2 * distances.symmetric_kl(a, b),
        "bhattacharyya": distances.bhattacharyya(a, b),
        "w2_squared": distances.wasserstein2(a, b),
        "log_expected_likelihood_kernel": -elk(a, b),
        "expected_sq_l2_CSD": csd(a, b),
    }
    for name, value in expected.items():
        reference = torch.from_numpy(v[f"closed_form__{name}"])
        torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
    # Every array of the public evaluation code, with what that code computes where it departs from the formulas.
    d = a.shape[1]
    log_ratio = 0.5 * (a.log_var.sum(1)[:, None] - b.log_var.sum(1)[None, :])  # sum of log sigma_1 - log sigma_2
    squares = (a.mean[:, None] - b.mean[None]).square()
    expected = {
        "elk": d / 2 * math.log(2 * math.pi) - elk(a, b),
        "l2": -squares.sum(2),
        "min": -squares.amin(2),  # over single dimensions, of the means alone
        "max": -squares.amax(2),
        "wasserstein": -distances.wasserstein2(a, b),
        "kl": -(2 * distances.kl(a, b) + d + 4 * log_ratio),  # the sign of the log-ratio is wrong, and in the next one
        "reverse_kl": -(2 * distances.kl(b, a).T + d - 4 * log_ratio),
        "js": -(4 * distances.symmetric_kl(a, b) + 2 * d),  # Jeffreys' divergence
        "bhattacharyya": -distances.bhattacharyya(a, b),
    }
    assert {f"ref_similarity__{name}" for name in expected} == {key for key in v if key.startswith("ref_")}
    for name, value in expected.items():
        tolerance = 1e-5 if name == "bhattacharyya" else 1e-9  # that one is in float32
        reference = torch.from_numpy(v[f"ref_similarity__{name}"]).double()
        torch.testing.assert_close(
            value, reference, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_authors_csd(tensors):
    v = tensors("01_pcmepp_csd_loss")
    image, text = Gaussian(v["mu_v"], v["logvar_v"]), Gaussian(v["mu_t"], v["logvar_t"])
    torch.testing.assert_close(csd(image, text), v["csd__distance"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(distances.wasserstein2(image, text), v["wdist__distance"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        csd(image.to(torch.float32), text.to(torch.float32)).double(), v["csd__distance"], rtol=1e-5, atol=1e-5
    )
    gallery = Gaussian(v["rect__mu_t"], v["rect__logvar_t"])
    torch.testing.assert_close(-csd(image, gallery), v["eval_sims_csd"], rtol=1e-9, atol=1e-9)
    samples = v["mp_samples_v"], v["mp_samples_t"]
    total = match_probability_of_samples(*samples, v["negative_scale"], v["shift"]) * samples[0].shape[1] ** 2
    torch.testing.assert_close(total, v["eval_sims_matching_prob_sum"], rtol=1e-9, atol=1e-9)


def test_log_odds_are_those_of_the_match_probability():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 8, 6, generator=g, dtype=torch.float64) for n in (5, 7))
    truth = match_probability_of_samples(a, b, 0.7, 2.0)
    torch.testing.assert_close(match_log_odds_of_samples(a, b, 0.7, 2.0).sigmoid(), truth, rtol=1e-12, atol=0)
    nearest = torch.cdist(a.flatten(0, 1), b.flatten(0, 1)).view(5, 8, 7, 8).amin((1, 3))
    far = match_log_odds_of_samples(a, b, 400.0, 2.0)  # one pair of samples alone counts
    torch.testing.assert_close(far, 2 * (2.0 - 400 * nearest) - math.log(64), rtol=1e-3, atol=0)
