"""Parts of images and texts: what is drawn, and what towers make of it, against tokens that are cut by hand."""

import pytest
import torch
from torch.testing import assert_close

from probemb.models import create_model, create_tokenizer, draw_parts

TEXTS = ["a", "a photo of two dogs", "a small red car in front of a very old house with seven windows and no door"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return create_model("ViT-Tiny-64", n_unc_layers=1).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def images(model):
    return torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def tokens(model):
    return create_tokenizer(model)(TEXTS)


def draw(seed, *arguments, **more):
    return draw_parts(*arguments, generator=torch.Generator().manual_seed(seed), **more)


def test_all_parts_are_the_whole(model, images, tokens):
    patches = draw(0, model.image_tower, images, share=1.0)
    assert_close(model.visual(images, kept=patches)[:2], model.visual(images)[:2])
    kept = draw(0, model.text_tower, tokens, share=1.0)
    assert_close(model.text(tokens, kept=kept)[:2], model.text(tokens)[:2])


def test_patches_keep_their_positions(model, images):
    tower = model.image_tower
    kept = draw(0, tower, images, share=0.25)
    assert kept.shape == (3, round(0.25 * (tower.n_tokens - 1)))
    assert all(len(set(row.tolist())) == len(row) and row.tolist() == sorted(row.tolist()) for row in kept)
    found = model.encode_image(images, kept=kept)
    embedded = tower.ln_pre.register_forward_pre_hook(lambda _, x: embedded_rows.append(x[0]))
    embedded_rows = []
    model.encode_image(images)
    embedded.remove()
    for i, row in enumerate(kept):  # the embedded tokens, cut by hand
        chosen = embedded_rows[0][i : i + 1, [0, *(1 + p for p in row.tolist())]]
        mean, unc = tower._branches(tower.ln_pre(chosen))
        assert_close(found.mean[i], torch.nn.functional.normalize(tower.project(tower.ln_post(mean[:, 0])))[0])
        assert_close(found.log_var[i], torch.nn.functional.linear(unc[0, 0], *tower.log_var_head.parameters()))


def test_texts_keep_both_ends_and_their_share_of_words(model, tokens):
    kept = draw(0, model.text_tower, tokens, share=0.25)
    ends = tokens.argmax(1)
    for row, end in zip(kept, ends):
        there = [p for p in row.tolist() if p >= 0]
        assert (there[0], there[-1]) == (0, end)
        assert there == sorted(set(there))
        words = int(end) - 1
        assert len(there) == 2 + (min(words, max(1, round(0.25 * words))))
        assert row.tolist() == there + [-1] * (len(row) - len(there))


def test_a_text_without_some_words_does_not_depend_on_them(model, tokens):
    kept = torch.tensor([[0, 1, 2, -1], [0, 2, 5, 6], [0, 3, 17, -1]])
    kept[2, 2] = tokens[2].argmax()
    before = model.encode_text(tokens, kept=kept)
    for i, row in enumerate(kept):  # one by one, without what fills the others
        alone = model.encode_text(tokens[i : i + 1], kept=row[None, row >= 0])
        assert_close(alone.mean[0], before.mean[i])
        assert_close(alone.log_var[0], before.log_var[i])
    changed = tokens.clone()
    changed[1, [1, 3, 4]] = 300
    changed[2, 1] = 300
    assert torch.equal(model.encode_text(changed, kept=kept).mean, before.mean)
