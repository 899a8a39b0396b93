"""Encoded: tokens beside the embedding, and one gather over ranks."""

import pytest
import torch

from probemb import distributed
from probemb.models import Encoded, create_model, create_tokenizer
from tests.ranks import run_ranks


def make():
    torch.manual_seed(0)
    return create_model("ViT-Micro-32", head="gpo", embed_dim=24)


def test_tokens_are_pooled_to_the_mean():
    model = make()
    tokens = create_tokenizer(model)(["a photo of a cat", "two dogs"])
    encoded = model.text(tokens, want_tokens=True)
    assert encoded.tokens.shape == (2, model.context_length, 24)
    assert encoded.mask.sum(1).tolist() == [7, 4]  # start and end token included
    pooled = model.text.mean_head.pool(encoded.tokens, encoded.mask)
    torch.testing.assert_close(torch.nn.functional.normalize(pooled, dim=-1), encoded.gaussian.mean)
    image = model.visual(torch.randn(2, 3, 32, 32), want_tokens=True)
    assert image.tokens.shape == (2, model.visual.n_tokens, 24)
    assert image.mask.all()


def items(world, per_rank=2, k=3, d=4):
    """Images with K embeddings and five tokens; texts whose tokens are as many as their rank's longest text has."""
    g = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(world * per_rank, *shape, generator=g, dtype=torch.float64)

    lengths = torch.arange(world * per_rank) % 5 + 1
    mask = torch.arange(8) < lengths[:, None]
    image = Encoded(draw(k, d), draw(k, d), draw(5, d), torch.ones(world * per_rank, 5, dtype=torch.bool))
    return image, Encoded(draw(d), draw(d), draw(8, d) * mask[..., None], mask)


def weighted(image, text):
    """A number that depends on every gathered value and on its place."""
    total = 0.0
    for part in (*image[:3], *text[:2]):
        total = total + (part * torch.arange(1, part.numel() + 1).view(part.shape)).sum()
    tokens = text.tokens * text.mask[..., None]
    return total + (tokens.sum((1, 2)) * torch.arange(1, len(tokens) + 1)).sum()


def on_one_rank(rank, world):
    image, text = items(world)
    mine = slice(2 * rank, 2 * rank + 2)
    longest = int(text.mask[mine].sum(1).max())
    leaf = image.tokens[mine].clone().requires_grad_()
    image = image.each(lambda x: x[mine])._replace(tokens=leaf)
    text = text.each(lambda x: x[mine])
    text = text._replace(tokens=text.tokens[:, :longest], mask=text.mask[:, :longest])
    out = distributed.gather_encoded(image, text)
    value = weighted(*out)
    value.backward()
    return value.item(), leaf.grad.numpy(), out[1].mask.sum(1).tolist()


def test_one_gather_takes_everything():
    image, text = items(2)
    leaf = image.tokens.requires_grad_()
    expected = weighted(image, text)
    expected.backward()
    for rank, (value, gradient, lengths) in enumerate(run_ranks(2, on_one_rank)):
        assert value == pytest.approx(expected.item())
        torch.testing.assert_close(torch.as_tensor(gradient), 2 * leaf.grad[2 * rank : 2 * rank + 2])
        assert lengths == text.mask.sum(1).tolist()
