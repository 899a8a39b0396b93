"""Small batches that the tests of the losses share."""

import torch
from torch.nn import functional as F

from probemb import Gaussian


def pairs(n=6, d=5, dtype=torch.float64, seed=0):
    """N image-caption pairs with unit means that agree somewhat."""
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, d, generator=g, dtype=dtype)
    other = mean + 0.8 * torch.randn(n, d, generator=g, dtype=dtype)
    log_var = [torch.randn(n, d, generator=g, dtype=dtype) - 2 for _ in range(2)]
    return Gaussian(F.normalize(mean, dim=1), log_var[0]), Gaussian(F.normalize(other, dim=1), log_var[1])


def unit_gaussians(n, d=8, seed=0):
    """N unit means with variances around e^-3."""
    g = torch.Generator().manual_seed(seed)
    return Gaussian(F.normalize(torch.randn(n, d, generator=g), dim=1), torch.randn(n, d, generator=g) - 3)


def same_images(n=6, dtype=torch.float64):
    """Labels where pairs 0 and 1 are of one image, and so are 3 and 4."""
    ids = torch.arange(n)
    ids[1], ids[4] = 0, 3
    return (ids[:, None] == ids[None, :]).to(dtype)


def close(actual, expected, dtype=torch.float64):
    """At most 1e-9 apart in float64 and 1e-5 in float32, absolutely or relatively."""
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(
        actual.detach().double().reshape(expected.shape), expected, rtol=tolerance, atol=tolerance
    )
