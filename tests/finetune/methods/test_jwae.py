"""jWAE and its baselines: the loss by hand, the discriminator's training, resuming, mean word vectors."""

import math
import shutil
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from finetune.methods import METHODS, Batch
from probemb import Gaussian, load_model
from probemb.errors import UserError
from probemb.losses import triplet_loss
from probemb.losses.jwae import code_mse, drop_words, mmd, vae_kl
from probemb.models import Encoded, create_model
from tests.finetune.runs import checkpoint, metrics, run_here
from tests.finetune.test_trainer import configured
from tests.losses.points import close

VOCABULARY = ["a", "red", "blue", "dog", "cat", "of"]
SMALL = ("--loss.hidden=6", "--loss.word_width=5")
N = 6


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def method_of(name: str, architecture: str = "resnet-gru-small", *words: str):
    """A method on a small model, in float64, and the model."""
    torch.manual_seed(0)
    config = configured(name, *SMALL, *words)
    cls = METHODS[name]
    options = {"head": "mlp", "embed_dim": 4, "vocabulary": VOCABULARY, **cls.model_options(config)}
    model = create_model(architecture, n_unc_layers=0, **options)
    method = cls(config, model, None)
    method.module.double(), method.aside.double()
    return method, model


def batch(model, epoch=1) -> Batch:
    """N pairs, of which 0 and 1 are of one image."""
    g = torch.Generator().manual_seed(3)

    def encoded(width, shift):
        codes = (torch.randn(N, 4, generator=g, dtype=torch.float64) + shift).requires_grad_()
        log_var = torch.randn(N, 4, generator=g, dtype=torch.float64) - 1
        features = torch.randn(N, width, generator=g, dtype=torch.float64)
        return Encoded(Gaussian(F.normalize(codes, dim=1), log_var), features=features, codes=codes)

    images, texts = encoded(model.image_tower.pooled_width, 0.5), encoded(model.text_tower.pooled_width, 0.0)
    ids = torch.tensor([0, 0, 2, 3, 4, 5])
    words = torch.randint(2, 8, (N, 16), generator=g).masked_fill(torch.arange(16) >= torch.arange(2, 8)[:, None], 0)
    match = (ids[:, None] == ids).double()
    return Batch(images, texts, match, ids, torch.arange(N), epoch, 0, torch.Generator().manual_seed(9), words=words)


def said(method, texts, b, model):
    """Mean negative log likelihood of the captions, with the words that the method's generator drops."""
    words = b.words[:, : int((b.words != 0).sum(1).max())]
    seen = drop_words(words, method.options.word_dropout, torch.Generator().manual_seed(9))
    log_p = method.module.decoders["text"].log_probabilities(texts, seen)
    each = [-log_p[i, m, w] for i, row in enumerate(words.tolist()) for m, w in enumerate(row) if w]
    return sum(each) / N


def bce(method, codes):
    logits = method.aside.discriminator(codes)
    return F.binary_cross_entropy(logits.sigmoid(), torch.ones_like(logits))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("name", ["mse", "mmd-mse", "jwae-mse", "jwae-mh"])
def test_the_loss_is_what_the_paper_adds_up(name, reduce):
    """Eq. 6 sums errors over items, and the public code averages them; Eq. 7 is a mean."""
    default = "mean" if name == "jwae-mh" else "sum"
    words = () if reduce == default else (f"--loss.reduce={reduce}",)
    method, model = method_of(name, "resnet-gru-small", *words)
    items = N if reduce == "sum" else 1
    b = batch(model)
    image, text = b.images.codes, b.texts.codes
    decoded = method.module.decoders["image"](image)
    of_images = sum(math.hypot(*row) for row in (b.images.features - decoded).tolist()) / N
    of_texts = said(method, text, b, model)
    errors = items * (of_images + of_texts)
    expected = {
        "mse": lambda: code_mse(image, text) + errors,
        "mmd-mse": lambda: code_mse(image, text) + errors + 0.2 * mmd(image, text),
        "jwae-mse": lambda: code_mse(image, text) + errors + 0.2 * (bce(method, image) + bce(method, text)),
        "jwae-mh": lambda: (
            triplet_loss(b.image.mean @ b.text.mean.T, b.match, 0.2).loss
            + items * (0.5 * of_images + 0.005 * of_texts)
            + 0.01 * (bce(method, image) + bce(method, text))
        ),
    }[name]()
    out = method.loss(b, model)
    close(out.loss, expected.detach())
    close(out.terms["image"], of_images)
    out.loss.backward()
    assert all(x.grad.abs().sum() > 0 for x in (image, text))
    assert all(p.grad.abs().sum() > 0 for p in method.module.parameters())
    assert all(p.grad is None for p in method.aside.parameters())


