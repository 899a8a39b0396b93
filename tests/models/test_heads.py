"""Heads and the shapes of covariances: against the authors' numbers and direct computations."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from probemb.models import create_model
from probemb.models.encoder import l2_normalize
from probemb.models.heads import (
    GPO,
    HEADS,
    AverageHead,
    Features,
    PIEHead,
    TokenAttention,
    length_mask,
    positional_codes,
    shape_log_var,
    size_augment_mask,
)
from probemb.models.options import ModelOptions
from probemb.models.towers.words import WordGRU

NAMES = {"w_1": "hidden", "w_2": "scores", "fc2": "project", "layer_norm": "norm"}
NAMES |= {"attention.w_1": "attention.hidden", "attention.w_2": "attention.scores"}


def state_of(arrays, case):
    """The authors' parameters under our names; those of a GRU of their text head are left out."""
    prefix, state = f"{case}__param__", {}
    for key, value in arrays.items():
        if key.startswith(prefix) and ".rnn" not in key and "__rnn" not in key:
            name, _, what = key.removeprefix(prefix).rpartition(".")
            state[f"{NAMES.get(name, name)}.{what}"] = torch.as_tensor(value)
    return state


def features_of(arrays, masked=False, pooled="heads_pooled"):
    mask = ~torch.as_tensor(arrays["heads_pad_mask"]) if masked else None
    return Features(torch.as_tensor(arrays["heads_x"]), torch.as_tensor(arrays[pooled]), mask)


@pytest.mark.parametrize("case", ["mhsa1", "mhsa3_masked"])
def test_attention(parity, case):
    arrays = parity("04c_pcme_heads")
    state = state_of(arrays, case)
    hidden, width = state["hidden.weight"].shape
    attention = TokenAttention(width, len(state["scores.weight"]), hidden).double()
    attention.load_state_dict(state)
    features = features_of(arrays, not arrays[f"{case}__attn"][arrays["heads_pad_mask"]].any())
    expected = torch.as_tensor(arrays[f"{case}__output"])
    assert_close(attention(features.tokens, features.mask).squeeze(1), expected)
    assert_close(attention.weights(features.tokens, features.mask), torch.as_tensor(arrays[f"{case}__attn"]))


def head_of(state, n_embeddings, project=True, log_var=False):
    embed_dim, width = state["fc.weight"].shape
    sizes = {"hidden_dim": len(state["attention.hidden.weight"]), "project": project}
    options = ModelOptions(head="pie", embed_dim=embed_dim, n_embeddings=n_embeddings, pooling=sizes)
    head = PIEHead(options, width, width if project else embed_dim, log_var).double()
    head.load_state_dict(state)
    return head


@pytest.mark.parametrize("case", ["pie1", "pie1_masked", "pie3"])
def test_mean(parity, case):
    """The authors project the pooled features outside of the head."""
    arrays = parity("04c_pcme_heads")
    state = state_of(arrays, case)
    head = head_of(state, len(state["attention.scores.weight"]), project=False)
    masked = not arrays[f"{case}__attn"][arrays["heads_pad_mask"]].any()
    out, residual = head.with_residuals(features_of(arrays, masked, "heads_out"))
    assert_close(out, torch.as_tensor(arrays[f"{case}__out"]))
    assert_close(residual.reshape(arrays[f"{case}__residual"].shape), torch.as_tensor(arrays[f"{case}__residual"]))


def gru_state(arrays, prefix):
    """The authors' bidirectional GRU under the names of our layer."""
    state = {}
    for key in (key for key in arrays if key.startswith(prefix)):
        name = key.removeprefix(prefix)
        way = "backwards" if name.endswith("_reverse") else "forwards"
        state[f"{way}.{name.removesuffix('_reverse')}"] = torch.as_tensor(arrays[key])
    return state


def renamed(arrays, net, case):
    """The parameters of a net inside one of the authors' encoders, as those of a case of its own."""
    old = f"{case}__param__{net}."
    return {f"net__param__{key.removeprefix(old)}": arrays[key] for key in arrays if key.startswith(old)}


def check_encoder(arrays, case, mean_head, unc_head, mean_features, unc_features):
    """Mean, log sigma, samples, and what lies between, of one of the authors' encoders."""
    expected = {key.removeprefix(f"{case}__"): torch.as_tensor(arrays[key]) for key in arrays if key.startswith(case)}
    mean = torch.nn.functional.normalize(mean_head(mean_features), dim=-1)
    log_sigma = unc_head(unc_features)
    assert_close(mean, expected["mean"])
    assert_close(log_sigma, expected["logsigma"])
    assert_close(mean[:, None] + log_sigma.exp()[:, None] * expected["eps"], expected["embedding"])
    tokens, mask = mean_features.tokens, mean_features.mask
    assert_close(mean_head.attention.weights(tokens, mask), expected["attention"])
    assert_close(unc_head.attention.weights(tokens, mask), expected["uncertainty_attention"])
    assert_close(mean_head.fc(mean_head.attention(tokens, mask)).sigmoid().squeeze(1), expected["residual"])


