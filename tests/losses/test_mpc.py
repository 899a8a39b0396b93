"""MPC's loss against torch.distributions, loops and the numbers of its authors' code."""

import math

import pytest
import torch
from torch.distributions import Independent, Normal

from probemb import Gaussian
from probemb.compose import Product, compose
from probemb.losses import mpc
from probemb.losses.mpc import mpc_code_loss, mpc_loss, sampled_cosine_loss, scaled_cosine_loss, target_softmax
from tests.losses.points import close


def batch(n=4, t=6, k=3, d=5, dtype=torch.float64, seed=0):
    """Parts (N, k, D), their composition and T targets."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, d, generator=g, dtype=dtype)  # noqa: E731
    parts = Gaussian(draw(n, k), draw(n, k) - 0.5)
    query = compose(Gaussian(parts.mean.transpose(0, 1), parts.log_var.transpose(0, 1)))
    return parts, query, Gaussian(draw(t), draw(t) - 1)


def looped(query, z_TJD):
    """Eq. 6, one sample after the other."""
    out = torch.zeros(len(query.gaussian), len(z_TJD), dtype=torch.float64)
    for i, g in enumerate(query.gaussian):
        density = Independent(Normal(g.mean, g.std), 1)
        for j, z_JD in enumerate(z_TJD):
            out[i, j] = sum(density.log_prob(z) + query.log_normaliser[i] for z in z_JD) / len(z_JD)
    return out


@pytest.mark.parametrize(("n", "t", "k"), [(4, 6, 3), (1, 1, 1), (3, 3, 10), (1, 5, 2)])
def test_similarity_of_samples_equals_the_loop(n, t, k):
    _, query, target = batch(n, t, k)
    z_TJD = target.sample(7, torch.Generator().manual_seed(1))
    close(mpc.sampled_similarity(query, z_TJD), looped(query, z_TJD))


def test_expected_similarity_is_the_limit_of_many_samples_and_the_integral():
    _, query, target = batch()
    expected = mpc.expected_similarity(query, target)
    z_TJD = target.sample(40_000, torch.Generator().manual_seed(1))
    torch.testing.assert_close(mpc.sampled_similarity(query, z_TJD), expected, rtol=0.02, atol=0.02)
    _, query, target = batch(1, 1, 2, 1)  # one dimension
    x = torch.linspace(-30, 30, 60_001, dtype=torch.float64)
    of_query = Normal(query.gaussian.mean[0], query.gaussian.std[0]).log_prob(x) + query.log_normaliser
    integral = torch.trapezoid(Normal(target.mean[0], target.std[0]).log_prob(x).exp() * of_query, x)
    close(mpc.expected_similarity(query, target)[0, 0], integral)


def looped_loss(similarity, positives, temperature, reverse):
    n, t = similarity.shape
    total = 0.0
    for i in range(n):
        kept = [j for j in range(t) if j == i or positives is None or not positives[i, j]]
        row = sum(math.exp(float(similarity[i, j] - similarity[i, i]) / temperature) for j in kept)
        kept = [j for j in range(n) if j == i or positives is None or not positives[j, i]]
        column = sum(math.exp(float(similarity[j, i] - similarity[i, i]) / temperature) for j in kept)
        total += (1 - reverse) * math.log(row) + reverse * math.log(column)
    return total / n


@pytest.mark.parametrize("reverse", [0.0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("t", [5, 8])
def test_softmax_equals_the_loop(reverse, masked, t):
    g = torch.Generator().manual_seed(t)
    similarity = torch.randn(5, t, generator=g, dtype=torch.float64)
    positives = (torch.rand(5, t, generator=g) < 0.4) if masked else None
    out = target_softmax(similarity, positives, 0.7, reverse)
    close(out.loss, looped_loss(similarity, positives, 0.7, reverse))
    assert ("target_to_query" in out.terms) == bool(reverse)
    perfect = target_softmax(10 * torch.eye(4))
    assert perfect.terms["r@1"] == 1
    assert target_softmax(-10 * torch.eye(4)).terms["r@1"] == 0


@pytest.mark.parametrize("form", ["sampled", "expected"])
def test_whole_loss(form):
    parts, query, target = batch(4, 4)
    options = dict(form=form, n_samples=5, temperature=3.0, reverse=0.2, log_var_l2=0.01)
    out = mpc_loss(parts, query, target, generator=torch.Generator().manual_seed(2), **options)
    if form == "sampled":
        similarity = looped(query, target.sample(5, torch.Generator().manual_seed(2)))
    else:
        similarity = mpc.expected_similarity(query, target)
    expected = looped_loss(similarity, None, 3.0, 0.2) + 0.01 * parts.log_var.square().mean()
    close(out.loss, expected)
    assert set(out.terms) == {"query_to_target", "target_to_query", "r@1", "log_var_l2"}


def reference(tensors):
    """The arrays as float64 tensors, and leaves of parts (N, k, D), targets (T, D)."""
    v = tensors("08a_mpc")
    names = ("means", "logvars", "target_mean", "target_logsigma")
    leaves = {name: v[name].clone().requires_grad_() for name in names}
    parts = Gaussian(leaves["means"], leaves["logvars"])
    return v, leaves, parts, Gaussian(leaves["target_mean"], leaves["target_logsigma"])


def by_query(parts):
    """(k, N, D) to (N, k, D)."""
    return Gaussian(parts.mean.transpose(0, 1), parts.log_var.transpose(0, 1))


def near(found, expected, tolerance=2e-7):
    """At most 2e-7 apart: the reference computes in part with float32 constants."""
    torch.testing.assert_close(torch.as_tensor(found).double(), expected.double(), rtol=tolerance, atol=tolerance)


def test_authors_loss_and_gradients(tensors):
    v, leaves, parts, target = reference(tensors)
    query = compose(parts, added_variance=1e-6)
    unit, sampled = mpc.code_embedding(target)
    z_TJD = sampled.mean[:, None] + sampled.std[:, None] * v["eps_target_7"]
    unit_query, sampled = mpc.code_embedding(query.gaussian)
    z_NJD = sampled.mean[:, None] + sampled.std[:, None] * v["eps_query_7"]
    options = dict(temperature=2.0, reverse=0.5, log_var_l2=0.3 / 1.7)
    out = mpc_code_loss(by_query(parts), query.gaussian, target, (z_NJD, z_TJD), **options)
    near(out.terms["query_to_target"], v["mpc_criterion__query_to_target_loss"])
    near(out.terms["target_to_query"], v["mpc_criterion__target_to_query_loss"])
    near(out.terms["log_var_l2"], v["mpc_criterion__logsigma_l2_loss"])
    near(5 * out.terms["r@1"], v["mpc_criterion__r@1_within_batch"])
    near(1.7 * out.loss, v["mpc_criterion__loss"])
    near(1.7 * out.loss, v["mpc_criterion__loss_with_random_z"])
    for leaf, grad in zip(leaves.items(), torch.autograd.grad(1.7 * out.loss, list(leaves.values()))):
        near(grad, v[f"mpc_criterion__grad_{leaf[0]}"])
    # The same samples with Z and the constant on the queries' axis, as the paper has it.
    right = mpc.sampled_similarity(Product(unit_query, query.log_normaliser), z_TJD)
    near(right, v["true_axis_score_qxt"])
    constant = -0.5 * (query.gaussian.log_var + math.log(2 * math.pi)).sum(1)
    near(constant, v["norm_const_query"])
    exponent = right - (constant + query.log_normaliser)[:, None]
    near(exponent, v["mc_loc_qxt"])
    near(exponent + (constant + query.log_normaliser)[None, :], v["code_axis_score_qxt"])
    near(mpc.code_similarity(unit_query, z_TJD), exponent - exponent.max(0).values)
    near(unit.mean.norm(dim=1), torch.ones(5))


def test_authors_cosine_loss_and_gradients(tensors):
    v, leaves, parts, target = reference(tensors)
    mean, log_var = parts.mean.sum(0), parts.log_var.logsumexp(0)
    query = Gaussian(mean, log_var)
    z_NJD = mean[:, None] + log_var.exp()[:, None] * v["pcme_eps_query_4"]
    z_TJD = target.mean[:, None] + target.log_var.exp()[:, None] * v["pcme_eps_target_4"]
    options = dict(temperature=2.0, reverse=0.5, log_var_l2=0.3 / 1.7, as_code=True)
    out = sampled_cosine_loss(by_query(parts), query, target, samples=(z_NJD, z_TJD), **options)
    near(out.terms["query_to_target"], v["pcme_criterion__query_to_target_loss"])
    near(out.terms["target_to_query"], v["pcme_criterion__target_to_query_loss"])
    near(out.terms["log_var_l2"], v["pcme_criterion__logsigma_l2_loss"])
    near(1.7 * out.loss, v["pcme_criterion__loss"])
    grads = torch.autograd.grad(1.7 * out.loss, [leaves["means"], leaves["logvars"]])
    near(grads[0], v["pcme_criterion__grad_means"])
    near(grads[1], v["pcme_criterion__grad_logvars"])


def test_authors_scaled_cosine_loss(tensors):
    v, _, parts, target = reference(tensors)
    out = scaled_cosine_loss(compose(parts).gaussian.mean, target.mean, v["tirg_criterion__scale"])
    near(out.loss.detach(), v["tirg_criterion__loss"])
