"""Inputs of a step: mixed images and labels on any number of ranks, pixels, and composed queries."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2

from finetune.data import Loader, Pairs
from probemb.distributed import average_gradients
from probemb.models import Encoded, create_tokenizer, create_transforms
from tests.finetune.trainers import BATCH, configured, make_trainer
from tests.ranks import run_ranks


def mixed(rank, world, few, words):
    """This rank's images, mixed; which images all ranks have, their labels, and how they are mixed."""
    more = "--mix.smoothing=0.01", "--size-augment=0", "--augment.cutout=0.2"
    trainer = make_trainer(configured("pcmepp", few, *more, *words))
    pairs = next(trainer.loader.epoch(0))
    (images, _, _), mix = trainer.task.inputs(pairs, trainer.model, 0)
    zeros = torch.zeros(len(images), 8, dtype=torch.float64)
    embedded = [Encoded(zeros, zeros)] * 2
    batch = trainer.task.gather(embedded, pairs, mix, epoch=0, step=0)
    return images.numpy(), batch.image_index.numpy(), batch.match.numpy(), [x.numpy() for x in mix]


@pytest.mark.parametrize(
    "words", [("--mix.ratio=0.5",), ("--mix.mode=batch", "--mix.ratio=1", "--mix.mixup=0")], ids=["element", "batch"]
)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_mix_images_and_labels_as_one_process(world, words, few):
    ((images, index, match, mix),) = run_ranks(1, mixed, few, words)
    for rank, (own, *others) in enumerate(run_ranks(world, mixed, few, words)):
        np.testing.assert_array_equal(own, images[rank * len(own) : (rank + 1) * len(own)])
        for theirs, expected in zip((*others[:2], *others[2]), (index, match, *mix)):
            np.testing.assert_array_equal(theirs, expected)
    lam, use_cutmix, _, partner = mix
    assert (lam < 1).sum() > BATCH // 4
    assert len(set(lam)) == (1 if "--mix.mode=batch" in words else (lam < 1).sum() + 1)
    assert use_cutmix.all() or "--mix.mode=batch" not in words
    same = index[:, None] == index
    expected = lam[:, None] * same + (1 - lam[:, None]) * same[partner]
    np.testing.assert_allclose(match, expected * 0.98 + 0.01, atol=1e-6)


