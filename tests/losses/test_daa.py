"""DAA against loops, and against the numbers of its authors' code and of the formula as the paper means it."""

import math
from collections import Counter

import pytest
import torch

from probemb.losses import CaptionSimilarity, DAALoss, caption_tfidf, daa_loss, triplet_loss
from probemb.losses.noisy import daa_regulariser, soft_rank
from tests.losses.points import close, pairs, same_images


def semantic(n=6, m=None):
    return torch.rand(n, m or n, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def looped_rank(s, temperature, rivals=None):
    rivals = s if rivals is None else rivals
    n, m = s.shape
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    return torch.tensor(
        [
            [
                1 + sum(sigmoid(float(rivals[b, a] - s[b, c]) / temperature) for a in range(m) if a != c)
                for c in range(m)
            ]
            for b in range(n)
        ],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("hardest", [True, False])
@pytest.mark.parametrize("published", [False, True])
def test_equals_the_loop(hardest, published):
    image, text = pairs()
    s, wanted, match = image.mean @ text.mean.T, semantic(), same_images()
    expected = triplet_loss(s, match, 0.2, hardest).loss
    for x, y in ((s, wanted), (s.T, wanted.T)):
        rank, goal = (looped_rank(z, 0.05, z.T if published else None) for z in (x, y))
        ratio = [min(r, g) / max(r, g) for r, g in zip(rank.flatten().tolist(), goal.flatten().tolist())]
        expected = expected + 7 * (1 - sum(ratio) / len(ratio))
    loss = DAALoss(weight=7, temperature=0.05, published_rank=published)
    close(loss(image, text, match, semantic=wanted, hardest=hardest).loss, expected)


def test_ranks_of_a_cold_sigmoid_are_ranks_and_agreement_costs_nothing():
    s = semantic(4, 7)
    expected = (s[:, None, :] > s[:, :, None]).sum(2) + 1.0
    torch.testing.assert_close(soft_rank(s, 1e-5), expected.double())
    assert daa_regulariser(s, 3 * s + 1, 1e-5) < 1e-9
    assert daa_regulariser(s, -s, 1e-5) > 0.3


CAPTIONS = ["A dog runs, a dog!", "The dog runs.", "Red car", "A red car and a red bus", "??", "bus"]


def written_out():
    """Cosines of tf-idf rows by dictionaries."""
    words = [[w.strip(".,!?") for w in c.lower().split()] for c in CAPTIONS]
    words = [[w for w in ws if len(w) > 1] for ws in words]
    df = Counter(w for ws in words for w in set(ws))
    rows = []
    for ws in words:
        row = {w: n * (math.log(7 / (1 + df[w])) + 1) for w, n in Counter(ws).items()}
        norm = math.sqrt(sum(x * x for x in row.values())) or 1
        rows.append({w: x / norm for w, x in row.items()})
    return torch.tensor([[sum(x * b.get(w, 0) for w, x in a.items()) for b in rows] for a in rows])


def test_tfidf_and_similarity_of_images_and_captions():
    tfidf = caption_tfidf(CAPTIONS)
    dense = torch.from_numpy(tfidf.dense(range(6)))
    assert dense.shape == tfidf.shape
    torch.testing.assert_close(dense @ dense.T, written_out())
    owner = [1, 1, 0, 0, 2, 0]
    images, captions = [0, 2, 1], [0, 3, 4, 5]
    out = CaptionSimilarity(CAPTIONS, owner)(images, captions)
    by_image = [[i for i, o in enumerate(owner) if o == image] for image in images]
    expected = torch.stack([written_out()[own].mean(0)[captions] for own in by_image])
    torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match="6 captions, but 2"):
        CaptionSimilarity(CAPTIONS, [0, 1])
    with pytest.raises(ValueError, match="has no caption"):
        CaptionSimilarity(CAPTIONS, [1, 1, 0, 0, 3, 0])([0, 2], [0])


def test_authors_ranks(parity):
    v = parity("10_noisy_and_daa")
    scores, sems = torch.from_numpy(v["scores"]), torch.from_numpy(v["daa_sems"])
    for values, name in ((scores, "score"), (sems, "sem")):
        close(soft_rank(values, published=True), v[f"daa_coded_{name}_rank"])
        close(soft_rank(values), v[f"daa_rowwise_{name}_rank"])
    close(25 * daa_regulariser(scores, sems), v["daa_rowwise_loss_weight25"])
    close(25 * daa_regulariser(scores, sems, published=True), v["daa_raw_i2t"])
    close(25 * daa_regulariser(scores.T, sems.T, published=True), v["daa_raw_t2i"])
    each = torch.einsum("nkv,mv->nkm", torch.from_numpy(v["daa_tfidf_gt"]), torch.from_numpy(v["daa_tfidf_single"]))
    close(each.mean(1), v["daa_sems"])


@pytest.mark.parametrize("which", ["sum", "max"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_authors_loss_and_gradient(parity, which, dtype):
    v = parity("10_noisy_and_daa")
    scores = torch.from_numpy(v["scores"]).to(dtype).requires_grad_()
    out = daa_loss(scores, torch.from_numpy(v["daa_sems"]), hardest=which == "max", published=True)
    out.loss.backward()
    if dtype is torch.float64:
        close(out.loss, v[f"daa_{which}__loss"])
        close(scores.grad, v[f"daa_{which}__grad_scores"])
    else:  # sums that cancel, and a temperature of 0.001: against the largest element
        close(out.loss, v[f"daa_{which}__loss"], dtype)
        largest = abs(v[f"daa_{which}__grad_scores"]).max()
        close(scores.grad / largest, v[f"daa_{which}__grad_scores"] / largest, dtype)
