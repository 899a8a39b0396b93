"""a and b of the match probability, the ceiling of the inverse temperature, and ensembles."""

import math

import pytest
import torch
from torch.nn import functional as F

from probemb import Gaussian, create_model, load_model
from probemb.distances import csd, match_probability_of_samples, wasserstein2
from probemb.models import Ensemble, as_one, create_tokenizer, save_model
from probemb.models.dual_encoder import ceiling

NAME = "ViT-Micro-32"
COSINE = {"match": "cosine", "init_logit_scale": 10.0, "init_logit_bias": -10.0}


def items(n: int, seed: int) -> Gaussian:
    g = torch.Generator().manual_seed(seed)
    return Gaussian(F.normalize(torch.randn(n, 8, generator=g), dim=1), torch.randn(n, 8, generator=g) - 3)


@pytest.mark.parametrize("match", ["cosine", "distance"])
def test_the_match_probability_is_the_trained_one(match):
    model = create_model(NAME, init_scale=3, init_shift=2, **({} if match == "distance" else COSINE))
    image, text = items(5, 0), items(4, 1)
    a, b = model.match_scalars()
    logits = b - a * csd(image, text)
    u = image.uncertainty()[:, None] + text.uncertainty()
    cosine = image.mean @ text.mean.T
    truth = 10 * (cosine - u / 2) - 10 if match == "cosine" else 2 - 3 * (2 - 2 * cosine + u)
    torch.testing.assert_close(logits, truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.match_probability(image, text), truth.sigmoid().detach())
    logits.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == ({"logit_scale", "logit_bias"} if match == "cosine" else {"scale", "shift"})
    assert model.match_model.matches
    assert as_one([model, model]).match_model.numbers == pytest.approx(model.match_model.numbers)


def test_a_model_that_was_trained_on_samples_uses_their_form_everywhere(tmp_path):
    save_model(create_model(NAME, match="samples", init_scale=2, init_shift=3), tmp_path)
    model = load_model(tmp_path).model
    image, text = (Gaussian(g.mean, g.log_var - 4) for g in (items(5, 0), items(7, 1)))
    noise = torch.Generator().manual_seed(1)
    truth = match_probability_of_samples(image.sample(300, noise), text.sample(300, noise), 2, 3)
    torch.testing.assert_close(model.match_probability(image, text), truth, rtol=0, atol=0.08)
    u = image.uncertainty()[:, None] + text.uncertainty()
    spheres = (Gaussian(g.mean, (g.uncertainty() / 8).log()[:, None].expand(g.shape)) for g in (image, text))
    truth = match_probability_of_samples(*(g.sample(300, noise) for g in spheres), 2, 3)
    log_odds = model.match_model.log_odds_at(csd(image, text), u, 8)
    torch.testing.assert_close(log_odds.sigmoid(), truth, rtol=0, atol=0.02)
    # a and b are of another unit, so a model of CSD does not start from them
    fresh = create_model(NAME, pretrained=str(tmp_path), init_scale=None, init_shift=None)
    assert fresh.match_model.numbers == (5, 5)


def test_in_a_gallery_exactly_one_item_matches():
    model, image, text = create_model(NAME, init_scale=3, init_shift=2), items(5, 0), items(7, 1)
    p = model.match_probability(image, text)
    alone = p / (1 - p) * (1 - p).prod(1, keepdim=True)  # this text matches and no other does
    torch.testing.assert_close(model.match_probability(image, text, among="texts"), alone / alone.sum(1, keepdim=True))
    torch.testing.assert_close(model.match_probability(image, text, among="images").sum(0), torch.ones(7))


def test_at_the_ceiling_a_gradient_can_only_lower():
    x = torch.tensor([5.0, 20.0, 20.0], requires_grad=True)
    y = ceiling(x, 10.0)
    assert y.tolist() == [5, 10, 10]
    (y * torch.tensor([-1.0, -1.0, 1.0])).sum().backward()
    assert x.grad.tolist() == [-1, 0, 1]


def test_a_saved_model_and_one_that_starts_from_it(tmp_path):
    model = create_model(NAME, objective="prolip", **COSINE)
    with torch.no_grad():
        model.logit_scale.fill_(math.log(20))
        model.logit_bias.fill_(-8)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path).model
    assert (loaded.objective, loaded.match_model.numbers) == ("prolip", pytest.approx((10, 12)))
    kept = create_model(NAME, pretrained=str(tmp_path), match="cosine")
    assert kept.match_model.numbers == pytest.approx((10, 12))
    fresh = create_model(NAME, pretrained=str(tmp_path), **COSINE)
    assert fresh.match_model.numbers == pytest.approx((5, 0), abs=1e-5)
    other = create_model(NAME, pretrained=str(tmp_path), init_scale=None, init_shift=None)
    assert (other.scale.item(), other.shift.item()) == pytest.approx((10, 12))
    save_model(other, tmp_path / "other")
    back = create_model(NAME, pretrained=str(tmp_path / "other"), match="cosine")
    assert back.logit_bias.item() == -10
    assert back.logit_scale.item() == pytest.approx(math.log(20))


def test_similarities_and_uncertainties_are_means():
    torch.manual_seed(0)
    networks = [create_model(NAME, embed_dim=8 * (k + 1), init_scale=k, init_shift=2 * k) for k in range(3)]
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    together = Ensemble(networks)
    tokens = create_tokenizer(networks[0])(["a cat", "two large red circles left of a blue square", "x"])
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
    assert together.match_model.numbers == (1, 2)
    assert together.probabilistic
