"""The authors' published ProLIP weights: outputs for given weights, and where their files lie."""

import json

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.testing import assert_close

from probemb.errors import UserError
from probemb.models import DualEncoder, import_prolip, load_model, save_model


def tensors(arrays, prefix):
    return {key.removeprefix(prefix): torch.as_tensor(value) for key, value in arrays.items() if key.startswith(prefix)}


def prolip(parity):
    arrays = parity("06c_prolip_tiny")
    return arrays, import_prolip(tensors(arrays, "sd__"), json.loads(str(arrays["config_json"]))).eval()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_prolip_layout(parity, dtype, tolerance):
    """[UNC] and its position are added when they are imported, so in float32, also for the outputs in float64."""
    arrays, model = prolip(parity)
    model = model.to(dtype)
    images, tokens = torch.as_tensor(arrays["images"]).to(dtype), torch.as_tensor(arrays["tokens"])
    kept = torch.as_tensor(arrays["masked_kept_patch_indices"]).expand(len(images), -1)
    with torch.no_grad():
        out, masked = model(images, tokens), model.encode_image(images, kept=kept)
    name = "f64__" if dtype == torch.float64 else "f32__"
    for found, part in (
        (out.image.mean, "image_features__mean"),
        (out.image.log_var, "image_features__std"),
        (out.text.mean, "text_features__mean"),
        (out.text.log_var, "text_features__std"),
        (masked.mean, "masked_image_mean"),
        (masked.log_var, "masked_image_std"),
        (out.logit_scale[0], "logit_scale"),
        (model.logit_bias[0], "logit_bias"),
    ):
        expected = torch.as_tensor(arrays[f"{name}{part}"]).to(dtype)
        assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text, part=part: f"{part}: {text}")


def test_prolip_folder_is_loaded_and_saved_again(parity, tmp_path, monkeypatch):
    arrays, model = prolip(parity)
    save_file({k: v.contiguous() for k, v in tensors(arrays, "sd__").items()}, tmp_path / "model.safetensors")
    config = json.loads(str(arrays["config_json"]))
    config["text_cfg"]["hf_tokenizer_name"] = "nobody/has-it"
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="put them into the model's folder"):
        load_model(tmp_path)
    words = {"<unk>": 0, "</s>": 1, "red": 2, "dog": 3}
    Tokenizer(WordLevel(words, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    loaded = load_model(tmp_path)
    assert loaded.tokenizer(["dog"]).tolist() == [[3] + 9 * [1]]
    tokens = torch.as_tensor(arrays["tokens"])
    assert_close(loaded.model.encode_text(tokens).log_var, model.encode_text(tokens).log_var)
    save_model(loaded.model, tmp_path / "again")
    again = DualEncoder(json.loads((tmp_path / "again" / "config.json").read_text()))
    again.load_state_dict(load_file(tmp_path / "again" / "model.safetensors"))
    assert_close(again.eval().encode_text(tokens).mean, model.encode_text(tokens).mean)
