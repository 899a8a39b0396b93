"""BayesVLM's posterior: the authors' numbers, the exact evidence, and samples."""

import math

import pytest
import torch

from probemb.adapters import LaplaceProjection, curvature, expected_unit, kronecker_factors, prob_cosine, probit_softmax
from probemb.distances import csd
from probemb.gaussian import Gaussian

pytestmark = pytest.mark.core


def test_curvature_and_factors_meet_the_authors_numbers(tensors):
    v = tensors("20_bayesvlm_kfac")
    scale = math.exp(v["logit_scale_log"].item())
    image, text = v["embeds_img"], v["embeds_txt"]
    first = v["infonce__hessian_first3_img_vs_all_txt"]
    torch.testing.assert_close(curvature(image[:3], text, scale), first, rtol=1e-9, atol=1e-9)
    for side, embeds, others in (("img", image, text), ("txt", text, image)):
        a, b = kronecker_factors(v[f"activations_{side}"], embeds, others, scale, block=12)
        torch.testing.assert_close(a, v[f"infonce__classes12_batch4__A_{side}"])
        torch.testing.assert_close(b, v[f"infonce__classes12_batch4__B_{side}"])
    image, text, bias = v["siglip__embeds_img"], v["siglip__embeds_txt"], v["siglip__logit_bias"].item()
    torch.testing.assert_close(curvature(image[1:3], text, scale, bias), v["siglip__hessian_rows_1_2"])
    inputs = torch.cat([v["activations_img"], torch.ones(len(image), 1)], 1)
    for found, name in zip(kronecker_factors(inputs, image, text, scale, bias, block=12), "AB"):
        torch.testing.assert_close(found, v[f"siglip__{name}_img"])


@pytest.mark.parametrize("exact", [False, True])
def test_the_prior_maximises_the_evidence_of_the_full_kronecker_product(tensors, exact):
    v = tensors("20_bayesvlm_kfac")
    a, b = (v[f"infonce__classes12_batch4__{x}_img"] for x in "AB")
    norm2, tau = v["weight_img"].square().sum(), v["prior__n"]

    def evidence(prior):
        of_a, of_b = (tau.sqrt() * x + prior.sqrt() * torch.eye(len(x)).double() for x in (a, b))
        n = len(a) * len(b)
        precision = tau * torch.kron(a, b) + prior * torch.eye(n).double() if exact else torch.kron(of_a, of_b)
        return 0.5 * (n * prior.log() - prior * norm2 - torch.logdet(precision))

    if not exact:
        own = torch.stack([evidence(x) for x in v["prior__grid_lambda"]])
        torch.testing.assert_close(own, v["prior__grid_own_log_marginal_img"])
    found = LaplaceProjection(len(b), len(a), exact, tau.item()).double().fit(a, b, norm2.item())
    prior = found.prior.clone().requires_grad_()
    (slope,) = torch.autograd.grad(evidence(prior), prior)
    assert abs(slope * prior) < 1e-9


def test_variances_are_the_authors_and_the_exact_ones(tensors):
    v, w = tensors("20_bayesvlm_kfac"), tensors("21_bayesvlm_probcosine")
    a, b = (v[f"infonce__classes12_batch4__{x}_img"] for x in "AB")
    (av, au), (bv, bu) = torch.linalg.eigh(a), torch.linalg.eigh(b)
    posterior = LaplaceProjection(len(b), len(a), pseudo_data=v["cov__n_img"].item()).double()
    state = {"a_values": av, "a_vectors": au, "b_values": bv, "b_vectors": bu, "prior": v["cov__lambda_img"]}
    posterior.load_state_dict(state)
    inputs = w["activations_img"]
    a_inv, b_inv = v["cov__A_inv_img"], v["cov__B_inv_img"]
    expected = (inputs @ a_inv * inputs).sum(1)[:, None] * b_inv.diagonal()
    torch.testing.assert_close(posterior.log_var(inputs).exp(), expected)
    precision = posterior.pseudo_data * torch.kron(a, b) + posterior.prior * torch.eye(len(a) * len(b))
    spread = torch.kron(inputs, torch.eye(len(b)).double()).reshape(len(inputs), len(b), -1)
    exact = (spread @ torch.linalg.inv(precision) @ spread.mT).diagonal(dim1=1, dim2=2)
    posterior.exact = True
    torch.testing.assert_close(posterior.log_var(inputs).exp(), exact)


def test_prob_cosine_meets_the_authors_numbers_ranks_as_csd_and_follows_samples(tensors):
    w = tensors("21_bayesvlm_probcosine")
    image = Gaussian(w["embeds_img"], w["embed_var_img"].log())
    text = Gaussian(w["embeds_txt"], w["embed_var_txt"].log())
    mean, var = prob_cosine(image, text)
    torch.testing.assert_close(mean, w["cosine_mean"])
    torch.testing.assert_close(var, w["cosine_var"])
    scale = math.exp(w["logit_scale_log"].item())
    torch.testing.assert_close(probit_softmax(mean * scale, var * scale**2), w["probit_softmax"])
    distance = csd(expected_unit(image), expected_unit(text))
    torch.testing.assert_close(distance.double(), 2 - 2 * mean, rtol=1e-5, atol=1e-5)
    generator = torch.Generator().manual_seed(0)
    i, j = divmod(int((mean.square() / var).argmax()), mean.shape[1])  # the pair whose mean samples tell best
    image, text = image[[i]], text[[j]]
    norm = math.prod((g.mean.square() + g.var).sum().item() for g in (image, text))
    product = (image.sample(10**6, generator)[0] * text.sample(10**6, generator)[0]).sum(1) / norm**0.5
    assert product.mean().item() == pytest.approx(mean[i, j].item(), rel=0.01)
    assert product.var().item() == pytest.approx(var[i, j].item(), rel=0.01)
