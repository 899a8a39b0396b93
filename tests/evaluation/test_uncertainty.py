"""The sign of u, inclusion as generality, and erasing."""

import pytest
import torch

from probemb import Gaussian
from probemb.distances import inclusion
from probemb.evaluation import uncertainty
from probemb.evaluation.embedding import EmbeddedPairs


def test_a_u_with_the_wrong_sign_is_told():
    r = torch.Generator().manual_seed(0)
    u, image = torch.rand(1000, generator=r) + 0.1, torch.zeros(200, 1)
    found = torch.rand(1000, generator=r) < u  # the larger u the more often
    texts = Gaussian(torch.zeros(1000, 1), u.log()[:, None])
    pairs = EmbeddedPairs(Gaussian(image, image), texts, torch.arange(1000) // 5, list(range(200)), [])
    turned, right = (uncertainty.signs(pairs, {"captions": x, "images": torch.ones(200)}) for x in (found, ~found))
    assert turned["captions"]["r@1"]["value"] == pytest.approx(-right["captions"]["r@1"]["value"])
    assert turned["captions"]["halves"]["certain"] < turned["captions"]["halves"]["rest"]
    assert turned["images"] == {"r@1": None, "halves": None}
    assert "u runs against recall here (captions: Spearman with R@1 +0." in turned["warning"]
    assert right["warning"] is None


def normals(n, seed=0, spread=0.3):
    generator = torch.Generator().manual_seed(seed)
    return Gaussian(torch.randn(n, 6, generator=generator), spread * torch.randn(n, 6, generator=generator) - 2)


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
    found = uncertainty.direction(texts, match)
    assert found["pairs"] == found["found"] == len(pairs)
    assert found["lies_in"]["value"] == pytest.approx(float((score > 0).double().mean()))
    label = torch.arange(2 * len(pairs)) < len(pairs)
    area = pytest.importorskip("sklearn.metrics").roc_auc_score(label, torch.cat([score, -score]))
    assert found["roc_auc"]["value"] == pytest.approx(area)
    for name in ("lies_in", "roc_auc"):
        assert 0 < found[name]["low"] < found[name]["value"] < found[name]["high"] < 1
    monkeypatch.setattr(uncertainty, "NESTED_PAIRS", 50)
    few = uncertainty.direction(texts, match)
    assert (few["pairs"], few["found"]) == (50, len(pairs))
    assert few == uncertainty.direction(texts, match)


def test_nested_captions_are_those_whose_images_are():
    """Captions 0 < 2, 1 < 2, and 3 overlaps 2: the pairs are (0, 2) and (1, 2)."""
    match = torch.tensor([[1, 0, 1, 0], [1, 0, 1, 0], [0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)
    assert [rows.tolist() for rows in uncertainty.nested_pairs(match)] == [[0, 1], [2, 2]]


def test_a_collapsed_model_has_a_plane():
    """t-SNE divides its start by the spread of the points, and ends the process at NaN."""
    same = Gaussian(torch.eye(8)[:1].expand(40, 8), torch.zeros(40, 8))
    found = uncertainty.projection(EmbeddedPairs(same, same, torch.arange(40), list(range(40)), []))
    assert found["method"] == "the first two dimensions"
    assert found["images"]["x"].tolist() == [1] * 40


def test_what_is_erased_is_what_was_asked_for():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.ones(3, 3, 20, 20)
    for share in (0.0, 0.25, 1.0):
        erased = uncertainty.erase_pixels(pixels, share, generator)
        assert (erased == 0).double().mean().item() == pytest.approx(share, abs=0.01)
    regions = torch.ones(2, 5, 3)
    regions[1, 1:] = 0  # an image with one region
    for share, left in ((0.0, [5, 1]), (0.4, [3, 1]), (1.0, [1, 1])):
        assert (uncertainty.erase_regions(regions, share, generator) != 0).all(-1).sum(1).tolist() == left
    words = "a b c d e f g h i j"
    assert [uncertainty.prefix(words, share) for share in (0.0, 0.3, 1.0)] == [words, "a b c d e f g", ""]
    assert uncertainty.erase_words(words, 0.0, generator) == words
    left = uncertainty.erase_words(words, 0.3, generator).split()
    assert len(left) == 7
    assert left == sorted(left)
    assert uncertainty.erase_words("one", 0.8, generator) == ""
    assert uncertainty.evenly(100, 3) == [0, 50, 99]
    assert uncertainty.evenly(2, 5) == [0, 1]
    assert uncertainty.evenly(3, 1) == [0]
