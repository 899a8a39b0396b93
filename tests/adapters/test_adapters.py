"""Adapters and their losses: the authors' numbers, and exact densities."""

import math

import numpy as np
import pytest
import torch
from scipy.special import ive
from torch.nn import functional as F

from probemb import adapters

pytestmark = pytest.mark.core


def test_loss_order_meets_the_authors_numbers(tensors):
    v = tensors("26_url")
    u = v["order_pred"].requires_grad_()
    loss = adapters.order_loss(u, v["order_true"])
    torch.testing.assert_close(loss, v["order_loss"])
    torch.testing.assert_close(torch.autograd.grad(loss, u)[0], v["order_grad"])
    torch.testing.assert_close(adapters.order_loss(u, v["order_true"], margin=0.2, leeway=0.7), v["order_loss_leeway"])


@pytest.mark.parametrize("form", ["vmf", "psd"])
def test_spherical_texts_meet_the_authors_numbers(tensors, form):
    v = tensors("23_asymvlm")
    x, eta, t = (v[name].requires_grad_() for name in ("x_img", "eta_txt", "temperature"))
    density = {"vmf": adapters.von_mises_fisher, "psd": adapters.power_spherical}[form]
    torch.testing.assert_close(density(F.normalize(x, dim=1), eta), v[f"{form}__log_likelihood_img_x_txt"])
    loss = adapters.asym_loss(x, eta, t, {"vmf": "von-mises-fisher", "psd": "power-spherical"}[form])
    torch.testing.assert_close(loss, v[f"{form}__loss"])
    for found, name in zip(torch.autograd.grad(loss, (x, eta, t)), ("x", "eta", "temperature")):
        torch.testing.assert_close(found, v[f"{form}__grad_{name}"])


@pytest.mark.parametrize("form", ["von-mises-fisher", "power-spherical"])
def test_spread_on_the_sphere_is_the_expected_one(form):
    d = 16
    adapter = adapters.SphericalAdapter(d, 32, form, start=40.0).double()
    torch.nn.init.normal_(adapter.network[-1].weight)
    x = F.normalize(torch.randn(4, d, generator=torch.Generator().manual_seed(0)), dim=1).double()
    kappa = adapter.eta(x).norm(dim=1)
    t = torch.linspace(-1, 1, 100_001)[1:-1].double()  # the cosine's density is f(t) (1 - t²)^((d - 3) / 2)
    log_f = kappa[:, None] * (t if form == "von-mises-fisher" else t.log1p()) + (d - 3) / 2 * (1 - t.square()).log()
    expected = 2 * (1 - (log_f.softmax(1) * t).sum(1))
    torch.testing.assert_close(adapter(x).uncertainty(), expected, rtol=1e-6, atol=0)


def test_von_mises_fisher_normaliser_is_within_a_tenth_of_the_exact_one():
    kappa = torch.tensor([0.05, 1.0, 30.0, 200.0, 1000.0]).double()
    eta = torch.zeros(5, 512, dtype=torch.float64)
    eta[:, 0] = kappa
    approx = adapters.von_mises_fisher(torch.zeros(1, 512).double(), eta)[0]
    order = 512 / 2 - 1
    exact = order * kappa.log() - torch.from_numpy(np.log(ive(order, kappa.numpy()))) - kappa
    drift = (approx - exact)[torch.isfinite(exact)]
    assert len(drift) >= 2
    assert drift.max() - drift.min() < 0.1


def probvlm(v, side: str, prefix: str, heads: str) -> adapters.ProbVLMAdapter:
    d, hidden = v[f"{prefix}{side}mod.5.weight"].shape
    found = adapters.ProbVLMAdapter(d, hidden, heads=heads, least_beta=0.0).double().eval()
    names = {"trunk.0": "mod.0", "trunk.2": "mod.2", "trunk.5": "mod.5"}
    names |= {
        f"{ours}.{i}": f"block_{theirs}.{i}"
        for ours, theirs in (("mean", "mu"), ("inverse_alpha", "alpha"), ("beta", "beta"))
        for i in (0, 2)
    }
    found.load_state_dict(
        {f"{a}.{p}": v[f"{prefix}{side}{b}.{p}"] for a, b in names.items() for p in ("weight", "bias")}
    )
    return found