SUPERVISION = {"mse": "mse", "mmd-mse": "mse", "jwae-mse": "mse", "jwae-mh": "triplet"}


@pytest.mark.parametrize("name", SUPERVISION)
def test_unpaired_items_are_reconstructed_and_held_to_the_prior_but_not_matched(name):
    method, model = method_of(name)
    everything, n = batch(model), N - 2

    def pairs(with_unpaired=None):
        b = batch(model)
        return replace(b, images=b.images[:n], texts=b.texts[:n], match=b.match[:n, :n], with_unpaired=with_unpaired)

    alone, whole = (method.loss(b, model).terms for b in (replace(pairs(), words=batch(model).words[:n]), batch(model)))
    found = method.loss(pairs(everything), model).terms
    for term, value in found.items():
        close(value, (alone if term == SUPERVISION[name] else whole)[term])
    assert not torch.allclose(found["text"], alone["text"])
    if name.startswith("jwae"):
        close(
            method.after_step(pairs(batch(model)), model)["js"],
            method_of(name)[0].after_step(batch(model), model)["js"],
        )


def test_methods_of_pairs_alone_refuse_unpaired_data():
    with pytest.raises(UserError, match=r"learns from pairs alone.*") as refused:
        configured("vse", "--data.unpaired=data/x")
    assert "jwae-mh" in str(refused.value.remedy)


def test_the_variational_loss_is_of_samples():
    method, model = method_of("vae-mh")
    b, g = batch(model), torch.Generator().manual_seed(9)
    z = [
        e.codes + (0.5 * e.gaussian.log_var).exp() * torch.randn(N, 4, generator=g, dtype=torch.float64)
        for e in (b.images, b.texts)
    ]
    unit = [F.normalize(x, dim=1) for x in z]
    words = b.words[:, : int((b.words != 0).sum(1).max())]
    nll = method.module.decoders["text"].nll(z[1], words, drop_words(words, 0.2, g)).mean()
    kl = [vae_kl(Gaussian(e.codes, e.gaussian.log_var)) for e in (b.images, b.texts)]
    of_images = (b.images.features - method.module.decoders["image"](z[0])).norm(dim=1).mean()
    expected = triplet_loss(unit[0] @ unit[1].T, b.match, 0.2).loss
    expected = expected + 0.5 * of_images + 0.005 * nll + 0.01 * (kl[0] + kl[1])
    close(method.loss(b, model).loss, expected.detach())


def test_the_first_epochs_hinges_are_of_all_negatives():
    method, model = method_of("jwae-mh")
    b = batch(model, epoch=0)
    close(method.loss(b, model).terms["triplet"], triplet_loss(b.image.mean @ b.text.mean.T, b.match, 0.2, False).loss)


def test_mean_word_vectors_are_reconstructed_as_vectors():
    method, model = method_of("jwae-mse", "resnet-words-small")
    b = batch(model)
    error = b.texts.features - method.module.decoders["text"](b.texts.codes)
    close(method.loss(b, model).terms["text"], error.square().sum(1).mean().detach())


