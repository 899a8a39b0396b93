"""Scores of queries against plain loops and torch.distributions, what they know, inclusion as generality, erasing."""

import math

import pytest
import torch

from probemb import Gaussian
from probemb.distances import inclusion
from probemb.evaluation import uncertainty
from probemb.evaluation.embedding import EmbeddedPairs
from probemb.evaluation.uncertainty import (
    assess,
    direction,
    erase_pixels,
    erase_regions,
    erase_words,
    evenly,
    nested_pairs,
    prefix,
    projection,
    query_scores,
    runs_against_recall,
)
from probemb.models import create_model
from probemb.models.match import MatchModel


def gaussians(n, seed, dim=6):
    r = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(n, dim, generator=r), dim=1)
    return Gaussian(mean, torch.randn(n, dim, generator=r) - 3)


def test_scores_equal_a_plain_loop_in_blocks_of_any_size(monkeypatch):
    queries, gallery, model = gaussians(9, 0), gaussians(14, 1), MatchModel(4.0, 3.0)
    want = {name: [] for name in uncertainty.TITLES}
    for mean, log_var in zip(queries.mean.double(), queries.log_var.double()):
        apart, probability, sampled = [], [], []
        for other, other_log_var in zip(gallery.mean.double(), gallery.log_var.double()):
            apart.append(sum((float(a) - float(b)) ** 2 for a, b in zip(mean, other)))
            sampled.append(apart[-1] + sum(math.exp(x) for x in (*log_var.tolist(), *other_log_var.tolist())))
            probability.append(1 / (1 + math.exp(4 * sampled[-1] - 3)))
        order = sorted(range(14), key=lambda j: sampled[j])[:10]
        nearest = gallery.mean[order].double()
        shares = torch.tensor(probability, dtype=torch.float64)
        first, second = sorted(apart)[:2]
        for name, value in {
            "u": float(log_var.exp().sum()), "expected-matches": sum(probability),
            "entropy": float(torch.distributions.Categorical(probs=shares).entropy()),
            "spread": float(torch.cdist(nearest, nearest).square().sum()) / 200,  # of all pairs: twice the variance
            "distance": first, "margin": first - second,
        }.items():  # fmt: skip
            want[name].append(value)
    for elements in (1, 30, 1 << 20):
        monkeypatch.setattr(uncertainty, "BLOCK_ELEMENTS", elements)
        found = query_scores(queries, gallery, model)
        assert list(found) == list(uncertainty.TITLES)
        for name, values in want.items():
            assert found[name].tolist() == pytest.approx(values, rel=1e-4, abs=1e-5), name


def test_a_point_model_has_neither_u_nor_match_probabilities():
    queries, gallery = gaussians(5, 0), gaussians(7, 1)
    points = [Gaussian(one.mean, torch.full_like(one.mean, -20.0)) for one in (queries, gallery)]
    model = create_model("ViT-Micro-32", probabilistic=False).match_model
    assert model.temperature == pytest.approx(1 / 0.07)
    found = query_scores(*points, model)
    assert list(found) == ["entropy", "spread", "distance", "margin"]
    truth = torch.distributions.Categorical(logits=queries.mean @ gallery.mean.T / 0.07).entropy()
    torch.testing.assert_close(found["entropy"], truth, rtol=1e-3, atol=1e-4)
    assert "point model" in model.describe()
    assert MatchModel(5.0, -2.0).describe() == "sigmoid(-5 CSD - 2)"


def test_the_table_knows_the_right_from_the_reversed():
    r = torch.Generator().manual_seed(0)
    ambiguity = torch.rand(1000, generator=r)
    correct = (torch.rand(1000, generator=r) > ambiguity).double()
    accepted = torch.where(torch.rand(1000, generator=r) < 0.3, ambiguity, torch.nan)
    scores = {"u": -ambiguity, "entropy": ambiguity, "distance": torch.rand(1000, generator=r)}
    rows = {row["score"]: row for row in assess(scores, correct, torch.arange(1000) // 5, ambiguity, accepted)}
    assert {name: runs_against_recall(row) for name, row in rows.items()} == {
        "u": True, "entropy": False, "distance": False
    }  # fmt: skip
    right = rows["entropy"]
    assert right["ambiguity"]["value"] == right["accepted_share"]["value"] == pytest.approx(1)
    assert right["r@1"]["value"] < 0 < right["gain"]["value"]
    assert rows["u"]["halves"]["certain"] == pytest.approx(right["halves"]["rest"])
    assert abs(rows["distance"]["gain"]["value"]) < 3 * rows["distance"]["gain"]["se"]
    alone = assess(scores, correct)[0]
    assert alone["ambiguity"] is None
    assert alone["accepted_share"] is None


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
    found = direction(texts, match)
    assert found["pairs"] == found["found"] == len(pairs)
    assert found["lies_in"]["value"] == pytest.approx(float((score > 0).double().mean()))
    label = torch.arange(2 * len(pairs)) < len(pairs)
    area = pytest.importorskip("sklearn.metrics").roc_auc_score(label, torch.cat([score, -score]))
    assert found["roc_auc"]["value"] == pytest.approx(area)
    for name in ("lies_in", "roc_auc"):
        assert 0 < found[name]["low"] < found[name]["value"] < found[name]["high"] < 1
    monkeypatch.setattr(uncertainty, "NESTED_PAIRS", 50)
    few = direction(texts, match)
    assert (few["pairs"], few["found"]) == (50, len(pairs))
    assert few == direction(texts, match)


def test_nested_captions_are_those_whose_images_are():
    """Captions 0 < 2, 1 < 2, and 3 overlaps 2: the pairs are (0, 2) and (1, 2)."""
    match = torch.tensor([[1, 0, 1, 0], [1, 0, 1, 0], [0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)
    assert [rows.tolist() for rows in nested_pairs(match)] == [[0, 1], [2, 2]]


def test_a_collapsed_model_has_a_plane():
    """t-SNE divides its start by the spread of the points, and ends the process at NaN."""
    same = Gaussian(torch.eye(8)[:1].expand(40, 8), torch.zeros(40, 8))
    found = projection(EmbeddedPairs(same, same, torch.arange(40), list(range(40)), []))
    assert found["method"] == "the first two dimensions"
    assert found["images"]["x"].tolist() == [1] * 40


def test_what_is_erased_is_what_was_asked_for():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.ones(3, 3, 20, 20)
    for share in (0.0, 0.25, 1.0):
        erased = erase_pixels(pixels, share, generator)
        assert (erased == 0).double().mean().item() == pytest.approx(share, abs=0.01)
    regions = torch.ones(2, 5, 3)
    regions[1, 1:] = 0  # an image with one region
    for share, left in ((0.0, [5, 1]), (0.4, [3, 1]), (1.0, [1, 1])):
        assert (erase_regions(regions, share, generator) != 0).all(-1).sum(1).tolist() == left
    words = "a b c d e f g h i j"
    assert [prefix(words, share) for share in (0.0, 0.3, 1.0)] == [words, "a b c d e f g", ""]
    assert erase_words(words, 0.0, generator) == words
    left = erase_words(words, 0.3, generator).split()
    assert len(left) == 7
    assert left == sorted(left)
    assert erase_words("one", 0.8, generator) == ""
    assert evenly(100, 3) == [0, 50, 99]
    assert evenly(2, 5) == [0, 1]
    assert evenly(3, 1) == [0]
