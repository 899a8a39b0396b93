"""BayesVLM's posterior: the authors' numbers, the exact evidence, and samples."""

import math

import numpy as np
import pytest
import torch

from probemb.distances import csd
from probemb.gaussian import Gaussian
from probemb.laplace import (
    LaplaceProjection,
    curvature,
    expected_unit,
    kronecker_factors,
    log_evidence,
    prob_cosine,
    probit_softmax,
)

pytestmark = pytest.mark.core


@pytest.fixture
def vectors(parity):
    return lambda name: {key: torch.from_numpy(np.asarray(value)) for key, value in parity(name).items()}


def test_curvature_and_factors_meet_the_authors_numbers(vectors):
    v = vectors("20_bayesvlm_kfac")
    scale = math.exp(v["logit_scale_log"].item())
    image, text = v["embeds_img"], v["embeds_txt"]
    first = v["infonce__hessian_first3_img_vs_all_txt"]
    torch.testing.assert_close(curvature(image[:3], text, scale), first, rtol=1e-9, atol=1e-9)
    for side, embeds, others in (("img", image, text), ("txt", text, image)):
        a, b = kronecker_factors(v[f"activations_{side}"], embeds, others, scale, block=12)
        torch.testing.assert_close(a, v[f"infonce__classes12_batch4__A_{side}"])
        torch.testing.assert_close(b, v[f"infonce__classes12_batch4__B_{side}"])
    image, bias = v["siglip__embeds_img"], v["siglip__logit_bias"].item()
    found = curvature(image[1:3], v["siglip__embeds_txt"], scale, bias)
    torch.testing.assert_close(found, v["siglip__hessian_rows_1_2"])


def test_evidence_is_that_of_the_full_kronecker_product_and_its_maximum_is_found(vectors):
    v = vectors("20_bayesvlm_kfac")
    a, b = (v[f"infonce__classes12_batch4__{x}_img"] for x in "AB")
    norm2, tau = v["weight_img"].square().sum().item(), v["prior__n"].item()
    own = [
        log_evidence(torch.linalg.eigvalsh(a), torch.linalg.eigvalsh(b), norm2, x.item(), tau)
        for x in v["prior__grid_lambda"]
    ]
    torch.testing.assert_close(torch.tensor(own).double(), v["prior__grid_own_log_marginal_img"])
    fitted = LaplaceProjection.fit(a, b, norm2, tau)
    around = [log_evidence(fitted.a_values, fitted.b_values, norm2, fitted.prior * f, tau) for f in (0.999, 1, 1.001)]
    assert around[1] > max(around[0], around[2])


def test_variances_are_the_authors_if_damped_and_exact_if_not(vectors):
    v, w = vectors("20_bayesvlm_kfac"), vectors("21_bayesvlm_probcosine")
    a, b = (v[f"infonce__classes12_batch4__{x}_img"] for x in "AB")
    (av, au), (bv, bu) = torch.linalg.eigh(a), torch.linalg.eigh(b)
    posterior = LaplaceProjection(av, au, bv, bu, v["cov__lambda_img"].item(), v["cov__n_img"].item())
    inputs = w["activations_img"]
    a_inv, b_inv = v["cov__A_inv_img"], v["cov__B_inv_img"]
    expected = (inputs @ a_inv * inputs).sum(1)[:, None] * b_inv.diagonal()
    torch.testing.assert_close(posterior.log_var(inputs, damped=True).exp(), expected)
    torch.testing.assert_close(
        w["embed_var_img"], (inputs @ w["A_inv_img"] * inputs).sum(1)[:, None] * w["B_inv_img"].diagonal()
    )
    precision = posterior.pseudo_data * torch.kron(a, b) + posterior.prior * torch.eye(len(a) * len(b))
    covariance = torch.linalg.inv(precision)
    spread = torch.kron(inputs, torch.eye(len(b)).double()).reshape(len(inputs), len(b), -1)
    exact = (spread @ covariance @ spread.mT).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(posterior.log_var(inputs).exp(), exact)


def test_prob_cosine_meets_the_authors_numbers_ranks_as_csd_and_follows_samples(vectors):
    w = vectors("21_bayesvlm_probcosine")
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
    x, y = (g[:1].sample(10**6, generator)[0] for g in (image, text))
    product = (x * y).sum(1) / (
        (image.mean.square() + image.var).sum(1)[0] * (text.mean.square() + text.var).sum(1)[0]
    ).sqrt()
    assert product.mean().item() == pytest.approx(mean[0, 0].item(), rel=0.01, abs=1e-3)
    assert product.var().item() == pytest.approx(var[0, 0].item(), rel=0.01)
