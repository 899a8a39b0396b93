"""Scores of composed queries against the similarities that the losses train."""

import pytest
import torch
from torch.nn import functional as F

from probemb import Gaussian
from probemb.compose import compose
from probemb.evaluation.composed import composed_scores
from probemb.losses import expected_similarity
from probemb.metrics import closest_items


def draw(*shape, seed):
    g = torch.Generator().manual_seed(seed)
    return Gaussian(torch.randn(*shape, generator=g), 0.5 * torch.randn(*shape, generator=g))


def test_scores_and_their_rankings():
    query, gallery = compose(draw(3, 5, 16, seed=0)), draw(40, 16, seed=1)
    density, cosine = (composed_scores(query, gallery, by) for by in ("density", "cosine"))
    assert density.shape == cosine.shape == (5, 40)
    expected = expected_similarity(query, gallery)
    torch.testing.assert_close(density(slice(1, 4)), expected[1:4], rtol=1e-5, atol=1e-4)
    every = F.cosine_similarity(query.gaussian.mean[:, None], gallery.mean[None], dim=-1)
    torch.testing.assert_close(cosine(slice(0, 5)), every)
    assert torch.equal(closest_items(density, 5, 40, 10), expected.topk(10).indices)
    with pytest.raises(ValueError, match="cosine or density"):
        composed_scores(query, gallery, "csd")
