"""Mixing and erasing as operations on sets, on normals made so that the answer is known, and against samples."""

import math

import pytest
import torch

from probemb import Gaussian
from probemb.evaluation.analyses.set_algebra import coverage, erasing, geometric_sigma, mixing, nested_pairs

N, D = 12, 6


def normals(n=N, log_var=-2.0, seed=0) -> Gaussian:
    r = torch.Generator().manual_seed(seed)
    return Gaussian(torch.randn(n, D, generator=r), log_var + 0.3 * torch.randn(n, D, generator=r))


def test_coverage_is_the_share_of_samples_in_the_central_interval():
    a, b = normals(3, seed=1), normals(3, seed=2)
    z = a.sample(200_000, torch.Generator().manual_seed(3))
    edge = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.95))
    inside = ((z - b.mean[:, None]).abs() <= edge * b.std[:, None]).double().mean((1, 2))
    torch.testing.assert_close(coverage(a, b), inside, rtol=0, atol=3e-3)
    torch.testing.assert_close(coverage(a, a), torch.full((3,), 0.9).double())
    wide = Gaussian(a.mean, a.log_var + 10)
    assert (coverage(a, wide) > 0.999).all()
    assert (coverage(wide, a) < 0.02).all()


def test_an_embedding_of_the_intersection_covers_it_and_one_of_something_else_does_not():
    a, b = normals(seed=1), normals(seed=2)
    precision = a.log_var.neg().exp() + b.log_var.neg().exp()
    middle = (a.mean / a.var + b.mean / b.var) / precision
    found = mixing(Gaussian(middle, -precision.log()), a, b)
    assert found["covers"] == pytest.approx(0.9, abs=1e-6)
    assert found["covers_other"] < 0.5
    assert (found["own_is_closest"], found["between"], found["wider"]) == (1, 1, 0)
    assert (found["chance"], found["pairs"]) == (1 / N, N)
    elsewhere = mixing(Gaussian(middle.roll(2, 0), a.log_var + 1), a, b)
    assert elsewhere["covers_other"] > elsewhere["covers"]
    assert (elsewhere["own_is_closest"], elsewhere["wider"]) == (0, 1)


def test_wider_ones_around_the_whole_include_it_and_others_do_not():
    whole = normals()
    rows = erasing(whole, [Gaussian(whole.mean, whole.log_var + step) for step in (0.5, 2.0)], (0.1, 0.5))
    assert [row["share"] for row in rows] == [0.1, 0.5]
    for row, step in zip(rows, (0.5, 2.0)):
        assert row["sigma"] == pytest.approx(float(geometric_sigma(whole).mean()) * math.exp(step / 2))
        assert (row["wider"], row["lies_in"]) == (1, 1)
        assert row["covers"] > 0.9 > row["covered"]
        assert row["covers_other"] < row["covers"]
    (row,) = erasing(whole, [Gaussian(whole.mean, whole.log_var - 1)], (0.3,))
    assert (row["wider"], row["lies_in"]) == (0, 0)


def test_nested_captions_are_those_whose_images_are():
    """Captions 0 < 2, 1 < 2, and 3 overlaps 2: the pairs are (0, 2) and (1, 2)."""
    match = torch.tensor([[1, 0, 1, 0], [1, 0, 1, 0], [0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)
    assert [rows.tolist() for rows in nested_pairs(match)] == [[0, 1], [2, 2]]
