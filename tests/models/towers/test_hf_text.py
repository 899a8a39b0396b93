"""Text towers from Hugging Face, tiny and from local folders; skipped without the package transformers."""

import json
from importlib.util import find_spec

import pytest
import torch
from open_clip import CustomTextCLIP

from probemb.models import DualEncoder, create_model, save_model

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs the package transformers")

CONFIGS = {
    "roberta": {
        "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3,
        "max_position_embeddings": 40, "vocab_size": 50, "pad_token_id": 1,
    },
    "mt5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2, "vocab_size": 50, "pad_token_id": 0},
}  # fmt: skip


def make(kind, folder, head="clip", n_unc_layers=1):
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "dropout": 0.0, **CONFIGS[kind]}))
    torch.manual_seed(0)
    config = create_model("ViT-Micro-32", head=head, embed_dim=16, n_unc_layers=1).config
    text = {"hf_model_name": str(folder), "hf_model_pretrained": False, "hf_proj_type": "mlp", "context_length": 12}
    config["architecture"]["text_cfg"] = text | {"hf_pooler_type": "mean_pooler"}
    stock = CustomTextCLIP(**config["architecture"], nonscalar_logit_scale=True)
    return DualEncoder({**config, "n_unc_layers": [1, n_unc_layers]}, stock), stock


def texts(kind):
    tokens = torch.full((2, 12), CONFIGS[kind]["pad_token_id"])
    tokens[0, :7] = torch.arange(5, 12)
    tokens[1, :4] = torch.arange(9, 13)
    return tokens


@pytest.mark.parametrize("kind", CONFIGS)
def test_mean_equals_open_clip_and_is_where_another_run_starts(kind, tmp_path):
    model, stock = make(kind, tmp_path)
    save_model(model, tmp_path / "run")
    elsewhere = model.config["architecture"]
    elsewhere["text_cfg"]["hf_model_name"] = "nobody/nothing"  # as a name in place of the run's folder
    (tmp_path / "mine.json").write_text(json.dumps(elsewhere))
    started = create_model(str(tmp_path / "mine.json"), pretrained=tmp_path / "run", embed_dim=16, n_unc_layers=1)
    tokens = texts(kind)
    with torch.no_grad():
        for one in (model, started):
            assert torch.equal(one.eval().encode_text(tokens).mean, stock.eval().encode_text(tokens, normalize=True))


@pytest.mark.parametrize(("kind", "head"), [*zip(CONFIGS, ["clip", "gpo"])])
def test_gradient_reaches_every_parameter(kind, head, tmp_path):
    model, _ = make(kind, tmp_path, head, 2)
    gaussian = model.train().encode_text(texts(kind))
    ((gaussian.mean + gaussian.log_var) * torch.linspace(-1, 1, 16)).sum().backward()
    assert [name for name, parameter in model.text.named_parameters() if parameter.grad is None] == []
    places = {model.text.place(name) for name, _ in model.text.named_parameters()}
    assert {place.depth for place in places if place.part == "branch"} == {1, 2}
    assert {place.depth for place in places if place.part == "trunk"} == {0, 1, 2, 3}
