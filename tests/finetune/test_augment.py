"""Augmentation against the authors' numbers and against loops written out."""

import json
import re

import numpy as np
import pytest
import torch

from finetune import augment
from finetune.config import Mix as MixOptions
from probemb.losses import output as labels
from probemb.models import create_model, create_tokenizer

CASES = ["elem_published", "elem_ratio1", "elem_prob0.6_ls0.1", "elem_mixup_only", "elem_cutmix_only"]
CASES += ["batch_a", "batch_b"]


class Legacy(np.random.RandomState):
    """The authors' generator, with the present name of one method."""

    integers = np.random.RandomState.randint


@pytest.mark.parametrize("name", CASES)
def test_authors_mixing(parity, name):
    v = parity("02_mixup_cutmix")
    cases = [
        key.removesuffix("__params_json")
        for key in v
        if re.fullmatch(rf"{re.escape(name)}__npseed\d+__params_json", key)
    ]
    assert cases
    for case in cases:
        check_mixing(v, case)


def check_mixing(v, case):
    """One case of the reference, drawn with the seed in its name."""
    options = json.loads(str(v[f"{case}__params_json"]))
    images = torch.tensor(v["images"])
    mix = augment.draw_mix(
        *(len(images), *images.shape[2:]),
        Legacy(int(case.partition("npseed")[2])),
        MixOptions(
            ratio=options.get("mix_batch_ratio", 1.0),
            mixup=options["mixup_alpha"],
            cutmix=options["cutmix_alpha"],
            switch=options["switch_prob"],
            prob=options["prob"],
            mode={"elem": "element"}.get(options["mode"], options["mode"]),
        ),
    )
    tolerance = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(augment.mix_images(images, mix), torch.tensor(v[f"{case}__images"]), **tolerance)
    if f"{case}__lam_final" in v:
        torch.testing.assert_close(mix.lam, torch.tensor(v[f"{case}__lam_final"])[:, 0], **tolerance)
    if f"{case}__use_cutmix" in v:
        expected = torch.tensor(v[f"{case}__use_cutmix"])
        assert torch.equal(mix.use_cutmix[: len(expected)], expected)
    if f"{case}__boxes_yl_yh_xl_xh_lam_in_call_order" in v:
        calls = v[f"{case}__boxes_yl_yh_xl_xh_lam_in_call_order"]
        boxed = (mix.use_cutmix & (mix.boxes.any(1) | (mix.lam != 1))).nonzero().flatten().tolist()
        if options["mode"] == "elem":
            assert mix.boxes[boxed].tolist() == calls[:, :4].tolist()
        else:
            assert mix.boxes[boxed[: len(calls)]].tolist() == calls[:, :4].tolist()
    eye = torch.eye(len(images))
    mixed = labels.mixed(eye, mix.lam, mix.partner)
    torch.testing.assert_close(
        labels.smooth(mixed, options["label_smoothing"]), torch.tensor(v[f"{case}__soft"]), rtol=0, atol=1e-6
    )
    hard = torch.tensor(v[f"{case}__hard"])
    if options["label_smoothing"] or (mix.lam != 1).all():
        assert torch.equal((mixed > 0).float(), hard)


@pytest.fixture(scope="module")
def tokenizer():
    return create_tokenizer(create_model("ViT-Micro-32"))


TEXTS = ["a large red circle left of a small blue square", "supercalifragilistic dogs!", "", "two"]


def text_loop(tokens, draw, random, ratio, masking, replacing):
    """One text, token by token, as PCME++'s code does it."""
    out = [tokens[0]]
    for place, token in enumerate(tokens[1 : tokens.index(augment.END_TOKEN)], start=1):
        share = draw[place] / ratio
        if share < masking:
            out.append(augment.MASK_TOKEN)
        elif share < masking + replacing:
            out.append(random[place])
        elif share >= 1:
            out.append(token)
    out.append(augment.END_TOKEN)
    return out + [0] * (len(tokens) - len(out))


@pytest.mark.parametrize("ratio", [0.2, 0.9])
def test_augmented_texts_equal_a_loop(tokenizer, ratio):
    tokens = tokenizer(TEXTS * 8)
    result = augment.size_augment_text(tokens, ratio, torch.Generator().manual_seed(4), augment.TextIds())
    generator = torch.Generator().manual_seed(4)
    draw = torch.rand(tokens.shape, generator=generator).tolist()
    random = torch.randint(1, augment.START_TOKEN, tokens.shape, generator=generator).tolist()
    for row, (text, d, r) in enumerate(zip(tokens.tolist(), draw, random)):
        assert result[row].tolist() == text_loop(text, d, r, ratio, 0.5, 0.1)


def test_texts_of_whole_words_are_augmented_within_their_vocabulary():
    vocabulary = [f"word{i}" for i in range(6)]
    architecture = {"text_cfg": {"tower": "word_gru", "vocabulary": vocabulary}, "vision_cfg": {}}
    ids = augment.TextIds.of({"architecture": architecture})
    tokens = torch.tensor([[2, 3, 4, 5, 6, 7, 0, 0]]).repeat(4000, 1)
    result = augment.size_augment_text(tokens, 0.5, torch.Generator().manual_seed(0), ids)
    assert result.min() == 0
    assert result.max() == 7
    assert (result == 1).sum().item() / (6 * 4000) == pytest.approx(0.5 * (0.5 + 0.1 / 7), abs=0.01)
    words = (result != 0).sum(1)
    assert words.sum().item() / (6 * 4000) == pytest.approx(1 - 0.5 * 0.4, abs=0.01)
    assert torch.equal(words, (result != 0).int().cumprod(1).sum(1))  # padding stays behind the words


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_cutout_covers_its_share_anywhere_inside(share):
    images = torch.randn(300, 3, 20, 30, generator=torch.Generator().manual_seed(0)) + 10
    before = images.clone()
    out = augment.cut_out(images, share, torch.rand(300, 2, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(images, before)
    gone = out == 0
    assert torch.equal(gone.any(1), gone.all(1))  # all channels
    assert torch.equal(out[~gone], images[~gone])
    sides = round(20 * share**0.5), round(30 * share**0.5)
    for one in gone[:, 0]:
        rows, columns = one.any(1).nonzero().flatten(), one.any(0).nonzero().flatten()
        assert (len(rows), len(columns)) == sides
        assert one[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert one.sum() == sides[0] * sides[1]
    tops = {int(one.any(1).nonzero()[0]) for one in gone[:, 0]}
    assert tops == set(range(20 - sides[0] + 1))


def test_dropped_words_are_unknown_and_nothing_else_is():
    tokens = torch.tensor([[augment.START_TOKEN, 5, 6, 7, augment.END_TOKEN, 0, 0]] * 4000)
    draw = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0))
    out = augment.drop_words(tokens, draw, 0.1, augment.TextIds())
    changed = out != tokens
    assert (out[changed] == augment.MASK_TOKEN).all()
    assert not changed[:, [0, 4, 5, 6]].any()
    assert changed[:, 1:4].float().mean() == pytest.approx(0.1, abs=0.01)
    words = augment.TextIds(stop=9, mask=1, end=None)
    assert augment.drop_words(torch.tensor([[2, 8, 0]]), torch.zeros(1, 3), 0.5, words).tolist() == [[1, 1, 0]]
