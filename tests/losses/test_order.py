"""Order embeddings: the penalty against loops over pairs and dimensions, and against the numbers of VSE++'s code."""

import math

import pytest
import torch

import probemb.losses.triplet
from probemb import Gaussian
from probemb.losses import OrderLoss, order_similarity
from tests.losses.points import close, pairs


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("squared", [True, False])
def test_is_what_a_caption_exceeds_its_image_by(absolute, squared):
    image, text = (g.mean for g in pairs(5))
    text = text[:4]
    found = order_similarity(image, text, absolute, squared)
    for i in range(5):
        for j in range(4):
            v, t = (x.abs() if absolute else x for x in (image[i], text[j]))
            penalty = sum(max(0.0, float(b - a)) ** 2 for a, b in zip(v, t))
            close(found[i, j], -(penalty if squared else math.sqrt(penalty)))


def test_blocks_of_rows_give_the_same_numbers(monkeypatch):
    """Nothing of size N x M x D is held, also in the backward pass."""
    image, text = (torch.rand(n, 9, dtype=torch.float64, requires_grad=True) for n in (7, 5))

    def step():
        found = order_similarity(image, text)
        return found, *torch.autograd.grad(found.square().sum(), (image, text))

    excess, held = probemb.losses.triplet._excess, []
    monkeypatch.setattr("probemb.losses.triplet._excess", lambda x, y: held.append(len(x)) or excess(x, y))
    whole = step()
    assert held == [7, 7]
    monkeypatch.setitem(probemb.losses.triplet.ORDER_ELEMENTS, "cpu", 2 * 5 * 9)
    for a, b in zip(step(), whole):
        close(a, b)
    assert held[2:] == [2, 2, 2, 1] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("margin", ["0.2", "0.05"])
@pytest.mark.parametrize("which", ["sum", "max"])
def test_authors_loss_and_gradients(parity, which, margin, dtype):
    """Their penalty is the norm, not its square."""
    v = parity("07_vse_family")
    image, text = (torch.from_numpy(v[name]).to(dtype).requires_grad_() for name in ("v", "t"))
    close(order_similarity(image, text, squared=False), v["order_sim"], dtype)
    zero = torch.zeros_like(image)
    loss = OrderLoss(float(margin), which == "max", squared=False)(Gaussian(image, zero), Gaussian(text, zero)).loss
    loss.backward()
    close(loss, v[f"order_m{margin}_{which}__loss"], dtype)
    close(image.grad, v[f"order_m{margin}_{which}__grad0"], dtype)
    close(text.grad, v[f"order_m{margin}_{which}__grad1"], dtype)
