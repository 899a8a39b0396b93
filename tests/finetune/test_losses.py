"""Methods' losses of a batch, written out."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import probemb.losses.jwae
from finetune.methods import METHODS
from finetune.methods.base import Batch
from finetune.methods.regions import cross_attention
from probemb.cross_attention import CrossAttention, Tokens
from probemb.losses.jwae import code_mse, drop_words
from probemb.losses.noisy import clean_probability, ncr_loss, ncr_pair_losses, ncr_predict
from probemb.losses.output import cosine_similarity
from probemb.losses.triplet import prob_triplet_loss, triplet_loss
from probemb.models import Encoded, create_model
from tests.finetune.conftest import WORDS
from tests.finetune.trainers import configured
from tests.losses.points import close, pairs, same_images
from tests.models.test_autoencoder import published_modules

N = 6


def method_of(name: str, *words: str, model=None):
    options = configured(name, "x", *words).loss
    return METHODS[name](options, model, SimpleNamespace(n_captions=12), 4)


def points(d: int = 5) -> Batch:
    """Pairs of which the first two are of one image."""
    g = torch.Generator().manual_seed(0)
    means = [F.normalize(torch.randn(N, d, generator=g), dim=-1) for _ in range(2)]
    image, text = (Encoded(m, torch.full_like(m, -30.0)) for m in means)
    match, index = torch.eye(N), torch.arange(N)
    match[0, 1] = match[1, 0] = 1
    return Batch(image, text, match, index, index, 5, 0, g)


@pytest.mark.parametrize("name", ["vse", "vsepp", "prob-vsepp"])
def test_the_first_epochs_have_all_negatives_where_asked(name):
    b = points()
    made = method_of(name, "--loss.warmup_epochs=2")
    for epoch, hardest in ((1, False), (2, True)):
        b.epoch = epoch
        if name == "prob-vsepp":
            negatives = "hardest" if hardest else "all"
            expected = prob_triplet_loss(b.image, b.text, b.match, "wasserstein2", 0.2, negatives)
        else:
            expected = triplet_loss(b.image.mean @ b.text.mean.T, b.match, 0.2, hardest)
        torch.testing.assert_close(made.loss(b, None).loss, expected.loss)


def test_lambdas_are_the_directions_own_unless_given():
    make = METHODS["scan"].Options
    assert cross_attention(make(direction="i2t")) == CrossAttention("i2t", lambda_softmax=4.0, lambda_lse=5.0)
    assert cross_attention(make(direction="i2t", lambda_softmax=7.0)).lambda_softmax == 7.0


def test_a_and_b_belong_to_the_distance_that_trained_them():
    method = METHODS["pcmepp"]
    for distance, form in (("csd", "distance"), ("match-probability", "samples"), ("wasserstein2", "none")):
        assert method.model_options(method.Options(distance=distance))["match"] == form


@pytest.mark.parametrize("name", ["pcmepp", "pcmepp-mu"])
def test_the_clip_loss_beside_pcmepp(name):
    """Its weight, the model's own temperature, and labels with two captions of one image."""
    b = points(d=8)
    b.images, b.texts = (Encoded(g.mean, torch.zeros_like(g.mean)) for g in (b.image, b.text))
    model = create_model("ViT-Micro-32", probabilistic=METHODS[name].probabilistic, init_scale=5, init_shift=5)

    def terms(weight: float):
        return method_of(name, f"--loss.clip={weight}").loss(b, model)

    logits = model.logit_scale.exp() * b.image.mean @ b.text.mean.T
    target = b.match / b.match.sum(1, keepdim=True)
    expected = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    torch.testing.assert_close(terms(0.5).loss, terms(0).loss + 0.5 * expected)
    torch.testing.assert_close(terms(0.5).terms["clip"], expected)
    assert "clip" not in terms(0).terms


# --------------------------------------------------------------------------------------------------------------- NCR


