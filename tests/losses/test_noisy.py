"""NCR, DECL, P2RM and DAA: against loops, torch.distributions, and the numbers of their authors' code."""

import math

import pytest
import torch
from torch.distributions import Dirichlet, kl_divergence

from probemb.losses import noisy
from tests.losses.points import close, pairs, same_images

MARGIN_OF = {
    "linear": lambda y: y,
    "exponential": lambda y: (10**y - 1) / 9,
    "sin": lambda y: (math.sin(math.pi * y - math.pi / 2) + 1) / 2,
}


@pytest.mark.parametrize("kind", noisy.SOFT_MARGINS)
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
    out = noisy.ncr_loss(s, label, match, margin=0.4, soft_margin=kind, hardest=hardest)
    close(out.loss, expected)


def mixture(n=4000, clean=0.7):
    g = torch.Generator().manual_seed(0)
    is_clean = torch.rand(n, generator=g) < clean
    low, high = 0.3 + 0.1 * torch.randn(n, generator=g), 1.5 + 0.25 * torch.randn(n, generator=g)
    return torch.where(is_clean, low, high).double(), is_clean


def test_mixture_finds_its_two_normals():
    x, is_clean = mixture()
    p = noisy.clean_probability(x)
    assert ((p > 0.5) == is_clean).double().mean() > 0.99
    assert abs(p.mean() - 0.7) < 0.02
    # the posterior of the true parts, at the true scale
    density = lambda m, s: (-0.5 * ((x - m) / s) ** 2).exp() / s  # noqa: E731
    true = 0.7 * density(0.3, 0.1) / (0.7 * density(0.3, 0.1) + 0.3 * density(1.5, 0.25))
    assert (noisy.clean_probability(x, 200, 1e-10, 0.0) - true).abs().mean() < 5e-3
    close(noisy.clean_probability(10 * x - 3), p)  # neither scale nor origin matters
    assert torch.equal(noisy.clean_probability(x), p)


@pytest.mark.parametrize("n", [2, 10, 500])
def test_pairs_that_are_all_as_clean_are_split_in_two_parts(n):
    clean = noisy.split_clean(torch.ones(n).double())
    assert (~clean).sum() == n // 100 + 1
    probability = torch.ones(n).double()
    probability[1] = 0.9
    assert not noisy.split_clean(probability)[1]
    assert noisy.split_clean(torch.ones(1).double()).all()


def test_authors_modes(parity):
    v = parity("10_noisy_and_daa")
    s = torch.from_numpy(v["scores"])
    close(noisy.ncr_loss(s).loss, v["ncr_train_nolabel"])
    close(noisy.ncr_loss(s, hardest=False).loss, v["ncr_warmup_nolabel"])
    close(noisy.ncr_loss(s, hardest=False).loss, v["ncr_train_nolabel_soft_negatives"])
    close(noisy.ncr_pair_losses(s), v["ncr_eval_loss_nolabel"])
    close(noisy.ncr_predict(s), v["ncr_predict_clamped01"])
    q = torch.from_numpy(v["ncr_split_prob_in"])
    assert torch.equal(noisy.split_clean(q), torch.from_numpy(v["ncr_split_prob_thr0.5"]))
    assert torch.equal(noisy.split_clean(q, 0.01), torch.from_numpy(v["ncr_split_prob_allabove"]))


