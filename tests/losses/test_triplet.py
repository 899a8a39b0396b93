"""Triplet losses, on points, orders, normals and several embeddings: loops, and the authors' numbers."""

import math

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from probemb import Gaussian, distances
from probemb.losses import triplet
from tests.losses.points import close, pairs, same_images


def looped(s, match, margin, negatives):
    """The hinges of every pair in both directions, from similarities that are indexed as s[image][text]."""
    n, total = len(s), 0.0
    for i in range(n):
        for others in (
            [s[i][j] for j in range(n) if j != i and not match[i, j]],
            [s[j][i] for j in range(n) if j != i and not match[j, i]],
        ):
            kept = [x for x in others if negatives != "semi-hard" or x < s[i][i]]
            found = [max(0.0, margin + float(x - s[i][i])) for x in kept]
            total += sum(found) if negatives == "all" else max(found, default=0.0)
    return total


@pytest.mark.parametrize("hardest", [True, False])
@pytest.mark.parametrize("multi", [True, False])
def test_equals_the_loop(hardest, multi):
    image, text = pairs()
    match = same_images() if multi else torch.eye(6)
    similarity = image.mean @ text.mean.T
    out = triplet.triplet_loss(similarity, match, 0.3, hardest)
    close(out.loss, looped(similarity, match, 0.3, "hardest" if hardest else "all"))
    assert out.loss > 0
    if not multi:
        assert torch.equal(out.loss, triplet.triplet_loss(similarity, None, 0.3, hardest).loss)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("margin", ["0.2", "0.05"])
@pytest.mark.parametrize("which", ["sum", "max"])
@pytest.mark.parametrize("kind", ["triplet", "order"])
def test_authors_loss_and_gradients(parity, kind, which, margin, dtype):
    """Their penalty of orders is the norm, not its square."""
    v = parity("07_vse_family")
    image, text = (torch.from_numpy(v[name]).to(dtype).requires_grad_() for name in ("v", "t"))
    similarity = image @ text.T if kind == "triplet" else triplet.order_similarity(image, text, squared=False)
    if kind == "order":
        close(similarity, v["order_sim"], dtype)
    out = triplet.triplet_loss(similarity, margin=float(margin), hardest=which == "max")
    out.loss.backward()
    for found, name in ((out.loss, "loss"), (image.grad, "grad0"), (text.grad, "grad1")):
        close(found, v[f"{kind}_m{margin}_{which}__{name}"], dtype)


@pytest.mark.parametrize("squared", [True, False])
def test_is_what_a_caption_exceeds_its_image_by(squared):
    image, text = (g.mean for g in pairs(5))
    text = text[:4]
    found = triplet.order_similarity(image, text, squared)
    for i in range(5):
        for j in range(4):
            penalty = sum(max(0.0, float(b.abs() - a.abs())) ** 2 for a, b in zip(image[i], text[j]))
            close(found[i, j], -(penalty if squared else math.sqrt(penalty)))


def test_blocks_of_rows_give_the_same_numbers(monkeypatch):
    """Nothing of size N x M x D is held, also in the backward pass."""
    image, text = (torch.rand(n, 9, dtype=torch.float64, requires_grad=True) for n in (7, 5))

    def step():
        found = triplet.order_similarity(image, text)
        return found, *torch.autograd.grad(found.square().sum(), (image, text))

    recomputed, held = distances.recomputed, []
    monkeypatch.setattr(distances, "recomputed", lambda fn, *x: held.append(len(x[0])) or recomputed(fn, *x))
    whole = step()
    monkeypatch.setattr(distances, "ORDER_ELEMENTS", (2 * 5 * 9,) * 2)
    for a, b in zip(step(), whole):
        close(a, b)
    assert held == [2, 2, 2, 1]


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


@pytest.mark.parametrize("kind", triplet.GAUSSIAN_SIMILARITIES)
@pytest.mark.parametrize("negatives", NEGATIVES)
def test_prob_triplet_equals_the_loop(kind, negatives):
    image, text = pairs()
    match = same_images()
    out = triplet.prob_triplet_loss(image, text, match, kind, 2.0, negatives)
    similarity = [[one_similarity(a, b, kind) for b in text] for a in image]
    close(out.loss, looped(similarity, match, 2.0, negatives))
    assert out.loss > 0


N, K, D = 6, 3, 5


@pytest.mark.parametrize("kernel", ["rbf", "unsquared"])
def test_mmd_is_that_of_all_pairs_of_points(kernel):
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 4, generator=g, dtype=torch.float64) + shift for n, shift in ((7, 0), (5, 1)))

    def mean(a, b):
        between = [float((p - q).norm()) for p in a for q in b]
        return sum(torch.tensor(-0.3 * (d**2 if kernel == "rbf" else d)).exp() for d in between) / len(between)

    close(triplet.mmd(x, y, 0.3, kernel), mean(x, x) - 2 * mean(x, y) + mean(y, y), torch.float32)
    half = torch.randint(-8, 9, (4, 4), generator=g).double() / 4
    same = torch.cat([half, -half])  # around 0 and exact, as the root of a rounding error is no small error
    close(triplet.mmd(same, same.clone(), 0.3, kernel), 0.0)


CASES = {  # weights of diversity and MMD
    "mil": (0, 0),
    "mil_div": (0.1, 0),
    "mil_mmd": (0, 0.01),
    "mil_full": (0.1, 0.01),
    "mil_order": (0, 0),
    "K1": (0, 0),
}


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("which", ["sum", "max"])
@pytest.mark.parametrize("case", CASES)
def test_pvse_authors_loss_and_gradients(parity, case, which, reduce):
    v = parity("07_vse_family")
    name = f"pvse_{case}_{which}viol_reduce-{reduce}"
    names = ("v", "t") if case == "K1" else ("vk", "tk", "v_res", "t_res")
    signed = {"mil_order": torch.abs}.get(case, torch.clone)  # order's numbers are of absolute values
    leaves = [signed(torch.from_numpy(v[name])).requires_grad_() for name in names]
    image, text = (Gaussian(x, torch.zeros_like(x)) for x in leaves[:2])
    div, discrepancy = CASES[case]
    similarity = "order" if case == "mil_order" else "cosine"
    options = dict(
        diversity_weight=div, mmd_weight=discrepancy, kernel="unsquared", reduce=reduce, similarity=similarity
    )
    out = triplet.pvse_loss(image, text, None, leaves[2:] or None, hardest=which == "max", **options)
    close(out.loss, v[f"{name}__loss"])
    kept = leaves if div else leaves[:2]
    for i, grad in enumerate(torch.autograd.grad(out.loss, kept)):
        close(grad, v[f"{name}__grad{i}"])


def test_authors_parts(tensors):
    v = tensors("07_vse_family")
    close(triplet.multi_instance_similarity(v["vk"], v["tk"]), v["pvse_mil_scores"])
    close(triplet.diversity(v["v_res"]), v["pvse_diversity_v"])
    close(triplet.mmd(v["vk"].flatten(0, 1), v["tk"].flatten(0, 1), kernel="unsquared"), v["pvse_mmd_gamma0.5"])
