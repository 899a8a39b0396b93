"""EM for the proportions of prompts: against plain loops, on drawn mixtures, and in extreme places."""

import math

import pytest
import torch

from probemb.gaussian import Gaussian
from zeroshot.evaluations import reweighting
from zeroshot.evaluations.reweighting import fit_labelled, fit_unlabelled


def prompts(n_classes=3, n_prompts=4, dim=5, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = spread * torch.randn(n_classes, n_prompts, dim, generator=generator, dtype=torch.float64)
    return Gaussian(mean, torch.randn(n_classes, n_prompts, dim, generator=generator, dtype=torch.float64) * 0.5 - 1)


def draw(normals, weights_CP, labels, seed=1):
    """An image of each label: a prompt by the weights of its class, then a draw from that prompt's normal."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.multinomial(weights_CP[labels], 1, generator=generator).squeeze(1)
    one = normals[labels, chosen]
    noise = torch.randn(one.mean.shape, generator=generator, dtype=torch.float64)
    return one.mean + (0.5 * one.log_var).exp() * noise


def density(z, normals, c, p):
    """The density, not its logarithm, one dimension after the other."""
    out = 1.0
    for x, m, v in zip(z.tolist(), normals.mean[c, p].tolist(), normals.log_var[c, p].exp().tolist()):
        out *= math.exp(-((x - m) ** 2) / (2 * v)) / math.sqrt(2 * math.pi * v)
    return out


@pytest.mark.parametrize("prior", [0.0, 2.0])
def test_a_step_with_labels_is_that_of_plain_loops(prior, monkeypatch):
    monkeypatch.setattr(reweighting, "STEPS", 3)
    normals, labels = prompts(), torch.tensor([0, 2, 2, 0, 2, 2, 2])
    images = draw(normals, torch.full((3, 4), 0.25), labels)
    weights = [[0.25] * 4 for _ in range(3)]
    for _ in range(3):
        counts = [[prior / 4] * 4 for _ in range(3)]
        for z, c in zip(images, labels.tolist()):
            joint = [weights[c][p] * density(z, normals, c, p) for p in range(4)]
            for p in range(4):
                counts[c][p] += joint[p] / sum(joint)
        weights = [[x / sum(row) for x in row] if sum(row) else [0.25] * 4 for row in counts]
    found = fit_labelled(images, labels, normals, prior)
    torch.testing.assert_close(found.weights, torch.tensor(weights, dtype=torch.float64))
    assert found.weights[1].tolist() == [0.25] * 4  # no images
    value = sum(
        math.log(sum(weights[c][p] * density(z, normals, c, p) for p in range(4)))
        for z, c in zip(images, labels.tolist())
    )
    if prior:
        value += sum(prior / 4 * math.log(x) for row in weights for x in row)
    assert found.objective[-1] == pytest.approx(value)


def test_a_step_without_labels_is_that_of_plain_loops(monkeypatch):
    monkeypatch.setattr(reweighting, "STEPS", 3)
    monkeypatch.setattr(reweighting, "BLOCK", 36)  # three images in a block
    normals, labels = prompts(), torch.tensor([0, 2, 2, 0, 1, 2, 2])
    images = draw(normals, torch.full((3, 4), 0.25), labels)
    shares, weights = [1 / 3] * 3, [[0.25] * 4 for _ in range(3)]
    for _ in range(3):
        counts, classes = [[0.5] * 4 for _ in range(3)], [1.0] * 3
        for z in images:
            joint = [[shares[c] * weights[c][p] * density(z, normals, c, p) for p in range(4)] for c in range(3)]
            total = sum(map(sum, joint))
            for c in range(3):
                classes[c] += sum(joint[c]) / total
                for p in range(4):
                    counts[c][p] += joint[c][p] / total
        weights = [[x / sum(row) for x in row] for row in counts]
        shares = [x / sum(classes) for x in classes]
    found = fit_unlabelled(images, normals, prior_images=2.0)
    torch.testing.assert_close(found.weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_densities_far_below_the_smallest_number_are_no_hindrance():
    dim = 512
    mean = torch.randn(2, 3, dim, generator=torch.Generator().manual_seed(0))
    normals = Gaussian(mean, torch.full_like(mean, -7.0))
    images = normals.mean[:, 1] + 0.5  # hundreds of thousands of nats from any prompt
    for found in (fit_labelled(images, torch.arange(2), normals), fit_unlabelled(images, normals)):
        assert torch.isfinite(found.weights).all()
        assert math.isfinite(found.objective[-1])
        assert found.weights.argmax(1).tolist() == [1, 1]
