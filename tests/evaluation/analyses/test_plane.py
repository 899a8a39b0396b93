"""Ellipses in a plane: principal components, and the share of samples that they hold."""

import pytest
import torch

from probemb import Gaussian
from probemb.evaluation.analyses.plane import ellipses, plane_of


def normals(n=40, d=7, seed=0) -> Gaussian:
    r = torch.Generator().manual_seed(seed)
    spread = torch.linspace(3, 0.1, d)
    return Gaussian(torch.randn(n, d, generator=r) * spread, torch.randn(n, d, generator=r) - 1)


def test_the_plane_has_the_largest_variance():
    points = normals().mean.double()
    plane = plane_of(points)
    values, vectors = torch.linalg.eigh(torch.cov(points.T))
    assert plane.share == pytest.approx(float(values[-2:].sum() / values.sum()))
    assert (plane.axes * vectors[:, [-1, -2]]).sum(0).abs().tolist() == pytest.approx([1, 1])
    torch.testing.assert_close(plane.axes.T @ plane.axes, torch.eye(2).double())
    assert (plane_of(-points).axes - plane.axes).abs().max() < 1e-9  # signs are fixed


def test_they_hold_their_share_of_the_samples():
    g = normals()
    plane = plane_of(g.mean)
    found = ellipses(g, plane, 0.9)
    for row in range(3):
        samples = g[[row]].sample(100_000, torch.Generator().manual_seed(row))[0].double()
        inside = found[[row]].holds((samples - plane.origin) @ plane.axes)
        assert float(inside.double().mean()) == pytest.approx(0.9, abs=6e-3)