def test_the_discriminator_learns_from_its_own_loss_alone():
    """Gradients start from zero, codes get none, and codes far from the prior are told from it."""
    method, model = method_of("jwae-mh", "resnet-gru-small", "--loss.discriminator_lr=0.003")
    b = batch(model)
    method.loss(b, model).loss.backward()
    for codes in (b.images.codes, b.texts.codes):
        codes.grad = None
    before = [p.clone() for p in method.aside.parameters()]
    first = method.after_step(b, model)
    found = [p.clone() for p in method.aside.parameters()]
    assert all(not torch.equal(p, old) for p, old in zip(method.aside.parameters(), before))
    assert b.images.codes.grad is None
    again, _ = method_of("jwae-mh", "resnet-gru-small", "--loss.discriminator_lr=0.003")
    other = batch(model)
    again.loss(other, model)  # draws the dropped words
    again.after_step(other, model)
    for one, two in zip(found, again.aside.parameters()):
        assert torch.equal(one, two)  # the encoders' backward pass has left nothing
    for _ in range(150):
        last = method.after_step(b, model)
    assert last["discriminator"] < 0.8 * first["discriminator"]
    assert 0.1 < last["js"] < math.log(2)


WORDS = {"model.name": "resnet-words-small", "model.embed_dim": 8, "optimizer.freeze-epochs": 0}


@pytest.mark.parametrize("name", ["jwae-mh", "vae-mh"])
def test_a_run_resumes_bit_for_bit_with_its_discriminator(name, scenes, tmp_path):
    """In the middle of an epoch."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    options = {"method": name, "data.path": scenes, "loss.hidden": 6, "loss.word_width": 5, **WORDS}
    options |= {"model.name": "resnet-gru-small", "save-every": 2, "keep-checkpoints": 9}
    if name == "vae-mh":
        options |= {"data.unpaired": scenes, "data.unpaired-batch": 20}
    assert run_here({**options, "out": whole}) == 0
    shutil.copytree(whole, part)
    for later in ("step-3", "step-4", "step-6"):
        shutil.rmtree(part / "checkpoints" / later, ignore_errors=True)
    assert [path.name for path in (part / "checkpoints").glob("step-*")] == ["step-2"]
    assert run_here({**options, "out": part}, "--resume") == 0
    assert checkpoint(part, 6) == checkpoint(whole, 6)
    if name == "jwae-mh":
        assert any("aside.discriminator" in key for key in checkpoint(whole, 6)["adam_steps"])


@pytest.mark.parametrize("name", ["jwae-mse", "jwae-mh", "mmd-mse"])
def test_mean_word_vectors_and_cached_features_through_the_command(name, scenes, tmp_path, capsys):
    out = tmp_path / "run"
    options = {"method": name, "data.path": scenes, "out": out, "data.cache-features": tmp_path / "features", **WORDS}
    if name == "jwae-mse":
        options |= {"data.unpaired": scenes, "data.unpaired-batch": 8}
    assert run_here({**options, "optimizer.lr": 0.003}) == 0
    assert "random vectors, which do not train: name word vectors with --model.word-vectors" in capsys.readouterr().out
    lines = [line for line in metrics(out) if "loss" in line]
    assert lines[-1]["image"] < lines[0]["image"]
    assert lines[-1]["text"] < lines[0]["text"]
    model = load_model(out).model
    means = model.encode_text(torch.tensor([[2, 3, 4], [5, 6, 0]])).mean
    close(means.norm(dim=1), torch.ones(2), torch.float32)  # what people rank are unit means
    assert not model.probabilistic


def test_decoders_learn_at_the_heads_rate_whatever_the_scalars_is():
    from finetune.config import Optimizer
    from finetune.recipe import parameter_groups

    method, model = method_of("jwae-mh")
    groups = {group["name"]: group for group in parameter_groups(model, method.module, Optimizer(lr=1e-3, scalars=30))}
    assert groups["decoders"]["lr"] == groups["image.head.0"]["lr"] == 1e-3
    assert len(groups["decoders"]["params"]) == len(list(method.module.parameters()))
    assert {id(p) for p in method.aside.parameters()}.isdisjoint(id(p) for g in groups.values() for p in g["params"])
