"""Inclusion of spherical normals from u and the distance of their means, against the closed form of all dimensions."""

import torch
from torch.testing import assert_close

from probemb import Gaussian
from probemb.distances import inclusion
from probemb.search.generality import inclusion_of_spheres

N, M, D = 5, 7, 12


def spheres(n, seed):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, D, generator=generator, dtype=torch.double)
    return Gaussian(mean, torch.randn(n, 1, generator=generator, dtype=torch.double).expand(n, D))


def test_equals_the_inclusion_of_all_dimensions():
    a, b = spheres(N, 0), spheres(M, 1)
    apart = torch.cdist(a.mean, b.mean).square()
    found = inclusion_of_spheres(apart, a.uncertainty()[:, None], b.uncertainty(), D)
    assert_close(found, inclusion(a, b))
    assert torch.equal(found > 0, b.uncertainty() > a.uncertainty()[:, None])
    assert_close(inclusion_of_spheres(apart.T, b.uncertainty()[:, None], a.uncertainty(), D), -found.T)
