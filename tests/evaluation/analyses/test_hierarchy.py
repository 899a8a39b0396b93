"""Walks through hierarchies of captions against the authors' numbers and plain loops."""

import pytest
import torch
from torch.nn.functional import normalize

from probemb import Gaussian
from probemb.distances import inclusion
from probemb.evaluation.analyses.hierarchy import (
    including_roots,
    level_correlation,
    score,
    walk,
    within_radius,
)


@pytest.fixture
def authors(parity):
    return {name: torch.from_numpy(value) for name, value in parity("27_hierarcaps").items()}


def test_the_walk_is_prolips(authors):
    images, texts = authors["image_mean_f32"].double(), authors["text_mean_f32"].double().flatten(0, 1)
    numbers, root = authors["caption_ids"], authors["root_mean_f32"].double()
    found = score(walk(images, texts, numbers.flatten(), root.expand_as(images)), numbers)
    assert [100 * x for x in found] == pytest.approx(authors["det__precision_recall_any"].tolist())
    # The public code's root: the log of the integral of p_image^2 p_text alone, its log-determinant counted twice.
    s1, s2 = authors["image_log_var_f32"].double()[:, None], authors["text_log_var_f32"].double().flatten(0, 1)
    i1, i2 = (-s1).exp(), (-s2).exp()
    best = []
    for rows in torch.arange(len(images)).split(50):
        m1, a = images[rows, None], i1[rows] + i2 / 2
        b = 2 * m1 * i1[rows] + texts * i2
        c = m1.square() * i1[rows] + texts.square() * i2 / 2
        one_sided = (-2 * s1[rows] - s2 - a.log() / 2 + b.square() / (4 * a) - c).sum(-1)
        best.append(one_sided.argmax(1))
    chosen = texts[torch.cat(best)]
    for name, roots in (("unc", chosen), ("unc_with_root", normalize(chosen + root, dim=1))):
        found = score(walk(images, texts, numbers.flatten(), roots), numbers)
        assert [100 * x for x in found] == pytest.approx(authors[f"{name}__precision_recall_any"].tolist()), name


def test_the_radii_are_hierarcaps(authors):
    rows, image_of_row = authors["original__rows"], authors["original__image_of_row"]
    texts = authors["text_mean_f32"].double()[rows]
    images, root = authors["image_mean_f32"].double()[image_of_row], authors["root_mean_f32"].double()
    correlation, precision, recall = authors["original__dcorr_precision_recall"].tolist()
    assert level_correlation((texts - root).norm(dim=-1)) == pytest.approx(correlation)
    numbers = authors["caption_ids"][rows]
    found, precisions, recalls = within_radius(images, texts.flatten(0, 1), numbers.flatten(), root), [], []
    for seen, image in zip(found, image_of_row):  # two chains an image there, of which a hit of either counts
        hit = torch.isin(numbers[image_of_row == image], seen)
        recalls.append(hit.any(0).double().mean())
        precisions.append(torch.isin(seen, numbers[image_of_row == image]).double().mean())
    assert float(sum(precisions) / 80) == pytest.approx(precision)
    assert float(sum(recalls) / 80) == pytest.approx(recall)


def test_roots_lie_between_the_root_and_the_most_including_caption():
    g = torch.Generator().manual_seed(1)
    images, texts = (Gaussian(torch.randn(n, 4, generator=g), torch.randn(n, 4, generator=g)) for n in (20, 9))
    root, best = torch.randn(4, generator=g), inclusion(images, texts).argmax(1)
    torch.testing.assert_close(including_roots(images, texts, root), normalize(texts.mean[best] + root, dim=1))
