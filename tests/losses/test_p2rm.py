"""Point-to-rectangle distances by clamping to the rectangle, and the loss with rectangles of no size."""

import pytest
import torch

from probemb.losses import point_to_rectangle, triplet_loss
from probemb.losses.noisy import rectangle_triplet
from tests.losses.points import close, pairs, same_images


def test_distance_is_to_the_nearest_point_of_the_rectangle():
    image, text = pairs()
    half = torch.tensor([0.0, 0.1, 0.3, 0.5, 3.0]).double()
    low, high = text.mean - half, text.mean + half
    nearest = torch.minimum(torch.maximum(image.mean[:, None], low), high)  # (N, M, D)
    close(point_to_rectangle(image.mean, text.mean, half), (image.mean[:, None] - nearest).square().sum(-1))
    assert not point_to_rectangle(text.mean, text.mean, half).diagonal().any()


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