@pytest.mark.parametrize("kind", noisy.SOFT_MARGINS)
@pytest.mark.parametrize("shape", ["vecB", "colBx1"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_authors_margins_as_coded(parity, kind, shape, dtype):
    v = parity("10_noisy_and_daa")
    s = torch.from_numpy(v["scores"]).to(dtype).requires_grad_()
    label = torch.from_numpy(v["ncr_labels"]).to(dtype)
    label = label[:, None] if shape == "colBx1" else label
    out = noisy.ncr_loss(s, label, soft_margin=kind, published_margins=True)
    out.loss.backward()
    close(out.loss, v[f"ncr_train_{kind}_{shape}"], dtype)
    close(s.grad, v[f"ncr_train_{kind}_{shape}__grad_scores"], dtype)


def test_authors_refined_labels_as_broadcast(parity):
    v = parity("10_noisy_and_daa")
    s, w = torch.from_numpy(v["scores"]), torch.from_numpy(v["ncr_prob_Bx1"])
    label = noisy.refine_labels(torch.from_numpy(v["ncr_predict_clamped01"]), w, torch.tensor(True))
    close(label, v["ncr_refined_target_as_broadcast_BxB"])
    close(noisy.ncr_loss(s, label, published_margins=True).loss, v["ncr_train_exponential_broadcastBxB"])


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
    options = dict(negatives=2, tau=0.2, kl_weight=0.3, hinge_weight=0.5, margin=0.4)
    out = noisy.decl_loss(s, match, clean, **options)
    close(out.loss, expected)
    assert set(out.terms) == {"evidential", "hinge"}
    close(noisy.decl_loss(s, **options).loss, noisy.decl_loss(s, torch.eye(6), torch.ones(6), **options).loss)
    assert [noisy.n_negatives(6, step, 1.0, 2) for step in (0, 3, 100)] == [6, 3, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", ["clean", "noisy13"])
def test_authors_evidential_loss(parity, case, dtype):
    v = parity("10_noisy_and_daa")
    raw = torch.from_numpy(v["decl_raw"]).to(dtype).requires_grad_()
    e = noisy.evidence(raw)
    label = torch.eye(len(raw), dtype=dtype)
    if case == "noisy13":
        label[1, 1] = label[3, 3] = 0
    per_row = noisy.evidential_loss(e, label) + noisy.evidential_loss(e.T, label.T)
    per_row.mean().backward()
    close(per_row, v[f"decl_edl_{case}_per_row"], dtype)
    close(per_row.mean(), v[f"decl_edl_{case}"], dtype)
    close(raw.grad, v[f"decl_edl_{case}__grad_raw"], dtype)
    clean = label.diagonal()
    close(noisy.decl_loss(raw, None, clean, negatives=3).terms["evidential"], v[f"decl_edl_{case}"], dtype)


def test_authors_parts(parity):
    v = parity("10_noisy_and_daa")
    raw = torch.from_numpy(v["decl_raw"])
    e = noisy.evidence(raw)
    close(e, v["decl_evidence"])
    close(noisy.dirichlet_kl(e + 1), v["decl_KL"])
    assert noisy.dirichlet_kl(e * torch.nan).isnan().all()  # which a trainer reports with its samples
    clean, uncertainty = noisy.decl_correspondence(raw)
    close(uncertainty, v["decl_uncertainty"])
    assert clean.tolist() == (v["decl_norm_e"].argmax(1) == range(len(raw))).tolist()
    for k in (1, 3, len(raw) - 1):
        close(noisy.dynamic_hinge(raw.tanh(), k), v[f"decl_rdh_neg{k}"])


def test_distance_is_to_the_nearest_point_of_the_rectangle():
    image, text = pairs()
    half = torch.tensor([0.0, 0.1, 0.3, 0.5, 3.0]).double()
    low, high = text.mean - half, text.mean + half
    nearest = torch.minimum(torch.maximum(image.mean[:, None], low), high)  # (N, M, D)
    close(noisy.point_to_rectangle(image.mean, text.mean, half), (image.mean[:, None] - nearest).square().sum(-1))
    assert not noisy.point_to_rectangle(text.mean, text.mean, half).diagonal().any()


CAPTIONS = ["A dog runs, a dog!", "The dog runs.", "Red car", "A red car and a red bus", "??", "bus"]


def test_similarity_is_the_mean_over_an_images_captions():
    """Of unit rows of tf-idf, in which the caption without words is zero."""
    rows = torch.from_numpy(noisy.caption_tfidf(CAPTIONS).toarray())
    assert rows.norm(dim=1).tolist() == pytest.approx([1, 1, 1, 1, 0, 1])
    owner = [1, 1, 0, 0, 2, 0]
    out = noisy.CaptionSimilarity(CAPTIONS, owner)([0, 2, 1], [0, 3, 4, 5])
    own = [[i for i, o in enumerate(owner) if o == image] for image in (0, 2, 1)]
    torch.testing.assert_close(out, torch.stack([(rows @ rows.T)[i].mean(0)[[0, 3, 4, 5]] for i in own]))


def test_authors_ranks(parity):
    v = parity("10_noisy_and_daa")
    scores, sems = torch.from_numpy(v["scores"]), torch.from_numpy(v["daa_sems"])
    for values, name in ((scores, "score"), (sems, "sem")):
        close(noisy.soft_rank(values, published=True), v[f"daa_coded_{name}_rank"])
        close(noisy.soft_rank(values), v[f"daa_rowwise_{name}_rank"])
    close(25 * noisy.daa_regulariser(scores, sems), v["daa_rowwise_loss_weight25"])
    close(25 * noisy.daa_regulariser(scores, sems, published=True), v["daa_raw_i2t"])
    close(25 * noisy.daa_regulariser(scores.T, sems.T, published=True), v["daa_raw_t2i"])
    each = torch.einsum("nkv,mv->nkm", torch.from_numpy(v["daa_tfidf_gt"]), torch.from_numpy(v["daa_tfidf_single"]))
    close(each.mean(1), v["daa_sems"])


@pytest.mark.parametrize("which", ["sum", "max"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_authors_loss_and_gradient(parity, which, dtype):
    v = parity("10_noisy_and_daa")
    scores = torch.from_numpy(v["scores"]).to(dtype).requires_grad_()
    out = noisy.daa_loss(scores, torch.from_numpy(v["daa_sems"]), hardest=which == "max", published=True)
    out.loss.backward()
    if dtype is torch.float64:
        close(out.loss, v[f"daa_{which}__loss"])
        close(scores.grad, v[f"daa_{which}__grad_scores"])
    else:  # sums that cancel, and a temperature of 0.001: against the largest element
        close(out.loss, v[f"daa_{which}__loss"], dtype)
        largest = abs(v[f"daa_{which}__grad_scores"]).max()
        close(scores.grad / largest, v[f"daa_{which}__grad_scores"] / largest, dtype)
