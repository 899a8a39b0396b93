"""Shapes of covariances and bounds of variances, in every head and tower, saved and loaded."""

import math

import pytest
import torch

from probemb import UserError
from probemb.models import create_model, create_tokenizer, load_model, save_model
from probemb.models.heads import HEADS
from probemb.models.heads.covariance import COVARIANCES, Covariance, make_covariance

BOUNDS = (math.log(0.1), math.log(10))
WORDS = ["a", "cat", "dog", "two"]
TEXTS = ["a cat", "two dog", "dog cat a"]


def make(name="ViT-Micro-32", head="clip", **options):
    torch.manual_seed(0)
    if name != "ViT-Micro-32":
        options["vocabulary"] = WORDS
    return create_model(name, head=head, embed_dim=16, **options)


def inputs(model):
    torch.manual_seed(1)
    return torch.randn(3, 3, model.image_size, model.image_size), create_tokenizer(model)(TEXTS)


def embedded(model):
    images, tokens = inputs(model)
    return model.encode_image(images), model.encode_text(tokens)


def test_the_shapes_against_their_definition():
    predicted = torch.randn(5, 6, dtype=torch.float64) * 3
    shape = predicted.shape
    assert torch.equal(Covariance()(predicted, shape), predicted)
    bounded = Covariance("ellipsoidal", BOUNDS)(predicted, shape)
    torch.testing.assert_close(bounded.exp(), predicted.exp().clamp(0.1, 10))
    mean = Covariance("spherical-mean", BOUNDS)(predicted, shape)
    torch.testing.assert_close(mean.exp(), predicted.exp().clamp(0.1, 10).mean(1, keepdim=True).expand(shape))
    one = Covariance("spherical", BOUNDS)(predicted[:, :1], shape)
    assert torch.equal(one, predicted[:, :1].clamp(*BOUNDS).expand(shape))
    several = Covariance("spherical-mean")(predicted.view(5, 2, 3), torch.Size((5, 2, 3)))
    torch.testing.assert_close(several.exp()[..., 0], predicted.view(5, 2, 3).exp().mean(2))


def test_a_variance_beyond_its_bounds_has_no_gradient():
    predicted = torch.tensor([[-9.0, 0.0, 9.0]], requires_grad=True)
    Covariance("ellipsoidal", BOUNDS)(predicted, predicted.shape).sum().backward()
    assert predicted.grad.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("name", ["ViT-Micro-32", "resnet-gru-small", "scenes-cnn-gru"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", COVARIANCES)
def test_every_head_and_tower(name, head, kind):
    model = make(name, head, covariance=kind, log_var_range=BOUNDS)
    start = 0.0  # the middle of the bounds, which leave -log 16 out
    for gaussian in embedded(model):
        assert gaussian.log_var.shape == (3, 16)
        assert gaussian.log_var.is_contiguous()
        assert (gaussian.log_var - start).abs().max() < 1.5
        assert (gaussian.log_var != gaussian.log_var[:, :1]).any() == (kind == "ellipsoidal")
        assert gaussian.log_var[0, 0] != gaussian.log_var[1, 0]
    sum(g.log_var.square().sum() for g in embedded(model)).backward()
    for tower in (model.visual, model.text):
        assert all(p.grad is not None for p in tower.log_var_head.parameters())
        assert any(p.grad.abs().sum() > 0 for p in tower.log_var_head.parameters())


def test_without_bounds_a_model_is_the_one_it_was():
    assert make().config["covariance"] == "ellipsoidal"
    image, text = embedded(make())
    for gaussian in (image, text):
        assert (gaussian.log_var + math.log(16)).abs().max() < 1
    wide = embedded(make(log_var_range=(-5.0, 5.0)))[0]
    torch.testing.assert_close(wide.log_var, image.log_var)  # -log D lies within, so nothing moves


@pytest.mark.parametrize("kind", COVARIANCES)
def test_saved_and_loaded(tmp_path, kind):
    model = make(covariance=kind, log_var_range=BOUNDS).eval().requires_grad_(False)
    for p in model.visual.log_var_head.parameters():
        p.mul_(40)  # beyond the bounds
    save_model(model, tmp_path)
    loaded = load_model(tmp_path).model
    assert loaded.config == model.config
    for ours, theirs in zip(embedded(model), embedded(loaded)):
        assert torch.equal(ours.log_var, theirs.log_var)
    assert (embedded(loaded)[0].log_var == BOUNDS[1]).any() or kind != "ellipsoidal"


@pytest.mark.parametrize("kind", COVARIANCES)
def test_a_model_starts_from_one_of_another_covariance(tmp_path, kind):
    save_model(make(covariance="ellipsoidal"), tmp_path)
    model = make(covariance=kind, log_var_range=BOUNDS, pretrained=str(tmp_path))
    source = load_model(tmp_path).model
    assert torch.equal(model.text.text_projection, source.text.text_projection)
    same = model.visual.log_var_head.weight.shape == source.visual.log_var_head.weight.shape
    assert same == (kind != "spherical")
    if same:
        assert torch.equal(model.visual.log_var_head.weight, source.visual.log_var_head.weight)


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (2.0, -2.0), (0.0,), (float("nan"), 1.0), (0.0, float("inf"))])
def test_bounds_that_are_none(bounds):
    with pytest.raises(UserError, match="log_var_range is"):
        make_covariance("ellipsoidal", bounds)


def test_refusals():
    with pytest.raises(UserError, match="Did you mean 'spherical'"):
        make(covariance="sperical")
    for options in ({"covariance": "spherical"}, {"log_var_range": BOUNDS}):
        with pytest.raises(UserError, match="A point model has no variances"):
            make(probabilistic=False, **options)
