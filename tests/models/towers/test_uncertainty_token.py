"""An uncertainty token in open_clip's transformers (ProLIP): what it reads, and what reads it."""

import open_clip
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from probemb.models import create_model, create_tokenizer

NAME = "ViT-Micro-32"
TEXTS = ["a dog", "two dogs on green grass in a park"]


def make(**options):
    torch.manual_seed(0)
    return create_model(NAME, **{"uncertainty": "token", **options}).eval()


def batch(model, n=2):
    images = torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return images, create_tokenizer(model)(TEXTS)


def test_image_by_hand():
    """Class token, patches and [UNC] through every block and the last norm; a linear map of each of both tokens."""
    model = make()
    images, _ = batch(model)
    tower = model.visual
    patches = tower.conv1(images)
    ours = []
    for one in patches:
        tokens = [tower.class_embedding + tower.positional_embedding[0], tower.uncertainty_token]
        tokens += [patch + position for patch, position in zip(one, tower.positional_embedding[1:])]
        x = tower.ln_post(tower.transformer(tower.ln_pre(torch.stack(tokens))[None]))[0]
        ours.append((F.normalize(x[0] @ tower.proj, dim=0), tower.log_var_head.weight @ x[1] + tower.log_var_head.bias))
    out = model.encode_image(images)
    assert_close(out.mean, torch.stack([mean for mean, _ in ours]))
    assert_close(out.log_var, torch.stack([log_var for _, log_var in ours]))


def test_text_by_hand():
    """Each text alone, without padding and without any mask, [UNC] and [CLS] behind it."""
    model = make()
    tower, (_, tokens) = model.text, batch(model)
    out = model.encode_text(tokens)
    for i, row in enumerate(tokens):
        words = row[: int(row.argmax()) + 1]
        x = tower.token_embedding(words) + tower.positional_embedding[: len(words)]
        class_token = tower.cls_emb + tower.positional_embedding[tower.context_length]
        x = torch.cat([x, tower.uncertainty_token[None], class_token[None]])[None]
        x = tower.ln_final(tower.transformer(x))[0]
        assert_close(out.mean[i], F.normalize(x[-1] @ tower.text_projection, dim=0))
        assert_close(out.log_var[i], tower.log_var_head.weight @ x[-2] + tower.log_var_head.bias)


def test_pretrained_text_keeps_its_form_and_its_means(tmp_path):
    """In a causal text tower nothing looks at what comes later, so [UNC] behind a text changes no mean."""
    stock = open_clip.create_model(NAME, force_custom_text=True).eval()
    torch.save(stock.state_dict(), tmp_path / "x.pt")
    model = make(pretrained=str(tmp_path / "x.pt"))
    _, tokens = batch(model)
    with torch.no_grad():
        assert_close(model.encode_text(tokens).mean, stock.encode_text(tokens, normalize=True))
        assert_close(model.encode_text(model.cut_padding(tokens)).log_var, model.encode_text(tokens).log_var)
    assert torch.equal(model.visual.positional_embedding, stock.visual.positional_embedding)
    other = tokens.clone()
    other[:, 1] = 1000
    assert not torch.allclose(model.encode_text(other).log_var, model.encode_text(tokens).log_var)
