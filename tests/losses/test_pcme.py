"""PCME's sampled loss against loops, and against the numbers of its authors' code and of PCME++'s."""

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from probemb import Gaussian
from probemb.distances import match_probability_of_samples
from probemb.losses import output as labels
from probemb.losses.match import vib_kl
from probemb.losses.pcme import pair_nll, pcme_loss, uniformity
from tests.losses.points import close, pairs, same_images


def drawn(image, text, n=3, seed=4):
    g = torch.Generator().manual_seed(seed)
    return image.sample(n, g), text.sample(n, g)


def looped(z_i, z_t, match, a, b, eps=1e-6):
    """-log of the matching probability, a mean over pairs of samples, as PCME defines it."""
    out = torch.zeros(match.shape, dtype=torch.float64)
    for i, j in torch.cartesian_prod(torch.arange(len(z_i)), torch.arange(len(z_t))).tolist():
        p = 0.0
        for x in z_i[i]:
            for y in z_t[j]:
                s = b - a * ((x - y).square().sum() + eps).sqrt()
                p += s.exp() / (s.exp() + (-s).exp()) / (len(z_i[i]) * len(z_t[j]))
        out[i, j] = -match[i, j] * p.log() - (1 - match[i, j]) * (1 - p).log()
    return out


@pytest.mark.parametrize("kind", ["identity", "multi", "bool", "soft"])
def test_pairs_equal_the_loop(kind):
    z_i, z_t = drawn(*pairs())
    match = {
        "identity": None,
        "multi": same_images(),
        "bool": same_images() > 0,
        "soft": labels.smooth(same_images(), 0.2),
    }[kind]
    expected = looped(z_i, z_t, torch.eye(6) if match is None else match.double(), 1.5, 2.0)
    close(pair_nll(z_i, z_t, 1.5, 2.0, match), expected)


@pytest.mark.parametrize("form", ["kl", "sum"])
def test_whole_loss_with_bottleneck_and_uniformity(form):
    image, text = pairs()
    options = dict(scale=1.5, shift=2.0, samples=3, vib=0.3, uniformity_weight=0.7, vib_form=form)
    out = pcme_loss(image, text, generator=torch.Generator().manual_seed(4), **options)
    z_i, z_t = drawn(image, text)
    expected = 2 * looped(z_i, z_t, torch.eye(6), 1.5, 2.0).sum()
    for g in (image, text):
        standard = Normal(torch.zeros_like(g.mean), torch.ones_like(g.mean))
        kl = kl_divergence(Independent(Normal(g.mean, g.std), 1), Independent(standard, 1))
        expected = expected + 0.3 * (kl.sum() if form == "sum" else kl.mean() / g.shape[1])
    points = torch.cat([z_i.flatten(0, 1), z_t.flatten(0, 1)])
    expected = expected + 0.7 * torch.pdist(points).square().mul(-2).exp().mean().log()
    close(out.loss, expected)
    assert set(out.terms) == {"match", "vib", "uniformity"}


def reference(v, dtype):
    """The authors' "logsigma" is log sigma in sampling: the log of the variance is twice that."""
    to = lambda name: torch.from_numpy(v[name]).to(dtype)  # noqa: E731
    return to, Gaussian(to("mu_v"), 2 * to("logsigma_v")), Gaussian(to("mu_t"), 2 * to("logsigma_t"))