class TwoNetworks:
    """NCR for four epochs on one batch of twelve pairs; each network embeds two captions far from their images."""

    def __init__(self):
        self.method, self.match = method_of("ncr"), torch.eye(12)
        self.embedded = [self.pairs(wrong=[0, 1], seed=0), self.pairs(wrong=[2, 3], seed=1)]

    @staticmethod
    def pairs(wrong: list[int], seed: int) -> tuple[Encoded, Encoded]:
        r = torch.Generator().manual_seed(seed)
        image = F.normalize(torch.randn(12, 32, generator=r), dim=1)
        text = F.normalize(image + 0.1 * torch.randn(12, 32, generator=r), dim=1)
        text[wrong] *= -1
        return Encoded(image, torch.zeros(12, 32)), Encoded(text, torch.zeros(12, 32))

    def step(self, epoch: int, network: int):
        rows, other = torch.arange(12), lambda: self.embedded[1 - network]
        batch = Batch(*self.embedded[network], self.match, rows, rows, epoch, 0, None, network, other)
        return self.method.loss(batch, None)

    def begin(self, epoch: int) -> None:
        for network in (0, 1):
            self.step(epoch - 1, network)
        self.method.begin_epoch(epoch)

    def say(self, network: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A network's losses and predictions: w and p of every pair."""
        similarity = cosine_similarity(*self.embedded[network])
        return clean_probability(ncr_pair_losses(similarity)).float(), ncr_predict(similarity)


@pytest.mark.parametrize(("network", "noisy"), [(0, [2, 3]), (1, [0, 1])])
def test_each_network_of_ncr_trains_the_pairs_that_the_others_losses_call_clean(network, noisy):
    """In the second half of the epochs noisy pairs too, with the mean of both predictions."""
    two = TwoNetworks()
    two.begin(1)
    out = two.step(1, network)
    kept = [i for i in range(12) if i not in noisy]  # among them those that it would itself classify as noisy
    (w, q), (_, p) = two.say(1 - network), two.say(network)
    label = w + (1 - w) * p
    similarity = cosine_similarity(*two.embedded[network])
    torch.testing.assert_close(out.loss, ncr_loss(similarity[kept][:, kept], label[kept]).loss)
    assert out.terms["clean"] == pytest.approx(10 / 12)
    two.begin(2)
    label[noisy] = ((p + q) / 2)[noisy]
    torch.testing.assert_close(two.step(2, network).loss, ncr_loss(similarity, label).loss)


# ------------------------------------------------------------------------------------------------------ autoencoders


def autoencoder(name: str, *words: str, architecture="resnet-gru-small", **more):
    """A method on a small model, in float64, and the model."""
    torch.manual_seed(0)
    cls, options = METHODS[name], configured(name, "x", "--loss.hidden=6", "--loss.word_width=5", *words).loss
    more = {"head": "mlp", "embed_dim": 4, "vocabulary": ["a", "red", "blue", "dog", "cat", "of"], **more}
    model = create_model(architecture, n_unc_layers=0, **more, **cls.model_options(options))
    method = cls(options, model, None)
    method.module.double(), method.aside.double()
    return method, model


def codes(model, epoch=1) -> Batch:
    """N pairs, of which 0 and 1 are of one image."""
    g = torch.Generator().manual_seed(3)

    def encoded(width, shift):
        codes = (torch.randn(N, 4, generator=g, dtype=torch.float64) + shift).requires_grad_()
        log_var = torch.randn(N, 4, generator=g, dtype=torch.float64) - 1
        features = torch.randn(N, width, generator=g, dtype=torch.float64)
        return Encoded(F.normalize(codes, dim=1), log_var, features=features, codes=codes)

    images, texts = encoded(model.image_tower.pooled_width, 0.5), encoded(model.text_tower.pooled_width, 0.0)
    ids = torch.tensor([0, 0, 2, 3, 4, 5])
    words = torch.randint(2, 8, (N, 16), generator=g).masked_fill(torch.arange(16) >= torch.arange(2, 8)[:, None], 0)
    match = (ids[:, None] == ids).double()
    return Batch(images, texts, match, ids, torch.arange(N), epoch, 0, torch.Generator().manual_seed(9), words=words)


def said(method, texts, b, model):
    """Mean negative log likelihood of the captions, with the words that the method's generator drops."""
    words = b.words[:, : int((b.words != 0).sum(1).max())]
    seen = drop_words(words, method.options.word_dropout, torch.Generator().manual_seed(9))
    decoder = method.module.decoders["text"]
    log_p = decoder.out(decoder.states(texts, seen)).log_softmax(-1)
    each = [-log_p[i, m, w] for i, row in enumerate(words.tolist()) for m, w in enumerate(row) if w]
    return sum(each) / N


def bce(method, codes):
    logits = method.aside.discriminator(codes)
    return F.binary_cross_entropy(logits.sigmoid(), torch.ones_like(logits))


@pytest.mark.parametrize(
    ("name", "reduce"), [("mse", "sum"), ("mmd-mse", "mean"), ("jwae-mse", "sum"), ("jwae-mh", "mean")]
)
def test_the_loss_is_what_the_paper_adds_up(name, reduce):
    """Eq. 6 sums errors over items, and the public code averages them; Eq. 7 is a mean."""
    method, model = autoencoder(name, f"--loss.reduce={reduce}")
    items = N if reduce == "sum" else 1
    b = codes(model)
    image, text = b.images.codes, b.texts.codes
    decoded = method.module.decoders["image"](image)
    of_images = sum(math.hypot(*row) for row in (b.images.features - decoded).tolist()) / N
    of_texts = said(method, text, b, model)
    errors = items * (of_images + of_texts)
    expected = {
        "mse": lambda: code_mse(image, text) + errors,
        "mmd-mse": lambda: code_mse(image, text) + errors + 0.2 * probemb.losses.jwae.mmd(image, text),
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


@pytest.mark.parametrize(("name", "supervision"), [("mmd-mse", "mse"), ("jwae-mh", "triplet")])
def test_unpaired_items_are_reconstructed_and_held_to_the_prior_but_not_matched(name, supervision):
    method, model = autoencoder(name)
    everything, n = codes(model), N - 2

    def pairs(with_unpaired=None):
        b = codes(model)
        first = {"images": b.images.each(lambda x: x[:n]), "texts": b.texts.each(lambda x: x[:n])}
        return replace(b, match=b.match[:n, :n], with_unpaired=with_unpaired, **first)

    alone, whole = (method.loss(b, model).terms for b in (replace(pairs(), words=codes(model).words[:n]), codes(model)))
    found = method.loss(pairs(everything), model).terms
    for term, value in found.items():
        close(value, (alone if term == supervision else whole)[term])
    assert not torch.allclose(found["text"], alone["text"])
    if name == "jwae-mh":
        told = method.after_step(pairs(codes(model)), model)["js"]
        close(told, autoencoder(name)[0].after_step(codes(model), model)["js"])


@pytest.fixture
def step(tensors, monkeypatch):
    """The authors' batch and modules in our method: (method, model, batch, their encoders' parameters by name)."""
    v, d = tensors("09_jwae"), {"dtype": torch.float64}
    words = ("--loss.published=true", "--loss.direction=i2t", "--loss.aggregation=mean", "--loss.image_norm=l1")
    more = {"architecture": "scan-regions-gru", "head": "average", "embed_dim": 8}
    more["vocabulary"] = [f"w{i}" for i in range(18)]
    method, model = autoencoder("jwae-scan", *words, "--loss.image_weight=0.05", **more)
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
    none = torch.zeros(4, 8, **d)
    images = Encoded(none, none, regions_NRD, torch.ones(4, 5, dtype=torch.bool), v["images"], none)
    texts = Encoded(none, none, words_NLD, mask, words_NLD, none)
    rows = torch.arange(4)
    batch = Batch(images, texts, torch.eye(4), rows, rows, 5, 0, torch.Generator(), words=v["captions"])
    unseen = (v["word_dropout_uniform"] < 0.2) & (v["captions"] >= 2)
    monkeypatch.setattr(probemb.losses.jwae, "drop_words", lambda words, rate, generator: words.masked_fill(unseen, 0))
    monkeypatch.setattr(method, "places", lambda batch: (int(v["region_index"]), int(v["word_index"])))
    return method, model, batch, own


def test_authors_step(step, tensors):
    """Every part, their sum, and the gradients of encoders, decoders, and of the discriminator that gets them too."""
    (method, model, batch, own), v = step, tensors("09_jwae")
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


def test_the_published_discriminator_keeps_all_gradients(step, tensors, monkeypatch):
    """Adam is given the sums: the encoders' of this step, its own, and those of all steps before."""
    (method, model, batch, _), v = step, tensors("09_jwae")
    monkeypatch.setattr("probemb.losses.jwae.prior_samples", lambda codes, generator: v["true_gauss"])
    method.aside_optimizer = torch.optim.SGD(method.aside.parameters(), 0.0)
    weight = method.aside.discriminator.layers[0].weight
    each = v["train_emb_grad__netD__fc1.weight"] + v["errD_grad__netD__fc1.weight"]
    for steps in (1, 2):
        method.loss(batch, model).loss.backward(retain_graph=True)
        method.after_step(batch, model)
        assert weight.grad is None
        close(method.aside.gradient_0, steps * each)


# -------------------------------------------------------------------------------------------------------------- VSRN


@pytest.mark.parametrize("name", ["vsrn", "prob-vsrn"])
def test_the_loss_is_the_triplets_and_the_captions(name):
    torch.manual_seed(0)
    options = configured(name, "x", "--loss.caption_weight=0.7", "--loss.hidden=6", "--loss.word_width=5").loss
    model = create_model("vsrn-scenes-gru", vocabulary=list(WORDS), head="clip", **METHODS[name].model_options(options))
    made = METHODS[name](options, model, None)
    made.module.double()
    g = torch.Generator().manual_seed(1)
    tokens = torch.randn(N, 6, 128, generator=g, dtype=torch.float64).requires_grad_()
    mask = torch.arange(6) < torch.tensor([6, 3, 3, 1, 6, 2])[:, None]
    image, text = (Encoded(one.mean, one.log_var.clamp(-2, 2)) for one in pairs(N))
    words = torch.randint(2, 8, (N, 5), generator=g).masked_fill(torch.arange(5) >= torch.arange(5, -1, -1)[:, None], 0)
    batch = Batch(
        image._replace(tokens=tokens, mask=mask), text, same_images(N), torch.arange(N), torch.arange(N), 1, 0, g,
        words=torch.cat([words, torch.zeros(N, 9, dtype=torch.int64)], 1),
    )  # fmt: skip
    out = made.loss(batch, model)
    decoder, said = made.module.decoders["caption"], []
    for row in range(N):  # alone, without the others' padding
        length = max(1, int((words[row] != 0).sum()))
        there = Tokens(tokens[row : row + 1, mask[row]], torch.ones(1, int(mask[row].sum()), dtype=torch.bool))
        log_p = decoder.out(decoder.states(there, words[row : row + 1, :length])).log_softmax(-1)
        said.append(-sum(log_p[0, m, w] for m, w in enumerate(words[row, :length].tolist())))
    if name == "vsrn":
        expected = triplet_loss(image.mean @ text.mean.T, same_images(N), 0.2).loss
    else:
        expected = prob_triplet_loss(image.gaussian, text.gaussian, same_images(N), "wasserstein2", 0.1, "hardest").loss
    close(out.terms["caption"], (sum(said) / N).detach())
    close(out.loss, (expected + 0.7 * sum(said) / N).detach())
    out.loss.backward()
    assert (tokens.grad.abs().sum(-1) > 0).equal(mask)
    assert all(p.grad.abs().sum() > 0 for p in made.module.parameters())
