"""Every loss of a gathered batch on W ranks equals one process on the whole batch, in value and gradient."""

import numpy as np
import pytest
import torch
from torch import nn

from probemb import Gaussian, distributed, labels
from probemb.losses import (
    DAALoss,
    DECLLoss,
    InfoNCELoss,
    MPCLoss,
    NCRLoss,
    OrderLoss,
    P2RMLoss,
    PCMELoss,
    PVSELoss,
    SampledCosineLoss,
    ScaledCosineLoss,
    TripletLoss,
    prob_triplet_loss,
)
from probemb.models.composers import create_composer
from tests.ranks import run_ranks

PER_RANK, PARTS, DIM = 3, 3, 4


def losses():
    """Name, module, whether it takes soft labels, and what else it takes for a batch of n."""
    rand = lambda *shape: torch.rand(*shape, generator=torch.Generator().manual_seed(5)).double()  # noqa: E731
    noise = lambda n: {"generator": torch.Generator().manual_seed(6)}  # noqa: E731
    return {
        "triplet": (TripletLoss(0.5), lambda n: {}),
        "triplet-sum": (TripletLoss(0.5), lambda n: {"hardest": False}),
        "order": (OrderLoss(0.5), lambda n: {}),
        "pvse": (Several(PVSELoss(0.5, mmd=0.7)), lambda n: {}),
        "infonce": (InfoNCELoss(3.0), lambda n: {}),
        "pcme": (PCMELoss(2.0, 2.0, n_samples=3, uniformity=0.3), noise),
        "daa": (DAALoss(temperature=0.1), lambda n: {"semantic": rand(n, n)}),
        "p2rm": (P2RMLoss(DIM), lambda n: {}),
        "ncr": (NCRLoss(0.5), lambda n: {"label": rand(n)}),
        "prob-triplet": (ProbTriplet("min-kl", "hardest"), lambda n: {}),
        "prob-triplet-semi": (ProbTriplet("wasserstein2", "semi-hard"), lambda n: {}),
        "decl": (DECLLoss(tau=0.5), lambda n: {"clean": rand(n) > 0.3, "step": 10}),
    }


class Several(nn.Module):
    """A loss of two embeddings an item, which are the halves of the towers' one, and of as many residuals."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, image, text, match):
        parts = [(Gaussian(*(x.unflatten(1, (2, -1)) for x in (g.mean, g.log_var)))) for g in (image, text)]
        return self.loss(*parts, match, [g.log_var for g in parts])


class ProbTriplet(nn.Module):
    """One similarity of densities, and one choice of negatives."""

    def __init__(self, kind, negatives):
        super().__init__()
        self.kind, self.negatives = kind, negatives

    def forward(self, image, text, match):
        return prob_triplet_loss(image, text, match, self.kind, 2.0, self.negatives)


class Towers(nn.Module):
    """Two linear towers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 2 * DIM), nn.Linear(5, 2 * DIM)
        self.double()

    def forward(self, x_image, x_text):
        halves = [tower(x).chunk(2, 1) for tower, x in ((self.image, x_image), (self.text, x_text))]
        return [Gaussian(nn.functional.normalize(mean, dim=1), log_var) for mean, log_var in halves]


def run(rank, world, total):
    """Values and gradients of all losses, averaged over the ranks as data-parallel training does."""
    g = torch.Generator().manual_seed(1)
    x_image, x_text = torch.randn(total, 6, generator=g).double(), torch.randn(total, 5, generator=g).double()
    match = labels.same_image(torch.arange(total) // 2, torch.arange(total) // 2)
    each = total // world
    mine, model, out = slice(rank * each, (rank + 1) * each), Towers(), {}
    for name, (loss, options) in losses().items():
        image, text = distributed.gather_pairs(*model(x_image[mine], x_text[mine]))
        value = loss.double()(image, text, match, **options(total)).loss
        parameters = [*model.parameters(), *loss.parameters()]
        grads = torch.autograd.grad(value, parameters, allow_unused=True)
        grads = [torch.zeros_like(p) if x is None else x for p, x in zip(parameters, grads)]
        flat = torch.cat([value.detach().reshape(1), *(x.flatten() for x in grads)])
        if world > 1:
            torch.distributed.all_reduce(flat)
        out[name] = (flat / world).numpy()
    return out


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


def run_composed(rank, world, total):
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


@pytest.mark.parametrize(("run", "world"), [(run, 2), (run, 3), (run, 5), (run_composed, 2)])
def test_ranks_equal_one_process(run, world):
    expected = run(0, 1, world * PER_RANK)
    for result in run_ranks(world, run, world * PER_RANK):
        for name, value in expected.items():
            np.testing.assert_allclose(result[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
            assert np.abs(value[1:]).max() > 0
