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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_give_the_float32_loss_of_their_values(dtype):
    image, text = (t.to(dtype) for t in batch())
    expected = clip_loss(image.float(), text.float(), 14.0).loss
    for scale in (14.0, torch.tensor([14.0])):
        assert torch.equal(clip_loss(image, text, scale).loss, expected)
    assert ClipLoss()(image, text).loss.dtype == torch.float32
    similarity = image @ text.T
    assert torch.equal(infonce_loss(similarity, 5.0).loss, infonce_loss(similarity.float(), 5.0).loss)
