"""Cross attention's scores and SCAN's loss: plain loops over pairs, and the numbers of the authors' code."""

import math

import pytest
import torch

from probemb.cross_attention import CrossAttention, Tokens, attention_scores, pair_scores, unit_tokens
from probemb.losses.triplet import scan_loss, triplet_loss
from tests.losses.points import close, same_images

NORMS = ("clipped-l2norm", "l2norm", "clipped-l1norm", "l1norm", "softmax", "clipped", "none")
AGGREGATIONS = ("lse", "mean", "sum", "max")
# Every norm with every direction, every aggregation with most norms.
PAIRWISE = [
    (n, AGGREGATIONS[(i + 2 * w) % 4], way) for i, n in enumerate(NORMS) for w, way in enumerate(("t2i", "i2t"))
]


def tokens(n=6, length=5, d=7, seed=0, lengths=None, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(n, length, d, generator=g, dtype=dtype)
    lengths = torch.full((n,), length) if lengths is None else torch.tensor(lengths)
    return unit_tokens(values, torch.arange(length) < lengths[:, None])


def some(seed=0, dtype=torch.float64):
    """Regions of which some images have fewer, and texts of 1 to 6 words."""
    images = tokens(6, 5, seed=seed, lengths=[5, 3, 5, 1, 4, 5], dtype=dtype)
    return images, tokens(6, 6, seed=seed + 1, lengths=[6, 3, 4, 1, 2, 6], dtype=dtype)


def one(context, queries, how):
    """The score of one pair: tokens (c, D) and (q, D), with the attended vectors made."""
    s = context @ queries.T
    if how.norm.startswith("clipped"):
        s = torch.where(s > 0, s, 0.1 * s)
    if how.norm.endswith("l2norm"):
        s = s / (s.norm(dim=1, keepdim=True) + 1e-8)
    elif how.norm.endswith("l1norm"):
        s = s / (s.abs().sum(1, keepdim=True) + 1e-8)
    elif how.norm == "softmax":
        s = s.softmax(1)
    attended = (how.lambda_softmax * s).softmax(0).T @ context
    cosines = torch.nn.functional.cosine_similarity(queries, attended, dim=1)
    if how.aggregation == "lse":
        return torch.log(torch.exp(how.lambda_lse * cosines).sum()) / how.lambda_lse
    return getattr(cosines, {"max": "max", "sum": "sum", "mean": "mean"}[how.aggregation])()


def looped(images, texts, how):
    rows = []
    for v, v_mask in zip(*images):
        for w, w_mask in zip(*texts):
            pair = (v[v_mask], w[w_mask]) if how.direction == "t2i" else (w[w_mask], v[v_mask])
            rows.append(one(*pair, how))
    return torch.stack(rows).view(len(images.mask), len(texts.mask))


@pytest.mark.parametrize(("norm", "aggregation", "direction"), PAIRWISE)
def test_scores_and_gradients_equal_the_loop(norm, aggregation, direction):
    how = CrossAttention(direction, aggregation, norm, 4.0, 5.0)
    found, expected = [], []
    for score, out in ((attention_scores, found), (looped, expected)):
        images, texts = some()
        images, texts = (Tokens(x.values.clone().requires_grad_(), x.mask) for x in (images, texts))
        scores = score(images, texts, how)
        (scores * torch.arange(36.0).view(6, 6)).sum().backward()
        out += [scores, images.values.grad, texts.values.grad]
    for ours, theirs in zip(found, expected):
        close(ours, theirs.detach())
    images, texts = some()
    diagonal = pair_scores(images, texts, how, (torch.arange(6), torch.arange(6)))
    close(diagonal, expected[0].diagonal().detach())


@pytest.mark.parametrize(("direction", "elements"), [("t2i", 60), ("i2t", 1)])
def test_blocks_do_not_change_scores(direction, elements):
    how = CrossAttention(direction)
    images, texts = tokens(9, 5), tokens(70, 6, seed=3, lengths=[1 + i * 7 % 6 for i in range(70)])
    close(attention_scores(images, texts, how, elements), looped(images, texts, how))


@pytest.mark.parametrize(
    ("multi", "direction", "hardest"), [(True, "t2i", True), (False, "i2t", True), (True, "i2t", False)]
)
def test_loss_and_gradient_equal_hinges_of_all_pairs(multi, direction, hardest):
    how, match = CrossAttention(direction, lambda_softmax=4.0), same_images() if multi else None
    grads = []
    for loss in (
        lambda v, t: scan_loss(v, t, match, how, 0.3, hardest),
        lambda v, t: triplet_loss(looped(v, t, how), match, 0.3, hardest),
    ):
        images, texts = (Tokens(x.values.clone().requires_grad_(), x.mask) for x in some())
        out = loss(images, texts).loss
        out.backward()
        grads.append((out, images.values.grad, texts.values.grad))
    assert grads[0][0] > 0.1
    for ours, theirs in zip(*grads):
        close(ours, theirs.detach())


NAMES = {"LogSumExp": "lse", "Mean": "mean", "Max": "max", "Sum": "sum"}
AUTHORS_NORMS = {"clipped_l2norm": "clipped-l2norm", "softmax": "softmax", "l2norm": "l2norm", "no_norm": "none"}
CASES = [("LogSumExp", "clipped_l2norm"), ("Max", "clipped_l2norm"), ("Sum", "clipped_l2norm")]
CASES += [("Mean", norm) for norm in AUTHORS_NORMS]


def authors_tokens(v):
    lengths = torch.from_numpy(v["scan_lengths"])
    regions, words = torch.from_numpy(v["scan_regions"]), torch.from_numpy(v["scan_words"])
    mask = torch.arange(words.shape[1]) < lengths[:, None]
    return Tokens(regions, torch.ones(regions.shape[:2], dtype=torch.bool)), Tokens(words, mask)


@pytest.mark.parametrize(("aggregation", "norm"), CASES)
@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_authors_scores(parity, direction, aggregation, norm):
    v = parity("07_vse_family")
    how = CrossAttention(direction, NAMES[aggregation], AUTHORS_NORMS[norm])
    scores = attention_scores(*authors_tokens(v), how)
    torch.testing.assert_close(
        scores, torch.from_numpy(v[f"scan_{direction}_{aggregation}_{norm}__scores"]), rtol=2e-8, atol=0
    )


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_authors_loss(parity, direction):
    v = parity("07_vse_family")
    out = scan_loss(*authors_tokens(v), how=CrossAttention(direction))
    assert math.isclose(out.loss.item(), float(v[f"scan_{direction}_loss_m0.2_max"]), rel_tol=2e-8)
