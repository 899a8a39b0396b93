"""jWAE on SCAN: the authors' whole step, the discriminator that keeps gradients, ranks and resuming on regions."""

import shutil

import pytest
import torch
from torch.nn import functional as F

import probemb.losses.jwae
from finetune.methods import METHODS, Batch
from probemb import Gaussian
from probemb.losses.jwae import encoder_loss
from probemb.models import Encoded, create_model
from tests.finetune.methods.test_scan import options, regions  # noqa: F401 - a fixture
from tests.finetune.runs import ONE_EPOCH, Job, checkpoint, metrics, run_here, saved
from tests.finetune.test_trainer import configured
from tests.losses.points import close
from tests.models.test_autoencoder import authors, published_modules  # noqa: F401 - a fixture

SMALL = {"loss.hidden": 6, "loss.word_width": 5}
PUBLISHED = ("--loss.published=true", "--loss.direction=i2t", "--loss.aggregation=mean", "--loss.image_norm=l1")
PUBLISHED += ("--loss.image_weight=0.05",)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def method_of(*words: str):
    torch.manual_seed(0)
    config = configured("jwae-scan", "--loss.hidden=6", "--loss.word_width=5", *words)
    cls = METHODS["jwae-scan"]
    model = create_model(
        "scan-regions-gru", head="average", embed_dim=8, n_unc_layers=0, vocabulary=[f"w{i}" for i in range(18)],
        **cls.model_options(config),
    )  # fmt: skip
    method = cls(config, model, None)
    method.module.double(), method.aside.double()
    return method, model


@pytest.fixture
def step(authors, monkeypatch):  # noqa: F811
    """The authors' batch and modules in our method: (method, model, batch, their encoders' parameters by name)."""
    v = authors
    method, model = method_of(*PUBLISHED)
    image, text, judge = published_modules(v)
    method.module.decoders["image"], method.module.decoders["text"] = image, text
    method.aside.discriminator = judge
    for i, parameter in enumerate(judge.parameters()):
        method.aside.register_buffer(f"gradient_{i}", torch.zeros_like(parameter))
    prefix = len("img_enc__param__")
    own = {name: v[name].clone().requires_grad_() for name in v if name[3:].startswith("_enc__param__")}
    regions_NRD = F.linear(v["images"], own["img_enc__param__fc.weight"], own["img_enc__param__fc.bias"])
    gru = torch.nn.GRU(6, 8, batch_first=True).double()
    weights = {name[prefix + 4 :]: p for name, p in own.items() if name.startswith("txt_enc__param__rnn.")}
    embedded = F.embedding(v["captions"], own["txt_enc__param__embed.weight"])
    words_NLD = torch.func.functional_call(gru, weights, embedded)[0]
    mask = torch.arange(7) < v["lengths"][:, None]
    point = Gaussian(torch.zeros(4, 8, dtype=torch.float64), torch.zeros(4, 8, dtype=torch.float64))
    images = Encoded(point, regions_NRD, torch.ones(4, 5, dtype=torch.bool), v["images"], point.mean)
    texts = Encoded(point, words_NLD, mask, words_NLD, point.mean)
    batch = Batch(
        images, texts, torch.eye(4), torch.arange(4), torch.arange(4), 5, 0, torch.Generator(), words=v["captions"]
    )
    unseen = (v["word_dropout_uniform"] < 0.2) & (v["captions"] >= 2)
    monkeypatch.setattr(probemb.losses.jwae, "drop_words", lambda words, rate, generator: words.masked_fill(unseen, 0))
    monkeypatch.setattr(method, "places", lambda batch: (int(v["region_index"]), int(v["word_index"])))
    return method, model, batch, own


def test_authors_step(step, authors):  # noqa: F811
    """Every part, their sum, and the gradients of encoders, decoders, and of the discriminator that gets them too."""
    (method, model, batch, own), v = step, authors
    out = method.loss(batch, model)
    close(out.terms["triplet"], v["train_emb__Le"], torch.float64)
    close(0.05 * out.terms["image"] + 0.005 * out.terms["text"], v["train_emb__r_tot"])
    close(0.01 * (out.terms["image_prior"] + out.terms["text_prior"]), v["train_emb__err_D"])
    close(out.loss, v["train_emb__total"])
    out.loss.backward()
    for name, parameter in own.items():
        close(parameter.grad, v[name.replace("__param__", "__").replace(name[:3], f"train_emb_grad__{name[:3]}", 1)])
    for i in (0, 1):
        found = method.aside.discriminator.layers[i].weight.grad
        close(found, v[f"train_emb_grad__netD__fc{i + 1}.weight"])


