"""Semantic continuity: likeness, neighbours and walks with known answers."""

import math

import pytest
import torch

from probemb import Gaussian
from probemb.data.captions.find import find_captions
from probemb.data.scenes import match_matrix
from probemb.evaluation.analyses.continuity import (
    Walk,
    likeness_of,
    nearest_images,
    of_neighbours,
    of_walks,
    walk,
)
from probemb.evaluation.embed_pairs import EmbeddedPairs


def on_an_arc(n=7, angle=math.pi / 2):
    """Images and captions whose codes lie on an arc, in order, of any length."""
    a = torch.linspace(0, angle, n)
    codes = torch.stack([a.cos(), a.sin()], 1) * torch.linspace(1, 3, n)[:, None]
    gaussian = Gaussian(codes, torch.zeros_like(codes))
    return EmbeddedPairs(gaussian, gaussian, torch.arange(n), list(range(n)), [])


def test_a_walk_along_an_arc_meets_everything_on_it_in_order():
    found = walk(on_an_arc(), 0, 6, 60)
    assert list(dict.fromkeys(found.images)) == list(range(7)) == list(dict.fromkeys(found.captions))
    assert found.images[0] == 0 and found.images[-1] == 6  # noqa: PT018
    assert min(found.cosines) > math.cos(math.pi / 12) - 1e-6
    assert set(walk(on_an_arc(), 2, 3, 5).images[1:-1]) == {1, 4}  # not the ends, which are nearer


def test_walks_are_measured_by_hand():
    likeness = torch.tensor([[1.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 1.0]])
    pairs = on_an_arc(3)
    one = walk(pairs, 0, 2, 5)
    assert (one.images[0], one.images[2], one.images[-1]) == (0, 1, 2)
    found = of_walks(likeness, [one, walk(pairs, 2, 0, 5)])
    assert found["consecutive"] == pytest.approx((0.5 + 0.3) / 2)
    assert found["images"] == 3
    assert found["to_start"][0] == found["to_end"][-1] == 1
    assert found["to_start"][2] == pytest.approx((0.5 + 0.3) / 2)
    assert found["to_start"][-1] == pytest.approx(0.1)
    assert of_walks(likeness, [Walk(0, 0, [0, 0, 0], [0, 0, 0], [1.0, 1.0, 1.0])])["consecutive"] is None


def test_neighbours_lie_between_random_and_the_most_similar():
    near = nearest_images(on_an_arc(7).images.mean, 2)
    assert [set(row) for row in near.tolist()] == [{1, 2}, {0, 2}, {1, 3}, {2, 4}, {3, 5}, {4, 6}, {4, 5}]
    distance = (torch.arange(7.0)[:, None] - torch.arange(7.0)).abs()
    likeness = 1 - distance / 6
    found = of_neighbours(likeness, near)
    assert found["most"] == pytest.approx(found["likeness"])  # the arc is in the likeness' order
    pairs = [1 - abs(i - j) / 6 for i in range(7) for j in range(7) if i != j]
    assert found["random"] == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)
    assert of_neighbours(likeness, near.flip(0))["likeness"] < found["likeness"]


def test_likeness_of_scenes_is_the_share_of_captions_that_are_true(captioned):
    data = find_captions(captioned)
    kept = [3, 0, 7, 11]
    found = likeness_of(data, kept)
    for row, i in enumerate(kept):
        for column, j in enumerate(kept):
            true = match_matrix([data.scenes[j][0]], data.scenes[i][1])[0]
            assert found[row, column] == pytest.approx(true.mean())
    assert (found.diagonal() == 1).all()
