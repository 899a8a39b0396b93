"""Shapes of covariances and bounds of variances, in every head and tower, saved and loaded."""

import itertools
import math

import pytest
import torch

from probemb import UserError
from probemb.models import create_model, create_tokenizer
from probemb.models.heads import COVARIANCES, HEADS, Covariance, make_covariance

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


TOWERS = ("ViT-Micro-32", "resnet-gru-small", "scenes-cnn-gru")


@pytest.mark.parametrize(("head", "name", "kind"), [*zip(HEADS, itertools.cycle(TOWERS), itertools.cycle(COVARIANCES))])
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


@pytest.mark.parametrize("bounds", [(2.0, -2.0), (0.0,), (float("nan"), 1.0)])
def test_bounds_that_are_none(bounds):
    with pytest.raises(UserError, match="log_var_range is"):
        make_covariance("ellipsoidal", bounds)
