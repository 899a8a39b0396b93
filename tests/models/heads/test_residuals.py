"""What PIE-Net's attention adds to each embedding: against the authors' numbers, and as a tower gives it."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from probemb.models import create_model
from tests.models.heads.test_pie import features_of, head_of, state_of


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


@pytest.mark.parametrize("n_embeddings", [1, 2])
def test_towers_give_the_residuals_of_their_embeddings(n_embeddings):
    torch.manual_seed(0)
    model = create_model("ViT-Micro-32", head="pie", embed_dim=24, n_embeddings=n_embeddings, probabilistic=False)
    tower, inputs = model.text, torch.tensor([[49406, 320, 49407, 0], [49406, 49407, 0, 0]])
    found = tower.encode(inputs, want_tokens="residuals")
    assert found.tokens.shape == (2, n_embeddings, 24)
    assert found.mask.shape == (2, n_embeddings)
    assert found.mask.all()
    head, features = tower.mean_head, tower.features(inputs)[0]
    assert torch.equal(found.gaussian.mean, tower.encode(inputs).gaussian.mean)
    mean = F.normalize(head.norm(head.project(features.pooled)[:, None] + found.tokens), dim=2)
    assert_close(mean.squeeze(1) if n_embeddings == 1 else mean, found.gaussian.mean)
    image = model.visual.encode(torch.randn(2, 3, 32, 32), want_tokens="residuals", want_features=True)
    assert image.tokens.shape == (2, n_embeddings, 24)
    assert image.features.shape[0] == 2


@pytest.mark.parametrize("head", ["clip", "gpo"])
def test_other_heads_have_none(head):
    model = create_model("ViT-Micro-32", head=head, probabilistic=False)
    with pytest.raises(ValueError, match="no residuals"):
        model.visual.encode(torch.randn(1, 3, 32, 32), want_tokens="residuals")