def test_the_published_discriminator_keeps_all_gradients(step, authors, monkeypatch):  # noqa: F811
    """Adam is given the sums: the encoders' of this step, its own, and those of all steps before."""
    (method, model, batch, _), v = step, authors
    drawn = v["true_gauss"]
    monkeypatch.setattr("probemb.models.autoencoder.prior_samples", lambda codes, generator: drawn)
    method.aside_optimizer = torch.optim.SGD(method.aside.parameters(), 0.0)
    weight = method.aside.discriminator.layers[0].weight
    each = v["train_emb_grad__netD__fc1.weight"] + v["errD_grad__netD__fc1.weight"]
    for steps in (1, 2):
        method.loss(batch, model).loss.backward(retain_graph=True)
        method.after_step(batch, model)
        assert weight.grad is None
        close(method.aside.gradient_0, steps * each)


def test_every_region_and_word_that_there_is_has_a_code():
    method, model = method_of()
    tokens, mask = torch.randn(3, 5, 8, dtype=torch.float64), torch.rand(3, 5) < 0.6
    mask[:, 0] = True
    codes = tokens.mean(1)
    point = Gaussian(F.normalize(codes, dim=1), torch.zeros_like(codes))
    looks = torch.randn(3, 5, 2048, dtype=torch.float64)
    side = Encoded(point, tokens, mask, looks, codes)
    words = torch.randint(2, 20, (3, 5)).masked_fill(~mask, 0)
    words = torch.cat([words, words.new_zeros(3, 3)], 1)
    batch = Batch(side, side, torch.eye(3), torch.arange(3), torch.arange(3), 1, 0, torch.Generator(), words=words)
    out = method.loss(batch, model)
    there = torch.cat([tokens[i, mask[i]] for i in range(3)])
    close(out.terms["image_prior"], encoder_loss(method.aside.discriminator(there)).detach())
    error = looks - method.module.decoders["image"](tokens)
    close(out.terms["image"], (error.norm(dim=2) * mask).sum().detach() / 3)
    assert method.decoded(batch)[1] is codes  # a caption is generated from the mean of its words
    assert out.terms["text"] > 0


@pytest.mark.parametrize("published", ["false", "true"])
def test_a_run_resumes_bit_for_bit(published, regions, tmp_path):  # noqa: F811
    whole, part = tmp_path / "whole", tmp_path / "part"
    given = {"method": "jwae-scan", "loss.published": published, "save-every": 3, "keep-checkpoints": 9, **SMALL}
    given["optimizer.lr"] = 0.01  # to see it learn in a few steps
    assert run_here(options(regions, whole, **given)) == 0
    shutil.copytree(whole, part)
    steps = sorted(int(path.name.removeprefix("step-")) for path in (part / "checkpoints").glob("step-*"))
    for later in steps[1:]:
        shutil.rmtree(part / "checkpoints" / f"step-{later}")
    assert run_here(options(regions, part, **given), "--resume") == 0
    assert checkpoint(part, steps[-1]) == checkpoint(whole, steps[-1])
    lines = [line for line in metrics(whole) if "loss" in line]
    assert lines[-1]["image"] < lines[0]["image"]
    assert any("rsum" in line for line in metrics(whole))


@pytest.mark.parametrize(("ranks", "published"), [(2, "true"), (3, "false")])
def test_several_processes_equal_one(ranks, published, regions, tmp_path):  # noqa: F811
    given = {"method": "jwae-scan", "loss.published": published, "data.validation": "null", **SMALL, **ONE_EPOCH}
    assert run_here(options(regions, tmp_path / "one", **given)) == 0
    job = Job(options(regions, tmp_path / "many", **given), ranks=ranks, output=tmp_path / "log")
    assert job.wait() == [0] * ranks, job.text()
    one, many = ([line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("one", "many"))
    assert many == pytest.approx(one, rel=1e-4)
    for name, tensor in saved(tmp_path / "one").items():
        torch.testing.assert_close(saved(tmp_path / "many")[name], tensor, rtol=1e-3, atol=1e-4)
