"""The triplet loss against loops over pairs, and against the numbers of VSE++, VSE infinity and PCME++'s code."""

import pytest
import torch

from probemb.losses import TripletLoss, triplet_loss
from tests.losses.points import close, pairs, same_images


def looped(s, match, margin, hardest):
    n = len(s)
    total = 0.0
    for i in range(n):
        others = [j for j in range(n) if j != i and not match[i, j] > 0]
        rows = [max(0.0, margin + float(s[i, j] - s[i, i])) for j in others]
        others = [j for j in range(n) if j != i and not match[j, i] > 0]
        columns = [max(0.0, margin + float(s[j, i] - s[i, i])) for j in others]
        total += max(rows, default=0) + max(columns, default=0) if hardest else sum(rows) + sum(columns)
    return total


@pytest.mark.parametrize("hardest", [True, False])
@pytest.mark.parametrize("multi", [True, False])
def test_equals_the_loop(hardest, multi):
    image, text = pairs()
    match = same_images() if multi else torch.eye(6)
    out = TripletLoss(0.3)(image, text, match, hardest=hardest)
    close(out.loss, looped(image.mean @ text.mean.T, match, 0.3, hardest))
    assert out.loss > 0
    if not multi:
        assert torch.equal(out.loss, TripletLoss(0.3)(image, text, hardest=hardest).loss)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("margin", ["0.2", "0.05"])
@pytest.mark.parametrize("which", ["sum", "max"])
def test_authors_loss_and_gradients(parity, which, margin, dtype):
    v = parity("07_vse_family")
    image, text = (torch.from_numpy(v[name]).to(dtype).requires_grad_() for name in ("v", "t"))
    out = triplet_loss(image @ text.T, margin=float(margin), hardest=which == "max")
    out.loss.backward()
    close(out.loss, v[f"triplet_m{margin}_{which}__loss"], dtype)
    close(image.grad, v[f"triplet_m{margin}_{which}__grad0"], dtype)
    close(text.grad, v[f"triplet_m{margin}_{which}__grad1"], dtype)
