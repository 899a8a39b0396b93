"""The PCME++ loss against its definition written out pair by pair, and against the authors' numbers and gradients."""

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from probemb import Gaussian, PairwiseMatchLoss
from probemb.losses.match import pairwise_match_loss, vib_kl
from probemb.losses.output import same_image, smooth
from tests.losses.points import close, pairs


def written_out(image, text, match, scale, shift, alpha, beta):
    """Eq. 2 and 3 with loops over pairs."""

    def bce(i, j, y):
        distance = (image.mean[i] - text.mean[j]).square().sum() + (image.var[i] + text.var[j]).sum()
        p = torch.sigmoid(-scale * distance + shift)
        return -(y * p.log() + (1 - y) * (1 - p).log()), distance

    n, m = match.shape
    pairs = [[bce(i, j, match[i, j]) for j in range(m)] for i in range(n)]
    distance = torch.stack([torch.stack([d for _, d in row]) for row in pairs])
    loss = 2 * torch.stack([v for row in pairs for v, _ in row]).mean()
    for i2t in (True, False):
        d, y = (distance, match) if i2t else (distance.T, match.T)
        pseudo = y.clone()
        for i in range(len(y)):
            g = int(y[i].argmax())
            pseudo[i, d[i] <= d[i, g]] = y[i, g]
        pseudo = pseudo if i2t else pseudo.T
        values = [bce(i, j, pseudo[i, j])[0] for i in range(n) for j in range(m)]
        loss = loss + alpha * torch.stack(values).mean()
    for g in (image, text):
        standard = Normal(torch.zeros_like(g.mean), torch.ones_like(g.mean))
        kl = kl_divergence(Independent(Normal(g.mean, g.std), 1), Independent(standard, 1))
        loss = loss + beta * kl.mean() / g.shape[1]
    return loss


@pytest.mark.parametrize("kind", ["identity", "multi", "soft", "rectangular"])
def test_loss_equals_its_definition(kind):
    image, text = pairs(9 if kind == "rectangular" else 6)
    image = image[:6]
    match = {
        "identity": torch.eye(6, dtype=torch.float64),
        "multi": same_image(torch.tensor([0, 0, 1, 2, 3, 4]), torch.tensor([0, 0, 1, 2, 3, 4])).double(),
        "soft": smooth(torch.eye(6, dtype=torch.float64), 0.1),
        "rectangular": same_image(torch.arange(6), torch.arange(9) % 6).double(),
    }[kind]
    loss = PairwiseMatchLoss(2.0, 3.0, pseudo_positive=0.3, vib=0.1).double()
    expected = written_out(image, text, match, 2.0, 3.0, 0.3, 0.1)
    close(loss(image, text, match).loss, expected)
    if kind == "identity":
        close(loss(image, text).loss, expected)


def test_loss_is_float32_under_autocast():
    image, text = pairs(dtype=torch.float32)
    loss = PairwiseMatchLoss()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(image, text).loss
    assert torch.equal(inside, loss(image, text).loss)


def reference(v, dtype):
    to = lambda name: torch.from_numpy(v[name]).to(dtype)  # noqa: E731
    image, text = Gaussian(to("mu_v"), to("logvar_v")), Gaussian(to("mu_t"), to("logvar_t"))
    return to, image, text


CASES = {  # case of the reference: labels, pseudo_positive, vib
    "plain": ("eye", 0, 0),
    "vib": ("eye", 0, 1e-4),
    "pseudo": ("eye", 0.1, 0),
    "soft": ("soft", 0, 0),
    "soft10": ("soft10", 0, 0),
    "soft_full": ("soft", 0.1, 1e-4),
    "soft10_full": ("soft10", 0.1, 1e-4),
    "ls_full": ("ls", 0.1, 1e-4),
    "multi_full": ("multi", 0.1, 1e-4),
    "default_matched": ("eye", 0.1, 1e-4),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["csd", "wdist"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_authors_loss_and_gradients(parity, family, case, dtype):
    v = parity("01_pcmepp_csd_loss")
    to, image, text = reference(v, dtype)
    matched, alpha, beta = CASES[case]
    leaves = dict(zip(("mu_v", "logvar_v", "mu_t", "logvar_t"), (image.mean, image.log_var, text.mean, text.log_var)))
    leaves |= {"shift": to("shift"), "negative_scale": to("negative_scale")}
    for leaf in leaves.values():
        leaf.requires_grad_()
    match = None if case == "default_matched" else to(f"matched_{matched}")
    options = dict(distance={"csd": "csd", "wdist": "wasserstein2"}[family], pseudo_positive=alpha, vib=beta)
    out = pairwise_match_loss(image, text, match, scale=leaves["negative_scale"], shift=leaves["shift"], **options)
    out.loss.backward()
    close(out.loss, v[f"{family}__{case}__loss"], dtype)
    for name, leaf in leaves.items():
        close(leaf.grad, v[f"{family}__{case}__grad_{name}"], dtype)
    if alpha:
        assert out.terms["n_pseudo"] == v[f"{family}__{case}__n_pseudo_gts"]


def test_authors_gathered_case_and_bottleneck(parity):
    v = parity("01_pcmepp_csd_loss")
    to, image, _ = reference(v, torch.float64)
    text = Gaussian(to("rect__mu_t"), to("rect__logvar_t"))
    for alpha in ("0", "0.1"):
        options = dict(scale=to("negative_scale"), shift=to("shift"), pseudo_positive=float(alpha), vib=1e-4)
        out = pairwise_match_loss(image, text, to("rect__matched"), **options)
        close(out.loss, v[f"rect__alpha{alpha}__loss"])
    close(vib_kl(image), v["kl_value_v"])
    wild = Gaussian(image.mean, to("kl_guard_logvar").expand_as(image.mean))
    assert vib_kl(wild, zero_above=10_000) == v["kl_guard_value"]
    assert vib_kl(wild) > 10_000
