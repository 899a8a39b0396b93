"""PIE-Net: against the authors' numbers, and as a head of both towers."""

import pytest
import torch
from torch.testing import assert_close

from probemb.errors import UserError
from probemb.models import create_model, load_model, save_model
from probemb.models.features import Features
from probemb.models.heads.pie import PIEHead, TokenAttention

NAMES = {
    "attention.w_1": "attention.hidden",
    "attention.w_2": "attention.scores",
    "w_1": "hidden",
    "w_2": "scores",
    "fc2": "project",
    "layer_norm": "norm",
}


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


def head_of(state, n_embeddings, **options):
    embed_dim, width = state["fc.weight"].shape
    head = PIEHead(width, width, embed_dim, n_embeddings, len(state["attention.hidden.weight"]), **options).double()
    head.load_state_dict(state)
    return head


@pytest.mark.parametrize("case", ["pie1", "pie1_masked", "pie3"])
def test_mean(parity, case):
    """The authors project the pooled features outside of the head."""
    arrays = parity("04c_pcme_heads")
    state = state_of(arrays, case)
    head = head_of(state, len(state["attention.scores.weight"]), project=False)
    masked = not arrays[f"{case}__attn"][arrays["heads_pad_mask"]].any()
    out = head(features_of(arrays, masked, "heads_out"))
    assert_close(out, torch.as_tensor(arrays[f"{case}__out"]))


def test_log_variance_of_images(parity):
    arrays = parity("04c_pcme_heads")
    head = head_of(state_of(arrays, "unc_image"), 1, norm=False)
    assert_close(head(features_of(arrays)), torch.as_tensor(arrays["unc_image__logsigma"]))


def gru_last(arrays, prefix, x, lengths):
    """Their bidirectional GRU's two last states side by side, (B, 2H)."""
    state = {key.removeprefix(prefix): torch.as_tensor(arrays[key]) for key in arrays if key.startswith(prefix)}
    hidden = state["weight_hh_l0"].shape[1]
    gru = torch.nn.GRU(x.shape[-1], hidden, batch_first=True, bidirectional=True).double()
    gru.load_state_dict(state)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    states, _ = torch.nn.utils.rnn.pad_packed_sequence(gru(packed)[0], batch_first=True, total_length=x.shape[1])
    return states[torch.arange(len(x)), lengths - 1]


def test_log_variance_of_texts(parity):
    arrays = parity("04c_pcme_heads")
    x, lengths = torch.as_tensor(arrays["heads_x"]), torch.as_tensor(arrays["heads_lengths"])
    last = gru_last(arrays, "unc_text__param__rnn.", x, lengths)
    head = head_of(state_of(arrays, "unc_text"), 1, norm=False, project=False)
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    assert_close(head(Features(x, last, mask)), torch.as_tensor(arrays["unc_text__logsigma"]))


def test_image_encoder(parity):
    arrays = parity("04c_pcme_heads")
    tokens = torch.as_tensor(arrays["img_enc__feature_map"]).flatten(2).transpose(1, 2)
    features = Features(tokens, tokens.mean(1))
    fc = {f"project.{what}": torch.as_tensor(arrays[f"img_enc__param__fc.{what}"]) for what in ("weight", "bias")}
    renamed = {
        key.replace("__pie_net.", "__").replace("img_enc", "pie"): arrays[key]
        for key in arrays
        if "img_enc__param__pie_net" in key
    }
    mean = torch.nn.functional.normalize(head_of({**state_of(renamed, "pie"), **fc}, 1)(features), dim=-1)
    renamed = {
        key.replace("__uncertain_net.", "__").replace("img_enc", "unc"): arrays[key]
        for key in arrays
        if "img_enc__param__uncertain_net" in key
    }
    log_sigma = head_of(state_of(renamed, "unc"), 1, norm=False)(features)
    assert_close(mean, torch.as_tensor(arrays["img_enc__mean"]))
    assert_close(log_sigma, torch.as_tensor(arrays["img_enc__logsigma"]))
    samples = mean[:, None] + log_sigma.exp()[:, None] * torch.as_tensor(arrays["img_enc__eps"])
    assert_close(samples, torch.as_tensor(arrays["img_enc__embedding"]))


@pytest.mark.parametrize("n_embeddings", [1, 3])
@pytest.mark.parametrize("probabilistic", [True, False])
def test_as_a_head_of_both_towers(tmp_path, n_embeddings, probabilistic):
    torch.manual_seed(0)
    model = create_model(
        "ViT-Micro-32", head="pie", embed_dim=24, n_embeddings=n_embeddings, probabilistic=probabilistic
    )
    images, tokens = torch.randn(2, 3, 32, 32), torch.tensor([[49406, 320, 49407, 0], [49406, 49407, 0, 0]])
    out = model(images, tokens)
    shape = (2, 24) if n_embeddings == 1 else (2, n_embeddings, 24)
    weight = torch.linspace(-1, 1, 24)
    total = out.logit_scale * out.scale + out.shift
    for gaussian in (out.image, out.text):
        assert gaussian.mean.shape == gaussian.log_var.shape == shape
        assert_close(gaussian.mean.norm(dim=-1), torch.ones(shape[:-1]))
        if probabilistic:
            assert_close(gaussian.uncertainty(), torch.ones(shape[:-1]), rtol=0.25, atol=0)
        total = total + ((gaussian.mean + gaussian.log_var) * weight).sum()
    total.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    model.eval()
    longer = torch.cat([tokens, torch.zeros(2, 3, dtype=torch.long)], 1)
    assert_close(model.encode_text(longer).log_var, model.encode_text(tokens).log_var)  # padding takes no part
    save_model(model, tmp_path)
    assert_close(load_model(tmp_path).model.encode_text(tokens).mean, model.encode_text(tokens).mean)


@pytest.mark.parametrize(("head", "n"), [("clip", 2), ("gpo", 3), ("pie", 0)])
def test_several_embeddings_need_a_head_that_gives_them(head, n):
    with pytest.raises(UserError, match=f"n_embeddings is {n}"):
        create_model("ViT-Micro-32", head=head, n_embeddings=n)
