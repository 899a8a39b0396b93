"""DECL against torch.distributions, samples of the Dirichlet, loops, and the numbers of its authors' code."""

import pytest
import torch
from torch.distributions import Dirichlet, kl_divergence

from probemb.losses import DECLLoss, decl_correspondence, decl_loss
from probemb.losses.noisy import dirichlet_kl, dynamic_hinge, evidence, evidential_loss
from tests.losses.points import close, pairs, same_images


def alpha(n=4, m=6):
    return 1 + 3 * torch.rand(n, m, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_kl_of_dirichlets():
    a = alpha()
    close(dirichlet_kl(a), kl_divergence(Dirichlet(a), Dirichlet(torch.ones_like(a))))


def test_error_is_the_expectation_over_the_dirichlet():
    a, label = alpha(), torch.eye(4, 6, dtype=torch.float64)
    label[3] = 0  # a query without a match
    torch.manual_seed(0)
    sampled = (label - Dirichlet(a).sample((200_000,))).square().sum(-1).mean(0)
    torch.testing.assert_close(evidential_loss(a - 1, label, 0.0), sampled, rtol=5e-3, atol=0)
    misplaced = (a - 1) * (1 - label) + 1
    kl = kl_divergence(Dirichlet(misplaced), Dirichlet(torch.ones_like(a)))
    close(evidential_loss(a - 1, label, 0.3) - evidential_loss(a - 1, label, 0.0), 0.3 * kl)


def test_whole_loss_with_noisy_pairs_and_several_captions_of_an_image():
    image, text = pairs()
    s, match, clean = image.mean @ text.mean.T, same_images(), torch.tensor([1, 1, 0, 1, 1, 0]).bool()
    label = match.clone()
    label[:, [2, 5]] = 0
    e, expected = (s.tanh() / 0.2).exp(), 0.0
    for evidence_of, y in ((e, label), (e.T, label.T)):
        a = evidence_of + 1
        p = a / a.sum(1, keepdim=True)
        target = torch.stack([row / row.sum() if row.sum() else row for row in y])
        error = (target - p).square() + Dirichlet(a).variance
        kl = kl_divergence(Dirichlet(evidence_of * (1 - y) + 1), Dirichlet(torch.ones_like(a)))
        expected = expected + (error.sum(1) + 0.3 * kl).mean()
    b = s.tanh()
    for i in range(6):
        if clean[i]:
            others = [j for j in range(6) if j != i and not match[i, j]]
            rows = sorted((max(0.0, float(0.4 + b[i, j] - b[i, i])) for j in others), reverse=True)[:2]
            columns = sorted((max(0.0, float(0.4 + b[j, i] - b[i, i])) for j in others), reverse=True)[:2]
            expected = expected + 0.5 * (sum(rows) + sum(columns)) / 2
    loss = DECLLoss(tau=0.2, kl_weight=0.3, hinge_weight=0.5, margin=0.4, eta=1.0, min_negatives=2)
    out = loss(image, text, match, clean=clean, step=100)
    close(out.loss, expected)
    assert set(out.terms) == {"evidential", "hinge"}
    close(loss(image, text).loss, loss(image, text, torch.eye(6), clean=torch.ones(6)).loss)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", ["clean", "noisy13"])
def test_authors_evidential_loss(parity, case, dtype):
    v = parity("10_noisy_and_daa")
    raw = torch.from_numpy(v["decl_raw"]).to(dtype).requires_grad_()
    e = evidence(raw)
    label = torch.eye(len(raw), dtype=dtype)
    if case == "noisy13":
        label[1, 1] = label[3, 3] = 0
    per_row = evidential_loss(e, label) + evidential_loss(e.T, label.T)
    per_row.mean().backward()
    close(per_row, v[f"decl_edl_{case}_per_row"], dtype)
    close(per_row.mean(), v[f"decl_edl_{case}"], dtype)
    close(raw.grad, v[f"decl_edl_{case}__grad_raw"], dtype)
    clean = label.diagonal()
    close(decl_loss(raw, None, clean, negatives=3).terms["evidential"], v[f"decl_edl_{case}"], dtype)


def test_authors_parts(parity):
    v = parity("10_noisy_and_daa")
    raw = torch.from_numpy(v["decl_raw"])
    e = evidence(raw)
    close(e, v["decl_evidence"])
    close(dirichlet_kl(e + 1), v["decl_KL"])
    clean, uncertainty = decl_correspondence(raw)
    close(uncertainty, v["decl_uncertainty"])
    assert clean.tolist() == (v["decl_norm_e"].argmax(1) == range(len(raw))).tolist()
    for k in (1, 3, len(raw) - 1):
        close(dynamic_hinge(raw.tanh(), k), v[f"decl_rdh_neg{k}"])
