"""PIE-Net: against the authors' numbers, and as a head of both towers."""

import pytest
import torch
from torch.testing import assert_close

from probemb.models.features import Features
from probemb.models.heads import HeadConfig, PIEHead
from probemb.models.pooling import TokenAttention
from probemb.models.towers.word_gru import GRUShape, WordGRU

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
    assert_close(attention.weights(features.tokens, features.mask), torch.as_tensor(arrays[f"{case}__attn"]))


def head_of(state, n_embeddings, **options):
    embed_dim, width = state["fc.weight"].shape
    pooled_width = width if options.get("project", True) else embed_dim
    hidden = len(state["attention.hidden.weight"])
    head = PIEHead(width, pooled_width, embed_dim, n_embeddings, hidden, **options).double()
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
    features = features_of(arrays, masked)
    added = head.fc(head.attention(features.tokens, features.mask)).sigmoid().squeeze(1)
    assert_close(added, torch.as_tensor(arrays[f"{case}__residual"]))


def test_log_variance_of_images(parity):
    arrays = parity("04c_pcme_heads")
    head = head_of(state_of(arrays, "unc_image"), 1, norm=False)
    features = features_of(arrays)
    assert_close(head(features), torch.as_tensor(arrays["unc_image__logsigma"]))
    assert_close(head.attention.weights(features.tokens), torch.as_tensor(arrays["unc_image__attention"]))


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


def test_log_variance_of_texts(parity):
    arrays = parity("04c_pcme_heads")
    x, lengths = torch.as_tensor(arrays["heads_x"]), torch.as_tensor(arrays["heads_lengths"])
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    state = gru_state(arrays, "unc_text__param__rnn.")
    hidden = state["forwards.weight_hh_l0"].shape[1]
    gru = WordGRU(["a"], 1, HeadConfig("clip", 2), GRUShape(x.shape[2], hidden, pooling="last-word")).double()
    gru.branch[0].load_state_dict(state)
    last = gru._run(gru.branch, x, lengths, mask).pooled
    head = head_of(state_of(arrays, "unc_text"), 1, norm=False, project=False)
    assert_close(head(Features(x, last, mask)), torch.as_tensor(arrays["unc_text__logsigma"]))
    assert_close(head.attention.weights(x, mask), torch.as_tensor(arrays["unc_text__attention"]))


def samples(mean, log_sigma, arrays, case):
    return mean[:, None] + log_sigma.exp()[:, None] * torch.as_tensor(arrays[f"{case}__eps"])


def check_encoder(arrays, case, mean_head, unc_head, mean_features, unc_features):
    """Mean, log sigma, samples, and what lies between, of one of the authors' encoders."""
    expected = {key.removeprefix(f"{case}__"): torch.as_tensor(arrays[key]) for key in arrays if key.startswith(case)}
    mean = torch.nn.functional.normalize(mean_head(mean_features), dim=-1)
    log_sigma = unc_head(unc_features)
    assert_close(mean, expected["mean"])
    assert_close(log_sigma, expected["logsigma"])
    assert_close(samples(mean, log_sigma, arrays, case), expected["embedding"])
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
    unc = head_of(state_of(renamed(arrays, "uncertain_net", "img_enc"), "net"), 1, norm=False)
    check_encoder(arrays, "img_enc", mean, unc, features, features)


def test_text_encoder(parity):
    """The whole text tower: word embeddings are the heads' tokens, and the log-variance has a GRU of its own."""
    arrays = parity("04c_pcme_heads")
    tokens = torch.as_tensor(arrays["txt_enc__tokens"])
    assert torch.equal((tokens != 0).sum(1), torch.as_tensor(arrays["txt_enc__lengths"]))
    embedding = torch.as_tensor(arrays["txt_enc__param__embed.weight"])
    mean, unc = (state_of(renamed(arrays, net, "txt_enc"), "net") for net in ("pie_net", "uncertain_net"))
    config = HeadConfig("pie", len(mean["fc.weight"]))
    shape = GRUShape(
        embedding.shape[1], config.embed_dim // 2, pooling="last-word", tokens="words",
        head_options={"pie": {"project": False}},
    )  # fmt: skip
    tower = WordGRU([f"word{i}" for i in range(len(embedding) - 2)], 1, config, shape).double()
    state = {"embedding.weight": embedding}
    state |= {f"layers.0.{k}": v for k, v in gru_state(arrays, "txt_enc__param__rnn.").items()}
    state |= {f"branch.0.{k}": v for k, v in gru_state(arrays, "txt_enc__param__uncertain_net.rnn.").items()}
    state |= {f"mean_head.{k}": v for k, v in mean.items()} | {f"log_var_head.{k}": v for k, v in unc.items()}
    tower.load_state_dict(state)
    check_encoder(arrays, "txt_enc", tower.mean_head, tower.log_var_head, *tower.features(tokens))
    assert_close(tower(tokens)[0], torch.as_tensor(arrays["txt_enc__mean"]), atol=1e-7, rtol=0)  # norm + 1e-8


def test_an_item_without_tokens_attends_to_none():
    attention, mask = TokenAttention(4, 2, 3), torch.tensor([[True, False], [False, False]])
    tokens = torch.randn(2, 2, 4)
    assert attention.weights(tokens, mask)[:, :, 0].tolist() == [[1, 0], [0, 0]]
    assert not attention(tokens, mask)[1].any()