@pytest.mark.parametrize("positives", ["class", "image"])
def test_captions_of_the_class_match(positives, birds):
    words = "--batch_size=24", f"--data.positives={positives}", "--size-augment=0", "--mix.ratio=0"
    trainer = make_trainer(configured("vse", birds, *words))
    data = trainer.task.train
    trainer.task.train = replace(data, classes=["red circle", "blue square"] * (len(data) // 2))
    pairs = next(Loader(trainer.task.rows()).epoch(0))
    embedded = [Encoded(torch.zeros(24, 4), torch.zeros(24, 4))] * 2
    batch = trainer.task.gather(embedded, pairs, None, epoch=0, step=0)
    key = pairs.image_index % 2 if positives == "class" else pairs.image_index
    assert torch.equal(batch.match, (key[:, None] == key[None, :]).float())
    assert 24 < (pairs.image_index[:, None] % 2 == pairs.image_index[None, :] % 2).sum() < 24 * 24


# ------------------------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize("words", [("--augment.cutout=0.3", "--mix.ratio=0"), ("--mix.ratio=1",), ("--mix.ratio=0",)])
def test_augmentation_is_that_of_normalised_floats(few, words):
    """Cutout's grey is 0 and mixing is not rounded: what the towers read is the same to the last bit."""
    trainer = make_trainer(configured("pcmepp", few, "--model.image_size=24", *words), double=False)  # less than 32
    task, model, tokenizer = trainer.task, trainer.model, create_tokenizer(trainer.model)
    floats = image_transform_v2(PreprocessCfg(**model.config["preprocess"]), is_train=True)
    read = [
        next(Loader(Pairs(task.train, transform, tokenizer, BATCH, 3)).epoch(1))
        for transform in (create_transforms(model).train, floats)
    ]
    ((images, *_), mix), ((expected, *_), same) = (task.inputs(batch, model, 5) for batch in read)
    assert torch.equal(model.normalized(images), expected)
    with torch.no_grad():
        assert torch.equal(model.encode_image(images).mean, model.encode_image(expected).mean)
    if "--mix.ratio=1" in words:
        assert torch.equal(mix.lam, same.lam)
        assert (mix.lam < 1).any()
    elif words[0].startswith("--augment"):
        assert ((images == 0).all(1).double().mean((1, 2)) - 0.3).abs().max() < 0.03
    else:
        assert images.dtype == torch.uint8  # nothing to change: as they came


# --------------------------------------------------------------------------------------------------- composed queries


def composed(queries, *words):
    return make_trainer(configured("mpc", queries, *words), double=False)


def test_a_step_sees_the_targets_the_parts_and_what_is_correct(queries):
    """Parts are the embeddings of what the batch says, and a target is correct if it has all concepts."""
    trainer = composed(queries, "--augment.cutout=0", "--augment.word_dropping=0")
    given, data = next(trainer.loader.epoch(0)), trainer.task.train
    (images, tokens, _), _ = trainer.task.inputs(given, trainer.model, 0)
    model = trainer.model.eval()
    with torch.no_grad():
        image, text = model.encode_image(images), model.encode_text(tokens)
        embedded = [Encoded(g.mean, g.log_var) for g in (image, text)]
        batch = trainer.task.gather(embedded, given, None, epoch=0, step=0)
    n = len(given.part_rows)
    assert batch.texts is None
    assert batch.parts.shape == (n, 2, model.embed_dim)
    for row in range(n):
        torch.testing.assert_close(batch.image.mean[row], image.mean[row])
        for place, at in enumerate(given.part_rows[row].tolist()):
            source, index = (image, n + at) if at >= 0 else (text, -at - 1)
            torch.testing.assert_close(batch.parts.mean[row, place], source.mean[index])
            torch.testing.assert_close(batch.parts.log_var[row, place], source.log_var[index])
        for column, target in enumerate(given.target_index.tolist()):
            has_all = set(given.concepts[row].tolist()) <= set(data.held[target])
            assert bool(batch.match[row, column]) == has_all
    assert batch.match.diagonal().all()
    assert batch.match.sum() > n  # some other target of the batch is correct too


def test_a_step_of_kept_features_is_one_of_pixels(queries, tmp_path):
    off = (
        "--augment.cutout=0",
        "--augment.word_dropping=0",
        "--augment.hflip=0",
        "--augment.scale=[1,1]",
        "--data.validation=val",
    )
    found = []
    for more in ((), (f"--data.cache_features={tmp_path}",)):
        trainer = composed(queries, *off, "--model.lock_image=true", "--optimizer.freeze_epochs=0", *more)
        given = next(trainer.loader.epoch(0))
        images = trainer.task.inputs(given, trainer.model, 0)[0][0]
        found.append((given, trainer.model.encode_image(images).mean, trainer.task.measure(trainer.model.eval())))
    (pixels, expected, quality), (features, mean, kept_quality) = found
    assert features.images.ndim == 2  # rows of features
    assert features.part_rows.equal(pixels.part_rows)
    targets = slice(len(features.part_rows))  # square: training's crop of a part is another one than evaluation's
    torch.testing.assert_close(mean[targets], expected[targets], rtol=0, atol=5e-3)  # float16
    assert kept_quality == pytest.approx(quality, abs=2)


def test_a_text_tower_without_texts_gets_a_gradient_of_zero(queries):
    trainer = composed(queries)
    given = next(trainer.loader.epoch(0))
    b, k = given.part_rows.shape
    given = given._replace(
        images=torch.cat([given.images[:b]] * 3), tokens=given.tokens[:1],
        part_rows=torch.arange(b * k).view(b, k),
    )  # fmt: skip
    (images, tokens, _), _ = trainer.task.inputs(given, trainer.model, 0)
    image, text = trainer.model.encode_image(images), trainer.model.encode_text(tokens)
    embedded = [Encoded(g.mean, g.log_var) for g in (image, text)]
    trainer.objective.loss(trainer.task.gather(embedded, given, None, epoch=0, step=0), trainer.model).loss.backward()
    average_gradients(trainer.model.parameters())
    grads = [p.grad for name, p in trainer.model.text.named_parameters() if p.requires_grad]
    assert all(grad is not None and not grad.any() for grad in grads)
