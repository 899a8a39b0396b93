"""Several models as one: every similarity is the mean of theirs."""

import torch

from probemb.distances import csd, wasserstein2
from probemb.models import Ensemble, create_model, create_tokenizer

TEXTS = ["a cat", "two large red circles left of a blue square", "x"]


def models(n: int = 3) -> list:
    torch.manual_seed(0)
    return [create_model("ViT-Micro-32", embed_dim=8 * (k + 1), init_scale=k, init_shift=2 * k) for k in range(n)]


def test_similarities_and_uncertainties_are_means():
    networks = models()
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    together = Ensemble(networks)
    tokens = create_tokenizer(networks[0])(TEXTS)
    with torch.no_grad():
        image, text = together.encode_image(pixels), together.encode_text(together.cut_padding(tokens))
        parts = [(model.encode_image(pixels), model.encode_text(tokens)) for model in networks]
    assert image.shape == (4, 8 + 16 + 24)
    expected = {
        "cosine": (image.mean @ text.mean.T, [i.mean @ t.mean.T for i, t in parts]),
        "csd": (csd(image, text), [csd(i, t) for i, t in parts]),
        "wasserstein2": (wasserstein2(image, text), [wasserstein2(i, t) for i, t in parts]),
        "u of images": (image.uncertainty(), [i.uncertainty() for i, _ in parts]),
        "u of texts": (text.uncertainty(), [t.uncertainty() for _, t in parts]),
    }
    for name, (ours, theirs) in expected.items():
        torch.testing.assert_close(ours, torch.stack(theirs).mean(0), rtol=1e-5, atol=1e-5, msg=name)
    torch.testing.assert_close(image.mean.norm(dim=1), torch.ones(4))
    assert together.match_numbers() == (1, 2)
    assert together.probabilistic
