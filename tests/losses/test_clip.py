"""The CLIP loss and InfoNCE with any labels: against open_clip, loops and the authors' numbers."""

import pytest
import torch
from open_clip.loss import ClipLoss as OpenClipLoss

from probemb.losses import clip_loss, infonce_loss
from probemb.losses import output as labels
from tests.losses.points import close, pairs, same_images


def test_equals_open_clip():
    image, text = (g.mean for g in pairs())
    expected = OpenClipLoss()(image, text, torch.tensor(12.5))
    torch.testing.assert_close(clip_loss(image, text, 12.5).loss, expected)


def looped(s, match, tau):
    def direction(logits, y):
        values = []
        for row, wanted in zip(logits, y):
            if wanted.sum() > 0:
                log_p = row - row.exp().sum().log()
                values.append(-sum(w / wanted.sum() * lp for w, lp in zip(wanted, log_p)))
        return sum(values) / len(values)

    return 0.5 * (direction(tau * s, match) + direction(tau * s.T, match.T))


@pytest.mark.parametrize("kind", ["multi", "mixed", "smooth", "rectangular", "unmatched"])
def test_equals_the_loop(kind):
    image, text = pairs(8)
    match = same_images(8)
    if kind == "mixed":
        lam = torch.linspace(0.2, 1, 8, dtype=torch.float64)
        match = labels.mixed(match, lam, torch.arange(7, -1, -1))
    if kind == "smooth":
        match = labels.smooth(match, 0.1)
    if kind == "rectangular":
        text, match = text[:5], match[:, :5]
    if kind == "unmatched":
        match[2] = 0
    close(infonce_loss(image.mean @ text.mean.T, 3.0, match).loss, looped(image.mean @ text.mean.T, match, 3.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tau", ["1.0", "14.2857"])
@pytest.mark.parametrize("as_labels", [False, True])
def test_authors_loss_and_gradients(parity, tau, as_labels, dtype):
    v = parity("07_vse_family")
    image, text = (torch.from_numpy(v[name]).to(dtype).requires_grad_() for name in ("v", "t"))
    multiplier = torch.tensor([float(tau)], dtype=dtype, requires_grad=True)
    out = infonce_loss(image @ text.T, multiplier, torch.eye(len(image), dtype=dtype) if as_labels else None)
    out.loss.backward()
    close(out.loss, v[f"infonce_tau{tau}__loss"], dtype)
    close(image.grad, v[f"infonce_tau{tau}__grad0"], dtype)
    close(text.grad, v[f"infonce_tau{tau}__grad1"], dtype)
    close(multiplier.grad, v[f"infonce_tau{tau}__grad_tau"], dtype)


def test_authors_rows_over_gathered_texts(parity):
    v = parity("07_vse_family")
    image, text = torch.from_numpy(v["v"]), torch.from_numpy(v["infonce_t_gathered"])
    out = infonce_loss(image @ text.T, 1.0, labels.identity(len(image), len(text), dtype=image.dtype))
    close(out.terms["i2t"], v["infonce_tau1_distributed_i2t__loss"])
