"""The probabilistic triplet loss against torch.distributions and loops, and on W ranks against one process."""

import numpy as np
import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from probemb import Gaussian, distributed
from probemb.losses import gaussian_similarity, prob_triplet_loss
from tests.losses.points import close, pairs, same_images
from tests.ranks import run_ranks

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
@pytest.mark.parametrize("multi", [True, False])
def test_equals_the_loop(kind, negatives, multi):
    image, text = pairs()
    match = same_images() if multi else torch.eye(6)
    out = prob_triplet_loss(image, text, match, kind, 2.0, negatives)
    close(out.loss, looped(image, text, match, kind, 2.0, negatives))
    assert out.loss > 0
    if not multi:
        assert torch.equal(out.loss, prob_triplet_loss(image, text, None, kind, 2.0, negatives).loss)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("negatives", NEGATIVES)
def test_gradients(kind, negatives):
    leaves = [x.requires_grad_() for g in pairs(4, 3) for x in (g.mean, g.log_var)]

    def value(mu_v, s_v, mu_t, s_t):
        return prob_triplet_loss(Gaussian(mu_v, s_v), Gaussian(mu_t, s_t), None, kind, 2.0, negatives).loss

    assert torch.autograd.gradcheck(value, leaves)


def test_a_negative_nearer_than_the_pair_is_not_semi_hard():
    mean = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    image, text = Gaussian(mean, 0 * mean), Gaussian(mean.flip(0), 0 * mean)  # each other's captions
    assert prob_triplet_loss(image, text, None, "wasserstein2", 0.2, "semi-hard").loss == 0
    assert prob_triplet_loss(image, text, None, "wasserstein2", 0.2, "hardest").loss > 4


@pytest.mark.parametrize("kind", KINDS)
def test_equal_items_have_a_finite_gradient(kind):
    image, _ = pairs(dtype=torch.float32)
    twin = Gaussian(image.mean.clone().requires_grad_(), image.log_var.clone().requires_grad_())
    prob_triplet_loss(image, twin, None, kind, 2.0).loss.backward()
    assert twin.mean.grad.isfinite().all()
    assert twin.log_var.grad.isfinite().all()


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


def test_an_unknown_similarity():
    with pytest.raises(ValueError, match="no similarity 'csd'"):
        gaussian_similarity(*pairs(), "csd")


def whole(total):
    image, text = pairs(total)
    return image, text, same_images(max(total, 6))[:total, :total]


def on_ranks(rank, world, total):
    """Loss and gradients of this rank's embeddings, for every similarity and choice of negatives."""
    image, text, match = whole(total)
    mine = slice(rank * total // world, (rank + 1) * total // world)
    own = [
        Gaussian(g.mean[mine].clone().requires_grad_(), g.log_var[mine].clone().requires_grad_()) for g in (image, text)
    ]
    leaves, found = [x for g in own for x in (g.mean, g.log_var)], {}
    for kind in KINDS:
        for negatives in NEGATIVES:
            loss = prob_triplet_loss(*distributed.gather_pairs(*own), match, kind, 2.0, negatives).loss
            gradients = torch.autograd.grad(loss, leaves)
            found[kind, negatives] = [loss.detach().numpy(), *(x.numpy() for x in gradients)]
    return found


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_ranks_equal_one_process(world):
    total = 2 * world
    expected = on_ranks(0, 1, total)
    for rank, found in enumerate(run_ranks(world, on_ranks, total)):
        for key, (loss, *gradients) in expected.items():
            np.testing.assert_allclose(found[key][0], loss, rtol=1e-9)
            for ours, theirs in zip(found[key][1:], gradients):  # data parallel training averages over the ranks
                np.testing.assert_allclose(ours, world * theirs[2 * rank : 2 * rank + 2], rtol=1e-9, atol=1e-12)
