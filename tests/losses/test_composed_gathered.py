"""Every loss of gathered queries on W ranks equals one process on the whole batch, in value and gradient."""

import numpy as np
import pytest
import torch
from torch import nn

from probemb import Gaussian, distributed
from probemb.losses import MPCLoss, SampledCosineLoss, ScaledCosineLoss
from probemb.models.composers import create_composer
from tests.ranks import run_ranks

PER_RANK, PARTS, DIM = 3, 3, 4


def cases():
    """Name, composer and loss."""
    return {
        "mpc": ("product", MPCLoss(reverse=0.3)),
        "mpc-expected": ("product", MPCLoss("expected", reverse=0.3)),
        "mpc-code": ("product", MPCLoss("code", reverse=0.5)),
        "pcme-addition": ("addition", SampledCosineLoss()),
        "mpc-mlp": ("mlp", MPCLoss()),
        "relationship": ("relationship", ScaledCosineLoss()),
        "film": ("film", ScaledCosineLoss()),
        "mrn": ("mrn", ScaledCosineLoss()),
        "tirg": ("tirg", ScaledCosineLoss()),
    }


def run(rank, world, total):
    """Values and gradients, averaged over the ranks as data-parallel training does."""
    g = torch.Generator().manual_seed(1)
    x_parts = torch.randn(total, PARTS, 6, generator=g).double()
    x_target = torch.randn(total, 6, generator=g).double()
    positives = torch.rand(total, total, generator=g) < 0.2
    each, out = total // world, {}
    mine = slice(rank * each, (rank + 1) * each)
    for name, (composer, loss) in cases().items():
        torch.manual_seed(2)
        tower, composer, loss = nn.Linear(6, 2 * DIM).double(), create_composer(composer, DIM).double(), loss.double()
        embedded = [Gaussian(*tower(x[mine]).chunk(2, -1)) for x in (x_parts, x_target)]
        parts, target = distributed.gather_pairs(*embedded)
        query, noise = composer(parts), torch.Generator().manual_seed(6)
        if isinstance(loss, ScaledCosineLoss):
            value = loss(query.gaussian.mean, target.mean, positives).loss
        elif isinstance(loss, SampledCosineLoss):
            value = loss(parts, query.gaussian, target, positives, noise).loss
        else:
            value = loss(parts, query, target, positives, noise).loss
        parameters = [*tower.parameters(), *composer.parameters(), *loss.parameters()]
        grads = torch.autograd.grad(value, parameters)
        flat = torch.cat([value.detach().reshape(1), *(x.flatten() for x in grads)])
        if world > 1:
            torch.distributed.all_reduce(flat)
        out[name] = (flat / world).numpy()
    return out


@pytest.mark.parametrize("world", [2])
def test_ranks_equal_one_process(world):
    expected = run(0, 1, world * PER_RANK)
    for result in run_ranks(world, run, world * PER_RANK):
        for name, value in expected.items():
            np.testing.assert_allclose(result[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
            assert np.abs(value[1:]).max() > 0
