"""What PIE-Net's attention adds to each embedding: against the authors' numbers, and as a tower gives it."""

import pytest
import torch
from torch.testing import assert_close

from probemb.models import create_model
from tests.models.test_pie import features_of, head_of, state_of


@pytest.mark.parametrize("case", ["pie1", "pie1_masked", "pie3"])
def test_authors_residuals(parity, case):
    arrays = parity("04c_pcme_heads")
    state = state_of(arrays, case)
    head = head_of(state, len(state["attention.scores.weight"]), project=False)
    masked = not arrays[f"{case}__attn"][arrays["heads_pad_mask"]].any()
    features = features_of(arrays, masked, "heads_out")
    out, residual = head.with_residuals(features)
    assert_close(residual.reshape(arrays[f"{case}__residual"].shape), torch.as_tensor(arrays[f"{case}__residual"]))
    assert torch.equal(out, head(features))


@pytest.mark.parametrize("head", ["clip", "gpo"])
def test_other_heads_have_none(head):
    model = create_model("ViT-Micro-32", head=head, probabilistic=False)
    with pytest.raises(ValueError, match="no residuals"):
        model.visual.encode(torch.randn(1, 3, 32, 32), want_tokens="residuals")
