"""PVSE's loss against loops over pairs, embeddings and items, and against the numbers of the authors' code."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from probemb import Gaussian
from probemb.losses import PVSELoss, diversity, mmd, multi_instance_similarity
from tests.losses.points import close, same_images

N, K, D = 6, 3, 5


def several(n=N, k=K, d=D, seed=0, dtype=torch.float64):
    """K unit embeddings of N images and of their texts, and residuals of both."""
    g = torch.Generator().manual_seed(seed)
    image = torch.randn(n, k, d, generator=g, dtype=dtype)
    text = image + 0.8 * torch.randn(n, k, d, generator=g, dtype=dtype)
    residuals = [torch.randn(n, k, d, generator=g, dtype=dtype).sigmoid() for _ in range(2)]
    means = (F.normalize(x, dim=2) for x in (image, text))
    return *(Gaussian(mean, torch.zeros_like(mean)) for mean in means), residuals


@pytest.mark.parametrize("similarity", ["cosine", "order"])
def test_similarity_is_that_of_the_closest_embeddings(similarity):
    image, text = (g.mean for g in several()[:2])
    found = multi_instance_similarity(image, text[:4], similarity)
    assert found.shape == (N, 4)
    for i, j in itertools.product(range(N), range(4)):
        every = []
        for a, b in itertools.product(image[i], text[j]):
            every.append(a @ b if similarity == "cosine" else -(b.abs() - a.abs()).clamp(min=0).norm())
        close(found[i, j], max(every))


def test_diversity_is_the_size_of_the_cosines_of_different_residuals():
    x = several()[2][0]
    total = 0.0
    for item in x:
        cosines = [float(F.cosine_similarity(item[a], item[b], dim=0)) for a in range(K) for b in range(K) if a != b]
        total += sum(c**2 for c in cosines) ** 0.5 / K**2
    close(diversity(x), total / N)


@pytest.mark.parametrize("kernel", ["rbf", "unsquared"])
def test_mmd_is_that_of_all_pairs_of_points(kernel):
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 4, generator=g, dtype=torch.float64) + shift for n, shift in ((7, 0), (5, 1)))

    def mean(a, b):
        between = [float((p - q).norm()) for p in a for q in b]
        return sum(torch.tensor(-0.3 * (d**2 if kernel == "rbf" else d)).exp() for d in between) / len(between)

    close(mmd(x, y, 0.3, kernel), mean(x, x) - 2 * mean(x, y) + mean(y, y), torch.float32)
    half = torch.randint(-8, 9, (4, 4), generator=g).double() / 4
    same = torch.cat([half, -half])  # around 0 and exact, as the root of a rounding error is no small error
    close(mmd(same, same.clone(), 0.3, kernel), 0.0)


@pytest.mark.parametrize("hardest", [True, False])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_another_caption_of_the_image_is_no_negative(hardest, reduce):
    image, text, _ = several()
    match, similarity = same_images(N), multi_instance_similarity(image.mean, text.mean)
    rows, columns = [], []
    for i in range(N):
        others = [j for j in range(N) if not match[i, j]]
        rows.append([max(0.0, 0.4 + float(similarity[i, j] - similarity[i, i])) for j in others])
        columns.append([max(0.0, 0.4 + float(similarity[j, i] - similarity[i, i])) for j in others])
    hinges = [max(row) if hardest else sum(row) for row in rows + columns]
    expected = sum(hinges) / ({"mean": N, "sum": 1}[reduce] if hardest else {"mean": N * N, "sum": 1}[reduce])
    loss = PVSELoss(0.4, hardest, diversity=0, mmd=0, reduce=reduce)
    close(loss(image, text, match).loss, expected)
    assert set(loss(image, text, match).terms) == {"triplet"}


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
def test_authors_loss_and_gradients(parity, case, which, reduce):
    v = parity("07_vse_family")
    name = f"pvse_{case}_{which}viol_reduce-{reduce}"
    names = ("v", "t") if case == "K1" else ("vk", "tk", "v_res", "t_res")
    signed = {"mil_order": torch.abs}.get(case, torch.clone)  # order's numbers are of absolute values
    leaves = [signed(torch.from_numpy(v[name])).requires_grad_() for name in names]
    image, text = (Gaussian(x, torch.zeros_like(x)) for x in leaves[:2])
    div, discrepancy = CASES[case]
    similarity = "order" if case == "mil_order" else "cosine"
    loss = PVSELoss(0.1, which == "max", div, discrepancy, 0.5, "unsquared", reduce, similarity)
    out = loss(image, text, None, leaves[2:] or None)
    close(out.loss, v[f"{name}__loss"])
    kept = leaves if div else leaves[:2]
    for i, grad in enumerate(torch.autograd.grad(out.loss, kept)):
        close(grad, v[f"{name}__grad{i}"])


def test_authors_parts(parity):
    v = {key: torch.from_numpy(x) for key, x in parity("07_vse_family").items()}
    close(multi_instance_similarity(v["vk"], v["tk"]), v["pvse_mil_scores"])
    close(diversity(v["v_res"]), v["pvse_diversity_v"])
    close(mmd(v["vk"].flatten(0, 1), v["tk"].flatten(0, 1), kernel="unsquared"), v["pvse_mmd_gamma0.5"])