CASES = {"plain": (0, 0), "uniform": (0.1, 0), "vib": (0, 1e-5), "full": (0.2, 1e-3)}  # uniformity, vib


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_authors_loss_and_gradients(parity, case, dtype):
    v = parity("04a_pcme_loss")
    to, image, text = reference(v, dtype)
    weight, vib = CASES[case]
    names = ["samples_v", "samples_t", "shift", "negative_scale"]
    leaves = {name: to(name).requires_grad_() for name in names}
    for name, g in (("logsigma_v", image), ("logsigma_t", text)):
        leaves[name] = g.log_var.requires_grad_()
    samples, scale, shift = (leaves["samples_v"], leaves["samples_t"]), leaves["negative_scale"], leaves["shift"]
    options = dict(vib=vib, vib_form="pcme", uniformity_weight=weight)
    out = pcme_loss(image, text, samples=samples, scale=scale, shift=shift, **options)
    out.loss.backward()
    close(out.loss, v[f"{case}__loss"], dtype)
    close(out.terms["match"], v[f"{case}__i2t_loss"] + v[f"{case}__t2i_loss"], dtype)
    if weight:
        close(out.terms["uniformity"], v[f"{case}__uniform_loss"], dtype)
    for name in names:
        close(leaves[name].grad, v[f"{case}__grad_{name}"], dtype)
    if vib:
        close(out.terms["vib"], v[f"{case}__vib_loss"], dtype)
        for name in ("logsigma_v", "logsigma_t"):
            close(2 * leaves[name].grad, v[f"{case}__grad_{name}"], dtype)  # d log_var = 2 d log sigma


def test_authors_pairs_and_uniformity(parity):
    v = parity("04a_pcme_loss")
    to, _, _ = reference(v, torch.float64)
    nll = pair_nll(to("samples_v"), to("samples_t"), to("negative_scale"), to("shift"))
    close(nll, v["pair_nll"])
    for way in ("i2t", "t2i"):  # both directions are sums of the same pairs
        close(nll.diagonal().sum(), v[f"plain__{way}_pos_loss"])
        close(nll.sum() - nll.diagonal().sum(), v[f"plain__{way}_neg_loss"])
    by_samples = match_probability_of_samples(to("samples_v"), to("samples_t"), to("negative_scale"), to("shift"))
    close(by_samples, v["match_prob_f32"], torch.float32)
    points = torch.cat([to("samples_v").flatten(0, 1), to("samples_t").flatten(0, 1)])
    close(uniformity(points), v["uniform_loss_value"])
    (choice,) = (key for key in v if key.startswith("uniform_big_choice_npseed"))
    chosen = to("uniform_big_x")[torch.from_numpy(v[choice])]
    close(uniformity(chosen), v["uniform_big_value"])


def test_authors_bottleneck_is_of_another_variance(parity):
    """Their KL of log sigma where log sigma^2 belongs, about mu and about the mean of the samples; ours of both."""
    v = parity("04a_pcme_loss")
    to, image, _ = reference(v, torch.float64)
    sample_means = Gaussian(to("samples_v").mean(1), image.log_var)
    for g, expected in ((image, "kl_sum_v_on_mu"), (sample_means, "kl_sum_v_on_sample_means")):
        close(vib_kl(Gaussian(g.mean, 0.5 * g.log_var)) * g.mean.numel(), v[expected])


@pytest.mark.parametrize("distance", ["non_squared_l2", "squared_l2"])
@pytest.mark.parametrize("code", ["iterative", "batchwise_cdist"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_authors_loss_in_the_comparison_of_pcmepp(parity, code, distance, dtype):
    v = parity("04a_pcme_loss")
    to, image, text = reference(v, dtype)
    leaves = {"mu_v": image.mean, "mu_t": text.mean, "logsigma_v": image.log_var, "logsigma_t": text.log_var}
    leaves |= {"shift": to("shift"), "negative_scale": to("negative_scale")}
    for leaf in leaves.values():
        leaf.requires_grad_()
    z_i = image.mean[:, None] + image.std[:, None] * to("eps_v")
    z_t = text.mean[:, None] + text.std[:, None] * to("eps_t")
    options = dict(squared=distance == "squared_l2", eps=0 if code == "iterative" else 1e-6, vib_form="pcmepp")
    scale, shift = leaves["negative_scale"], leaves["shift"]
    out = pcme_loss(image, text, samples=(z_i, z_t), scale=scale, shift=shift, vib=1e-3, **options)
    out.loss.backward()
    case = f"pcmepp_pcme__{code}__{distance}"
    close(out.loss, v[f"{case}__loss"], dtype)
    close(out.terms["vib"], v[f"{case}__vib"], dtype)
    for name, leaf in leaves.items():
        close(leaf.grad * (2 if "logsigma" in name else 1), v[f"{case}__grad_{name}"], dtype)
