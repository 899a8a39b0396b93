"""NCR against loops, a mixture with known parts, and the numbers of its authors' code."""

import math

import pytest
import torch

from probemb.losses import NCRLoss, clean_probability, ncr_loss, refine_labels, split_clean
from probemb.losses.noisy import SOFT_MARGINS, ncr_pair_losses, ncr_predict
from tests.losses.points import close, pairs, same_images

MARGIN_OF = {
    "linear": lambda y: y,
    "exponential": lambda y: (10**y - 1) / 9,
    "sin": lambda y: (math.sin(math.pi * y - math.pi / 2) + 1) / 2,
}


@pytest.mark.parametrize("kind", SOFT_MARGINS)
@pytest.mark.parametrize("hardest", [True, False])
def test_every_pair_has_its_own_margin_in_both_directions(kind, hardest):
    image, text = pairs()
    label, match = torch.linspace(0, 1, 6).double(), same_images()
    s, expected = image.mean @ text.mean.T, 0.0
    for i in range(6):
        margin = 0.4 * MARGIN_OF[kind](float(label[i]))
        others = [j for j in range(6) if j != i and match[i, j] == 0]
        rows = [max(0.0, margin + float(s[i, j] - s[i, i])) for j in others]
        columns = [max(0.0, margin + float(s[j, i] - s[i, i])) for j in others]
        expected += max(rows) + max(columns) if hardest else (sum(rows) + sum(columns)) / 6
    out = NCRLoss(0.4, kind)(image, text, match, label=label, hardest=hardest)
    close(out.loss, expected)


def mixture(n=4000, clean=0.7):
    g = torch.Generator().manual_seed(0)
    is_clean = torch.rand(n, generator=g) < clean
    low, high = 0.3 + 0.1 * torch.randn(n, generator=g), 1.5 + 0.25 * torch.randn(n, generator=g)
    return torch.where(is_clean, low, high).double(), is_clean


def test_mixture_finds_its_two_normals():
    x, is_clean = mixture()
    p = clean_probability(x)
    assert ((p > 0.5) == is_clean).double().mean() > 0.99
    assert abs(p.mean() - 0.7) < 0.02
    # the posterior of the true parts, at the true scale
    density = lambda m, s: (-0.5 * ((x - m) / s) ** 2).exp() / s  # noqa: E731
    true = 0.7 * density(0.3, 0.1) / (0.7 * density(0.3, 0.1) + 0.3 * density(1.5, 0.25))
    assert (clean_probability(x, 200, 1e-10, 0.0) - true).abs().mean() < 5e-3
    close(clean_probability(10 * x - 3), p)  # neither scale nor origin matters
    assert torch.equal(clean_probability(x), p)


@pytest.mark.parametrize("n", [2, 10, 500])
def test_pairs_that_are_all_as_clean_are_split_in_two_parts(n):
    clean = split_clean(torch.ones(n).double())
    assert (~clean).sum() == n // 100 + 1
    probability = torch.ones(n).double()
    probability[1] = 0.9
    assert not split_clean(probability)[1]
    assert split_clean(torch.ones(1).double()).all()


def test_authors_modes(parity):
    v = parity("10_noisy_and_daa")
    s = torch.from_numpy(v["scores"])
    close(ncr_loss(s).loss, v["ncr_train_nolabel"])
    close(ncr_loss(s, hardest=False).loss, v["ncr_warmup_nolabel"])
    close(ncr_loss(s, hardest=False).loss, v["ncr_train_nolabel_soft_negatives"])
    close(ncr_pair_losses(s), v["ncr_eval_loss_nolabel"])
    close(ncr_predict(s), v["ncr_predict_clamped01"])
    q = torch.from_numpy(v["ncr_split_prob_in"])
    assert torch.equal(split_clean(q), torch.from_numpy(v["ncr_split_prob_thr0.5"]))
    assert torch.equal(split_clean(q, 0.01), torch.from_numpy(v["ncr_split_prob_allabove"]))


@pytest.mark.parametrize("kind", SOFT_MARGINS)
@pytest.mark.parametrize("shape", ["vecB", "colBx1"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_authors_margins_as_coded(parity, kind, shape, dtype):
    v = parity("10_noisy_and_daa")
    s = torch.from_numpy(v["scores"]).to(dtype).requires_grad_()
    label = torch.from_numpy(v["ncr_labels"]).to(dtype)
    label = label[:, None] if shape == "colBx1" else label
    out = ncr_loss(s, label, soft_margin=kind, published_margins=True)
    out.loss.backward()
    close(out.loss, v[f"ncr_train_{kind}_{shape}"], dtype)
    close(s.grad, v[f"ncr_train_{kind}_{shape}__grad_scores"], dtype)


def test_authors_refined_labels_as_broadcast(parity):
    v = parity("10_noisy_and_daa")
    s, w = torch.from_numpy(v["scores"]), torch.from_numpy(v["ncr_prob_Bx1"])
    label = refine_labels(torch.from_numpy(v["ncr_predict_clamped01"]), w, torch.tensor(True))
    close(label, v["ncr_refined_target_as_broadcast_BxB"])
    close(ncr_loss(s, label, published_margins=True).loss, v["ncr_train_exponential_broadcastBxB"])
