"""Every loss on W ranks equals one process on the whole batch, in value and gradient: of a gathered batch, or of a
rank's own items against all others.
"""

import numpy as np
import pytest
import torch
from torch import nn

from probemb import Gaussian, distributed
from probemb.compose import COMPOSERS
from probemb.distances import DISTANCES
from probemb.losses import clip_loss, infonce_loss, noisy, pairwise_match_loss, triplet
from probemb.losses.mpc import mpc_loss, sampled_cosine_loss, scaled_cosine_loss
from probemb.losses.output import cosine_similarity, same_image
from probemb.losses.pcme import pcme_loss
from tests.devices import elsewhere
from tests.ranks import run_ranks

PER_RANK, PARTS, DIM = 3, 3, 4


def rand(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5), device="cpu").double()


def noise():
    return torch.Generator().manual_seed(6)


def halves(g):
    """Two embeddings of an item."""
    return Gaussian(*(x.unflatten(1, (2, -1)) for x in (g.mean, g.log_var)))


def pvse(image, text, match):
    parts = halves(image), halves(text)
    return triplet.pvse_loss(*parts, match, [g.log_var for g in parts], margin=0.5, mmd_weight=0.7)


def of_cosines(loss, *args, **options):
    return lambda image, text, match: loss(cosine_similarity(image, text), *args, match_NN=match, **options)


HALF = torch.full((DIM,), 0.05, dtype=torch.float64)
LOSSES = {  # (image, text, match) -> loss; some take soft labels, or more for a batch of n
    "triplet": of_cosines(triplet.triplet_loss, margin=0.5),
    "triplet-sum": of_cosines(triplet.triplet_loss, margin=0.5, hardest=False),
    "order": lambda i, t, m: triplet.triplet_loss(triplet.order_similarity(i.mean, t.mean), m, 0.5),
    "pvse": pvse,
    "infonce": lambda i, t, m: infonce_loss(cosine_similarity(i, t), 3.0, m),
    "pcme": lambda i, t, m: pcme_loss(
        i, t, m, scale=2.0, shift=2.0, samples=3, vib=1e-4, uniformity_weight=0.3, generator=noise()
    ),
    "daa": lambda i, t, m: noisy.daa_loss(cosine_similarity(i, t), rand(len(i), len(i)), m, temperature=0.1),
    "p2rm": lambda i, t, m: noisy.p2rm_loss(i, t, m, HALF, HALF),
    "ncr": lambda i, t, m: noisy.ncr_loss(cosine_similarity(i, t), rand(len(i)), m, margin=0.5),
    "prob-triplet": lambda i, t, m: triplet.prob_triplet_loss(i, t, m, "min-kl", 2.0),
    "prob-triplet-semi": lambda i, t, m: triplet.prob_triplet_loss(i, t, m, "wasserstein2", 2.0, "semi-hard"),
    "decl": lambda i, t, m: noisy.decl_loss(cosine_similarity(i, t), m, rand(len(i)) > 0.3, negatives=5, tau=0.5),
}


class Towers(nn.Module):
    """Two linear towers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 2 * DIM), nn.Linear(5, 2 * DIM)
        self.double()

    def forward(self, x_image, x_text):
        split = [tower(x).chunk(2, 1) for tower, x in ((self.image, x_image), (self.text, x_text))]
        return [Gaussian(nn.functional.normalize(mean, dim=1), log_var) for mean, log_var in split]


def averaged(value, parameters, world):
    """A loss and its gradients, averaged over the ranks as data-parallel training does."""
    grads = torch.autograd.grad(value, parameters)
    flat = torch.cat([value.detach().reshape(1), *(x.flatten() for x in grads)])
    if world > 1:
        torch.distributed.all_reduce(flat)
    return (flat / world).numpy()


def run(rank, world, total):
    g = torch.Generator().manual_seed(1)
    x_image, x_text = torch.randn(total, 6, generator=g).double(), torch.randn(total, 5, generator=g).double()
    match = same_image(torch.arange(total) // 2, torch.arange(total) // 2)
    each, model, out = total // world, Towers(), {}
    mine, scalars = slice(rank * each, (rank + 1) * each), torch.tensor([2.0, 1.5, 3.0]).double().requires_grad_()
    for name, loss in LOSSES.items():
        image, text = distributed.gather_pairs(*model(x_image[mine], x_text[mine]))
        out[name] = averaged(elsewhere(loss)(image, text, match).loss, list(model.parameters()), world)
    for name, pseudo in [("clip", 0.0), *((name, pseudo) for name in DISTANCES for pseudo in (0.0, 0.2))]:
        image, text = model(x_image[mine], x_text[mine])
        images, texts = distributed.gather_pairs(image, text)
        logit_scale, scale, shift = scalars
        if name == "clip":
            value = elsewhere(clip_loss)(image.mean, text.mean, logit_scale, images.mean, texts.mean, rank * each)
        else:
            options = dict(scale=scale, shift=shift, distance=name, pseudo_positive=pseudo, vib=0.01)
            options |= dict(all_image=images, all_text=texts, offset=rank * each)
            value = elsewhere(pairwise_match_loss)(image, text, **options)
        out[f"own, {name}, {pseudo}"] = averaged(value.loss, [*model.parameters(), scalars], world)
    return out


SCALE = torch.tensor([4.0]).double()
COMPOSED = {  # composer and (parts, composition, target, positives) -> loss
    "mpc": ("product", lambda *x: mpc_loss(*x, noise(), reverse=0.3)),
    "mpc-expected": ("product", lambda *x: mpc_loss(*x, form="expected", reverse=0.3)),
    "mpc-code": ("product", lambda *x: mpc_loss(*x, noise(), form="code", reverse=0.5)),
    "pcme-addition": ("addition", lambda p, q, t, y: sampled_cosine_loss(p, q.gaussian, t, y, noise())),
    "mpc-mlp": ("mlp", lambda *x: mpc_loss(*x, noise())),
    **{
        name: (name, lambda p, q, t, y: scaled_cosine_loss(q.gaussian.mean, t.mean, SCALE, y))
        for name in ("relationship", "film", "mrn", "tirg")
    },
}


def run_composed(rank, world, total):
    g = torch.Generator().manual_seed(1)
    x_parts = torch.randn(total, PARTS, 6, generator=g).double()
    x_target = torch.randn(total, 6, generator=g).double()
    positives = torch.rand(total, total, generator=g) < 0.2
    each, out = total // world, {}
    mine = slice(rank * each, (rank + 1) * each)
    for name, (composer, loss) in COMPOSED.items():
        torch.manual_seed(2)
        tower, composer = nn.Linear(6, 2 * DIM).double(), COMPOSERS[composer](DIM).double()
        embedded = [Gaussian(*tower(x[mine]).chunk(2, -1)) for x in (x_parts, x_target)]
        parts, target = distributed.gather_pairs(*embedded)
        value = elsewhere(loss)(parts, elsewhere(composer)(parts), target, positives).loss
        out[name] = averaged(value, [*tower.parameters(), *composer.parameters()], world)
    return out


@pytest.mark.parametrize(
    ("run", "world"), [(run, 2), (run, 3), (run, 5), pytest.param(run, 8, marks=pytest.mark.slow), (run_composed, 2)]
)
def test_ranks_equal_one_process(run, world):
    expected = run(0, 1, world * PER_RANK)
    for result in run_ranks(world, run, world * PER_RANK):
        for name, value in expected.items():
            np.testing.assert_allclose(result[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
            assert np.abs(value[1:]).max() > 0
