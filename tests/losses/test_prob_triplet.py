"""The probabilistic triplet loss against torch.distributions and loops."""

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from probemb import Gaussian
from probemb.losses import gaussian_similarity, prob_triplet_loss
from tests.losses.points import close, pairs, same_images

KINDS = ("min-kl", "kl", "reverse-kl", "wasserstein2")
NEGATIVES = ("hardest", "semi-hard", "all")


def normal(g):
    return Independent(Normal(g.mean, g.std), 1)


def one_similarity(image, text, kind):
    """Of single items, from their definitions; (D,) each."""
    there, back = (float(kl_divergence(normal(a), normal(b))) for a, b in ((image, text), (text, image)))
    if kind in ("kl", "reverse-kl"):
        return -there if kind == "kl" else -back
    if kind == "min-kl":
        return -min(there, back)
    squared = (image.mean - text.mean).square() + image.var + text.var - 2 * (image.var * text.var).sqrt()  # Eq. 7
    return -float(squared.sum().sqrt())


def looped(image, text, match, kind, margin, negatives):
    n, total = len(image), 0.0
    s = [[one_similarity(image[i], text[j], kind) for j in range(n)] for i in range(n)]
    for i in range(n):
        for one_way in (
            [s[i][j] for j in range(n) if j != i and not match[i, j]],
            [s[j][i] for j in range(n) if j != i and not match[j, i]],
        ):
            kept = [x for x in one_way if negatives != "semi-hard" or x < s[i][i]]
            found = [max(0.0, margin + x - s[i][i]) for x in kept]
            total += sum(found) if negatives == "all" else max(found, default=0.0)
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("negatives", NEGATIVES)
def test_equals_the_loop(kind, negatives):
    image, text = pairs()
    match = same_images()
    out = prob_triplet_loss(image, text, match, kind, 2.0, negatives)
    close(out.loss, looped(image, text, match, kind, 2.0, negatives))
    assert out.loss > 0


@pytest.mark.parametrize(("kind", "negatives"), [*zip(KINDS, NEGATIVES), ("wasserstein2", "hardest")])
def test_gradients(kind, negatives):
    leaves = [x.requires_grad_() for g in pairs(4, 3) for x in (g.mean, g.log_var)]

    def value(mu_v, s_v, mu_t, s_t):
        return prob_triplet_loss(Gaussian(mu_v, s_v), Gaussian(mu_t, s_t), None, kind, 2.0, negatives).loss

    assert torch.autograd.gradcheck(value, leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_precise_with_wide_variances_and_under_autocast(kind):
    """Standard deviations near 1 in 1024 dimensions: their squares sum to what float32 cannot take apart."""
    g = torch.Generator().manual_seed(0)
    draw = lambda scale: scale * torch.randn(8, 1024, generator=g, dtype=torch.float64)  # noqa: E731
    mean = torch.nn.functional.normalize(draw(1.0), dim=1)
    image, text = Gaussian(mean, draw(0.01)), Gaussian(torch.nn.functional.normalize(mean + draw(0.01)), draw(0.01))
    exact = gaussian_similarity(image, text, kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        single = gaussian_similarity(image.to(torch.float32), text.to(torch.float32), kind)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=2e-5, atol=2e-5)
