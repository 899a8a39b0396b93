import math

import pytest
import torch
from open_clip.loss import ClipLoss as OpenClipLoss
from torch.nn import functional as F

from probemb import ClipLoss
from probemb.losses import clip_loss, infonce_loss


def batch(n=6, d=5):
    g = torch.Generator().manual_seed(0)
    return [F.normalize(torch.randn(n, d, generator=g, dtype=torch.float64), dim=1) for _ in range(2)]


def test_equals_open_clip():
    image, text = batch()
    expected = OpenClipLoss()(image, text, torch.tensor(12.5))
    torch.testing.assert_close(clip_loss(image, text, 12.5).loss, expected)


def test_module_starts_at_the_usual_temperature_and_learns_it():
    image, text = batch()
    loss = ClipLoss().double()
    assert math.isclose(loss.log_scale.exp().item(), 1 / 0.07, rel_tol=1e-6)
    loss(image, text).loss.backward()
    assert loss.log_scale.grad.abs() > 0


def test_is_float32_under_autocast():
    image, text = (t.float() for t in batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = clip_loss(image, text, 10.0).loss
    assert torch.equal(inside, clip_loss(image, text, 10.0).loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_give_the_float32_loss_of_their_values(dtype):
    image, text = (t.to(dtype) for t in batch())
    expected = clip_loss(image.float(), text.float(), 14.0).loss
    for scale in (14.0, torch.tensor([14.0])):
        assert torch.equal(clip_loss(image, text, scale).loss, expected)
    assert ClipLoss()(image, text).loss.dtype == torch.float32
    similarity = image @ text.T
    assert torch.equal(infonce_loss(similarity, 5.0).loss, infonce_loss(similarity.float(), 5.0).loss)