def test_image_encoder(parity):
    arrays = parity("04c_pcme_heads")
    tokens = torch.as_tensor(arrays["img_enc__feature_map"]).flatten(2).transpose(1, 2)
    features = Features(tokens, tokens.mean(1))
    fc = {f"project.{what}": torch.as_tensor(arrays[f"img_enc__param__fc.{what}"]) for what in ("weight", "bias")}
    mean = head_of({**state_of(renamed(arrays, "pie_net", "img_enc"), "net"), **fc}, 1)
    unc = head_of(state_of(renamed(arrays, "uncertain_net", "img_enc"), "net"), 1, log_var=True)
    check_encoder(arrays, "img_enc", mean, unc, features, features)


def test_text_encoder(parity):
    """The whole text tower: word embeddings are the heads' tokens, and the log-variance has a GRU of its own."""
    arrays = parity("04c_pcme_heads")
    tokens = torch.as_tensor(arrays["txt_enc__tokens"])
    assert torch.equal((tokens != 0).sum(1), torch.as_tensor(arrays["txt_enc__lengths"]))
    embedding = torch.as_tensor(arrays["txt_enc__param__embed.weight"])
    mean, unc = (state_of(renamed(arrays, net, "txt_enc"), "net") for net in ("pie_net", "uncertain_net"))
    options = ModelOptions(head="pie", embed_dim=len(mean["fc.weight"]))
    words = [f"word{i}" for i in range(len(embedding) - 2)]
    shape = {"width": embedding.shape[1], "hidden": options.embed_dim // 2, "pooling": "last-word", "tokens": "words"}
    tower = WordGRU(words, options, 1, **shape, head_options={"pie": {"project": False}}).double()
    state = {"embedding.weight": embedding}
    state |= {f"layers.0.{k}": v for k, v in gru_state(arrays, "txt_enc__param__rnn.").items()}
    state |= {f"branch.0.{k}": v for k, v in gru_state(arrays, "txt_enc__param__uncertain_net.rnn.").items()}
    state |= {f"mean_head.{k}": v for k, v in mean.items()} | {f"log_var_head.{k}": v for k, v in unc.items()}
    tower.load_state_dict(state)
    check_encoder(arrays, "txt_enc", tower.mean_head, tower.log_var_head, *tower.features(tokens))
    assert_close(tower(tokens).mean, torch.as_tensor(arrays["txt_enc__mean"]), atol=1e-7, rtol=0)  # norm + 1e-8


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


def reference(parity, config, dtype):
    arrays = parity("03_gpo_pooling")
    take = {key.removeprefix(f"{config}__"): torch.as_tensor(value) for key, value in arrays.items()}
    state = {key.removeprefix("param__"): value for key, value in take.items() if key.startswith("param__")}
    hidden_dim, code_dim = state["gru.weight_hh_l0"].shape[1], state["gru.weight_ih_l0"].shape[1]
    gpo = GPO(code_dim, hidden_dim)
    gpo.load_state_dict(state)
    prefix = "f64__" if dtype == torch.float64 else "f32__"
    return gpo.to(dtype), take, {k.removeprefix(prefix): v for k, v in take.items() if k.startswith(prefix)}


@pytest.mark.parametrize("config", ["a", "b"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parity(parity, config, dtype):
    gpo, given, expected = reference(parity, config, dtype)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    features = given["features"].to(dtype).requires_grad_()
    pooled = gpo(features, length_mask(given["lengths"], features.shape[1]))
    (pooled * given["grad_output"]).sum().backward()
    assert_close(pooled, expected["pooled"], **tolerance)
    assert_close(l2_normalize(pooled), expected["l2norm_pooled"], **tolerance)
    assert_close(features.grad, expected["grad_features"], **tolerance)
    assert_close(positional_codes(*expected["pe"].shape), expected["pe"].float(), rtol=0, atol=0)
    lengths = given["lengths"].sort(descending=True)
    weights = gpo.weights(lengths.values.tolist())
    assert_close(weights, expected["pool_weights"][lengths.indices].squeeze(-1), **tolerance)
    for name, parameter in gpo.named_parameters():
        if f"grad__{name}" in expected:  # stored for float64; the large ones rounded to float32
            gradient = expected[f"grad__{name}"]
            rounding = 1e-6 if gradient.dtype == torch.float32 else TOLERANCE[dtype]
            assert_close(parameter.grad, gradient.to(dtype), rtol=rounding, atol=rounding)


def test_an_item_without_tokens_pools_to_zero_with_finite_gradients():
    gpo = GPO(8, 8)
    features = torch.randn(2, 5, 3, requires_grad=True)
    pooled = gpo(features, torch.tensor([[True] * 5, [False] * 5]))
    pooled.sum().backward()
    assert (pooled[1] == 0).all()
    assert torch.isfinite(features.grad).all()


def test_size_augment_drops_the_stated_share_and_repeats_from_its_seed():
    masks = [size_augment_mask(4000, 50, 0.2, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*masks)
    whole = masks[0].all(1)
    # p > 0.2 drops each token with probability 0.2·p; p averages 0.6 there. A few such images also stay whole.
    assert 0.2 < whole.float().mean() < 0.25
    assert masks[0][~whole].logical_not().float().mean().item() == pytest.approx(0.2 * 0.6, abs=0.01)


def test_the_average_is_of_the_tokens_that_exist():
    tokens = torch.randn(2, 3, 4)
    head = AverageHead(ModelOptions(head="average", embed_dim=4), 4, 9)
    assert not list(head.parameters())
    found = head(Features(tokens, tokens[:, 0], torch.tensor([[True, True, False], [True, False, False]])))
    torch.testing.assert_close(found, torch.stack([tokens[0, :2].mean(0), tokens[1, 0]]))
    torch.testing.assert_close(head(Features(tokens, tokens[:, 0])), tokens.mean(1))
    assert torch.equal(head.embed_tokens(tokens), tokens)


BOUNDS = (math.log(0.1), math.log(10))


def test_the_shapes_against_their_definition():
    predicted = torch.randn(5, 6, dtype=torch.float64) * 3
    shape = predicted.shape

    def shaped(kind, bounds=None, predicted=predicted, shape=shape):
        return shape_log_var(ModelOptions(covariance=kind, log_var_range=bounds), predicted, shape)

    assert torch.equal(shaped("ellipsoidal"), predicted)
    bounded = shaped("ellipsoidal", BOUNDS)
    torch.testing.assert_close(bounded.exp(), predicted.exp().clamp(0.1, 10))
    mean = shaped("spherical-mean", BOUNDS)
    torch.testing.assert_close(mean.exp(), predicted.exp().clamp(0.1, 10).mean(1, keepdim=True).expand(shape))
    one = shaped("spherical", BOUNDS, predicted[:, :1])
    assert torch.equal(one, predicted[:, :1].clamp(*BOUNDS).expand(shape))
    several = shaped("spherical-mean", None, predicted.view(5, 2, 3), torch.Size((5, 2, 3)))
    torch.testing.assert_close(several.exp()[..., 0], predicted.view(5, 2, 3).exp().mean(2))


@pytest.mark.parametrize(
    ("head", "kind"), [*zip(HEADS, itertools.cycle(("ellipsoidal", "spherical-mean", "spherical")))]
)
def test_every_head_with_a_covariance(head, kind):
    torch.manual_seed(0)
    model = create_model("ViT-Micro-32", head=head, embed_dim=16, covariance=kind, log_var_range=BOUNDS)
    gaussian = model.encode_image(torch.randn(3, 3, 32, 32))
    assert gaussian.log_var.shape == (3, 16)
    assert gaussian.log_var.abs().max() < 1.5  # from 0, the middle of the bounds, which leave -log 16 out
    assert (gaussian.log_var != gaussian.log_var[:, :1]).any() == (kind == "ellipsoidal")
    gaussian.log_var.square().sum().backward()
    assert all(p.grad is not None for p in model.visual.log_var_head.parameters())


@pytest.mark.parametrize("name", ["gpo", "pie"])
@pytest.mark.parametrize("log_var", [False, True])
def test_heads_under_autocast_are_finer_than_bf16(name, log_var):
    """Which has steps of 0.03 near a log-variance of -6."""
    torch.manual_seed(0)
    head = HEADS[name](ModelOptions(head=name, embed_dim=64, log_var_start=-6.0), 128, 128, log_var)
    tokens = torch.randn(16, 50, 128).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = head(Features(tokens, tokens[:, 0]))
    expected = head(Features(tokens.float(), tokens[:, 0].float()))
    assert found.dtype == torch.float32
    assert_close(found, expected, rtol=0, atol=2e-3)
