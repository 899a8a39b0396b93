"""Point-to-rectangle distances by clamping to the rectangle, and the loss with rectangles of no size."""

import pytest
import torch

from probemb.losses import P2RMLoss, point_to_rectangle, triplet_loss
from probemb.losses.noisy.p2rm import rectangle_triplet
from tests.losses.points import close, pairs, same_images


def test_distance_is_to_the_nearest_point_of_the_rectangle():
    image, text = pairs()
    half = torch.tensor([0.0, 0.1, 0.3, 0.5, 3.0]).double()
    low, high = text.mean - half, text.mean + half
    nearest = torch.minimum(torch.maximum(image.mean[:, None], low), high)  # (N, M, D)
    close(point_to_rectangle(image.mean, text.mean, half), (image.mean[:, None] - nearest).square().sum(-1))
    assert not point_to_rectangle(text.mean, text.mean, half).diagonal().any()


def test_rectangles_of_no_size_double_the_triplet_loss():
    image, text = pairs()
    out = P2RMLoss(5, init_half_side=1e-12).double()(image, text, same_images())
    close(out.loss, 2 * triplet_loss(image.mean @ text.mean.T, same_images()).loss)


@pytest.mark.parametrize("hardest", [True, False])
@pytest.mark.parametrize("labels", ["own", "images", "all"])
def test_triplets_of_rectangles_are_those_of_all_distances(labels, hardest):
    match = {"own": None, "images": same_images(), "all": torch.ones(6, 6)}[labels]
    found = []
    for direct in (True, False):
        image, text = (g.mean.clone().requires_grad_() for g in pairs())
        half = torch.tensor([0.0, 0.1, 0.3, 0.5, 0.2]).double().requires_grad_()
        if direct:
            loss = rectangle_triplet(image, text, half, match, 0.4, hardest)
        else:
            loss = triplet_loss(-0.5 * point_to_rectangle(image, text, half), match, 0.4, hardest).loss
        found.append([loss, *torch.autograd.grad(loss, (image, text, half))])
    for one, other in zip(*found):
        close(one, other)
    assert (found[0][0] > 0) == (labels != "all")


def test_whole_loss_and_gradients():
    image, text = pairs()
    for g in (image, text):
        g.mean.requires_grad_()
    loss = P2RMLoss(5, margin=0.3, weight=0.7, init_half_side=0.5).double()
    half = 0.5 / 5**0.5
    outside = lambda p, c: ((p[:, None] - c[None]).abs() - half).clamp(min=0).square().sum(-1)  # noqa: E731
    expected = triplet_loss(image.mean @ text.mean.T, None, 0.3).loss
    expected = expected + 0.35 * triplet_loss(-0.5 * outside(image.mean, text.mean), None, 0.3).loss
    expected = expected + 0.35 * triplet_loss(-0.5 * outside(text.mean, image.mean).T, None, 0.3).loss
    out = loss(image, text)
    torch.testing.assert_close(out.loss, expected, rtol=1e-6, atol=1e-6)  # the half-sides began in float32
    out.loss.backward()
    for leaf in (image.mean, text.mean, loss.log_half_image, loss.log_half_text):
        assert torch.isfinite(leaf.grad).all()
        assert leaf.grad.any()
