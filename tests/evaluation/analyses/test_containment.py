"""Inclusion as generality against plain loops, and on widths that are known."""

import pytest
import torch

from probemb.distances import inclusion
from probemb.evaluation.analyses import containment
from probemb.evaluation.analyses.containment import direction
from probemb.gaussian import Gaussian
from probemb.metrics import roc_auc

D = 6


def normals(n, seed=0, spread=0.3):
    generator = torch.Generator().manual_seed(seed)
    return Gaussian(torch.randn(n, D, generator=generator), spread * torch.randn(n, D, generator=generator) - 2)


def scenes(n_images=40, n_captions=25, seed=3):
    """Captions that are true of the images below a number: sets that are all nested; the wider the more images."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, n_images, (n_captions,), generator=generator)
    return torch.arange(n_images)[:, None] < sizes[None, :], sizes


def test_direction_is_that_of_a_loop(monkeypatch):
    match, sizes = scenes()
    texts = normals(len(sizes), spread=0.6)
    texts = Gaussian(texts.mean, texts.log_var + 0.02 * sizes[:, None])
    test, pairs = inclusion(texts, texts), [(a, b) for a in range(25) for b in range(25) if sizes[a] < sizes[b]]
    score = torch.tensor([test[a, b] for a, b in pairs])
    found = direction(texts, match)
    assert found["pairs"] == found["found"] == len(pairs)
    assert found["lies_in"]["value"] == pytest.approx(float((score > 0).double().mean()))
    label = torch.arange(2 * len(pairs)) < len(pairs)
    assert found["roc_auc"]["value"] == pytest.approx(roc_auc(torch.cat([score, -score]), label))
    for name in ("lies_in", "roc_auc"):
        assert 0 < found[name]["low"] < found[name]["value"] < found[name]["high"] < 1
    monkeypatch.setattr(containment, "NESTED_PAIRS", 50)
    few = direction(texts, match)
    assert (few["pairs"], few["found"]) == (50, len(pairs))
    assert few == direction(texts, match)