def test_probvlm_meets_the_authors_numbers(tensors):
    v = tensors("22_probvlm")
    nets = {side: probvlm(v, f"{side}_BayesCap.", "param__", "relu") for side in ("img", "txt")}
    held = {side: net.parameters_of(v[f"z_{side}"]) for side, net in nets.items()}
    for side, found in held.items():
        for ours, theirs in zip(found, ("mu", "one_over_alpha", "beta")):
            torch.testing.assert_close(ours, v[f"{side}_{theirs}"])
    for t1, t2, cross in ((1, 0.05, 0.0001), (1, 0.0001, 0.1)):
        loss = adapters.probvlm_loss(
            held["img"],
            held["txt"],
            v["z_img"],
            v["z_txt"],
            cross,
            lambda *p, w=(t1, t2): adapters.published_probvlm_nll(*p, w),
        )
        torch.testing.assert_close(loss, v[f"T1_{t1}__T2_{t2}__lambda_{cross}__loss"])
        if cross == 0.0001:
            loss.backward(retain_graph=True)
            torch.testing.assert_close(
                nets["img"].trunk[0].weight.grad,
                v[f"T1_{t1}__T2_{t2}__lambda_{cross}__grad__img_BayesCap.mod.0.weight"],
            )
    gg = [v[f"gg_{name}"] for name in ("mu", "one_over_alpha", "beta", "target")]
    torch.testing.assert_close(adapters.generalized_gaussian_nll(*gg), v["own_paper_nll_elementwise"])
    torch.testing.assert_close(adapters.published_probvlm_log_variance(*gg[1:3]).exp(), v["gg_uncertainty"])
    w = tensors("23_asymvlm")
    soft = probvlm(w, "", "probvlm_softplus__param__", "softplus")
    for ours, theirs in zip(soft.parameters_of(w["x_img"]), ("mu", "one_over_alpha", "beta")):
        torch.testing.assert_close(ours, w[f"probvlm_softplus__{theirs}"])
    passes = v["passes_img_mu"]
    torch.testing.assert_close(passes.var(0, correction=0), v["passes_img_own_epistemic_paper"])


def test_generalised_gaussian_is_a_density_with_its_variance():
    x = torch.linspace(-60, 60, 400_001).double()
    for a, b in ((1.0, 2.0), (0.7, 1.0), (1.5, 0.8)):
        inverse_alpha, beta = (torch.full_like(x, value) for value in (a, b))
        density = 0.5 * (-adapters.generalized_gaussian_nll(torch.zeros_like(x), inverse_alpha, beta, x)).exp()
        assert torch.trapezoid(density, x).item() == pytest.approx(1, rel=1e-4)
        variance = torch.trapezoid(density * x.square(), x).log()
        torch.testing.assert_close(
            variance, adapters.generalized_log_variance(inverse_alpha, beta)[0], rtol=1e-3, atol=1e-3
        )


def test_vilu_meets_the_authors_numbers(tensors):
    v = tensors("25_vilu")
    net = adapters.FailurePredictor(8, (10, 6)).double()
    own = {f"mlp.{i}.{p}": v[f"full__param__mlp.{i}.{p}"] for i in (0, 2, 4) for p in ("weight", "bias")}
    net.load_state_dict(
        own | {"query.weight": v["full__param__in_proj_v.weight"], "key.weight": v["full__param__in_proj_t.weight"]}
    )
    scale, correct = v["logit_scale"].item(), (v["v"] @ v["t"].T).argmax(1) == v["labels"]
    torch.testing.assert_close(
        net(v["v"], v["t"], scale, projected=False), v["full__confidence_logit_before_unfreezing"]
    )
    logit = net(v["v"], v["t"], scale)
    torch.testing.assert_close(logit, v["full__confidence_logit_projected"])
    for name, weight in (("static_w1", 1.0), ("static_w3", 3.0), ("adaptative_w1", None)):
        torch.testing.assert_close(
            adapters.failure_loss(logit, correct, weight).float(), v[f"full__bce_{name}"], rtol=1e-6, atol=1e-6
        )
    adapters.failure_loss(logit, correct).backward()
    torch.testing.assert_close(
        net.key.weight.grad, v["full__bce_adaptative_grad__in_proj_t.weight"], rtol=1e-5, atol=1e-7
    )


def test_adapters_start_at_the_frozen_embeddings():
    x = F.normalize(torch.randn(5, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    for adapter in (
        adapters.GaussianAdapter(16),
        adapters.OrderAdapter(16),
        adapters.ProbVLMAdapter(16),
        adapters.SphericalAdapter(16, start=9.0),
    ):
        torch.testing.assert_close(adapter(x).mean, x)
        assert adapter(x).log_var.isfinite().all()
    assert math.isclose(adapters.GaussianAdapter(16)(x).log_var.mean().item(), -6.0, rel_tol=1e-6)
    net = adapters.ProbVLMAdapter(16, dropout=0.5).eval()
    assert (net.epistemic(x) > 0).any()
    assert not net.training
