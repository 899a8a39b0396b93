"""ProLIP's loss against plain loops, `distances` and the numbers of its authors' code."""

import json
import math

import pytest
import torch
from torch.nn import functional as F

from probemb import Gaussian, distances
from probemb.losses import prolip_loss, siglip_loss
from probemb.losses.prolip import inclusion_per_dimension
from tests.losses.points import close, pairs

SCALARS = {"scale": 10.0, "bias": -10.0}


def looped(image, text, scale, bias, match=None):
    total, match = 0.0, torch.eye(len(image)) if match is None else match
    for i in range(len(image)):
        for j in range(len(text)):
            u = image.var[i].sum() + text.var[j].sum()
            logit = scale * (image.mean[i] @ text.mean[j] - 0.5 * u) + bias
            total -= match[i, j] * F.logsigmoid(logit) + (1 - match[i, j]) * F.logsigmoid(-logit)
    return total / len(image)


@pytest.mark.parametrize("block", [1, 4])
def test_pairs_equal_the_loop(block):
    image, text = pairs()
    out = prolip_loss(image, text, **SCALARS, vib=0, inclusion=0)
    close(out.loss, looped(image, text, **SCALARS))
    close(out.terms["ppcl"], out.loss)
    points = [Gaussian(g.mean, torch.full_like(g.log_var, -800.0)) for g in (image, text)]
    close(siglip_loss(image.mean, text.mean, **SCALARS, block=block).loss, looped(*points, **SCALARS))


def test_inclusion_is_that_of_each_dimension():
    image, text = pairs(4, 3)
    for d in range(3):
        one = [Gaussian(g.mean[:, [d]], g.log_var[:, [d]]) for g in (image, text)]
        close(inclusion_per_dimension(image, text)[:, d], distances.inclusion(*one).diagonal())


def test_masked_copies_belong_to_the_first_items():
    image, text = pairs()
    copy = Gaussian(image.mean[:2], image.log_var[:2] + 1)
    options = dict(vib=0.5, inclusion=0, masked_inclusion=0.25, inclusion_scale=2.0)
    out = prolip_loss(image, text, **SCALARS, masked=(copy, text[:2]), **options)
    own = F.softplus(-2 * inclusion_per_dimension(image[:2], copy)).mean()
    close(out.terms["image_inclusion"], own)
    assert out.terms["text_inclusion"] == pytest.approx(math.log(2))  # of a text in itself
    close(out.loss, out.terms["ppcl"] + 0.5 * out.terms["vib"] + 0.25 * (own + out.terms["text_inclusion"]))


def test_several_texts_may_match():
    image, text = pairs()
    match = torch.eye(6, dtype=torch.float64)
    close(prolip_loss(image, text, **SCALARS, match=match).loss, prolip_loss(image, text, **SCALARS).loss)
    match[0, 3] = match[3, 0] = 1
    match[2, 2] = 0.25
    close(prolip_loss(image, text, **SCALARS, match=match).terms["ppcl"], looped(image, text, **SCALARS, match=match))


CASES = ("ppcl", "vib", "inclusion", "inclusion_mild", "inclusion_mild_masked", "paper_full", "siglip")


@pytest.mark.parametrize("case", CASES)
def test_numbers_of_the_authors_code(case, parity):
    stored = parity("06d_prolip_loss")
    tensor = lambda name: torch.tensor(stored[name], requires_grad=True)  # noqa: E731
    leaves = {name: tensor(name) for name in ("mu_v", "mu_t", "logvar_v", "logvar_t", "logit_scale", "logit_bias")}
    masked = {name: tensor(f"masked_{name}") for name in ("mu_v", "mu_t", "logvar_v", "logvar_t")}
    given = json.loads(str(stored[f"{case}__hparams_json"]))
    scalars = {"scale": leaves["logit_scale"], "bias": leaves["logit_bias"]}
    image, text = (Gaussian(leaves[f"mu_{x}"], leaves[f"logvar_{x}"]) for x in "vt")
    if case == "siglip":
        out = siglip_loss(image.mean, text.mean, **scalars)
    else:
        names = {"vib_beta": "vib", "inclusion_alpha": "inclusion", "inclusion_alpha_occ": "masked_inclusion",
                 "inclusion_loss_scale": "inclusion_scale", "inclusion_loss_eps": "eps"}  # fmt: skip
        settings = {"inclusion": 0.0, **{names[name]: value for name, value in given.items()}}
        if "masked_inclusion" in settings:
            scalars["masked"] = [Gaussian(masked[f"mu_{x}"], masked[f"logvar_{x}"]) for x in "vt"]
            leaves |= {f"masked_{name}": x for name, x in masked.items()}
        out = prolip_loss(image, text, **scalars, form="code", **settings)
    close(out.loss, stored[f"{case}__loss"])
    weights = {"vib": "vib_beta", "inclusion": "inclusion_alpha"}
    for name, of_code in {"vib": "vib", "inclusion": "inclusion", "image_inclusion": "img_inclusion",
                          "text_inclusion": "txt_inclusion", "ppcl": "ppcl", "siglip": "siglip"}.items():  # fmt: skip
        if name in out.terms and f"{case}__term_{of_code}" in stored:
            weight = given.get(weights.get(name, "inclusion_alpha_occ" if "_inclusion" in name else ""), 1.0)
            close(weight * out.terms[name], stored[f"{case}__term_{of_code}"])
    out.loss.backward()
    for name, leaf in leaves.items():
        expected = stored[f"{case}__grad_{name}"]
        close(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, expected)
