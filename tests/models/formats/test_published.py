"""The authors' model code (PCME++ in both head layouts, ProLIP): outputs for given weights."""

import json

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from open_clip.transform import PreprocessCfg
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.testing import assert_close

from probemb.errors import UserError
from probemb.losses import PairwiseMatchLoss
from probemb.models import DualEncoder, import_pcmepp, import_prolip, load_model, save_model
from probemb.models.dual_encoder import plain

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def tensors(arrays, prefix):
    return {key.removeprefix(prefix): torch.as_tensor(value) for key, value in arrays.items() if key.startswith(prefix)}


def check(actual, expected, dtype):
    assert_close(actual.detach(), torch.as_tensor(expected).to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def check_gaussians(arrays, prefix, dtype, **gaussians):
    """Their "std" is the log-variance; `image_features` may be called `image_mean`."""
    for name, gaussian in gaussians.items():
        mean = next(key for key in (f"{prefix}{name}_features", f"{prefix}{name}_mean") if key in arrays)
        std = next(key for key in (f"{prefix}{name}_stds", f"{prefix}{name}_std") if key in arrays)
        check(gaussian.mean, arrays[mean], dtype)
        check(gaussian.log_var, arrays[std], dtype)


def prefix_of(dtype):
    return "f64__" if dtype == torch.float64 else "f32__"


@DTYPES
@pytest.mark.parametrize("tag", ["unc1", "unc2", "quickgelu"])
def test_hub_layout(parity, tag, dtype):
    arrays = parity(f"06a_hf_pcmepp_{tag}")
    config = json.loads(str(arrays["config_json"]))
    model = import_pcmepp(tensors(arrays, "sd__"), config).to(dtype).eval()
    assert model.options.layers == (config["vision_cfg"]["unc_layers"], config["text_cfg"]["unc_layers"])
    out = model(torch.as_tensor(arrays["images"]).to(dtype), torch.as_tensor(arrays["tokens"]))
    name = prefix_of(dtype)
    check_gaussians(arrays, name, dtype, image=out.image, text=out.text)
    check(out.logit_scale, arrays[f"{name}logit_scale"].reshape(1), dtype)
    check(out.shift, arrays[f"{name}shift"], dtype)
    check(out.scale, arrays[f"{name}negative_scale"], dtype)


@pytest.mark.parametrize("tag", ["unc1", "unc2"])
def test_published_folder_is_loaded_and_saved_again(parity, tag, tmp_path):
    arrays = parity(f"06a_hf_pcmepp_{tag}")
    state = {key: x.contiguous() for key, x in tensors(arrays, "sd__").items()}
    (tmp_path / "config.json").write_text(str(arrays["config_json"]))
    if tag == "unc1":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file(state, tmp_path / "model.safetensors")
    save_model(load_model(tmp_path).model, tmp_path / "ours")
    for folder in (tmp_path, tmp_path / "ours"):
        images, tokens = torch.as_tensor(arrays["images"]).float(), torch.as_tensor(arrays["tokens"])
        out = load_model(folder).model.eval()(images, tokens)
        check_gaussians(arrays, "f32__", torch.float32, image=out.image, text=out.text)


@pytest.mark.slow
def test_hub_layout_at_full_size(parity):
    arrays = parity("06b_hf_pcmepp_fullsize_seeded")
    seed = int(arrays["seed"])
    state = seeded_weights(arrays, seed)
    model = import_pcmepp(state, json.loads(str(arrays["config_json"]))).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(x.numel() for x in state.values())
    size = (1, 3, model.image_size, model.image_size)
    image = np.random.RandomState(seed + 1).standard_normal(size).astype(np.float32)
    with torch.no_grad():
        out = model(torch.as_tensor(image), torch.as_tensor(arrays["tokens"]))
    check_gaussians(arrays, "f32__", torch.float32, image=out.image, text=out.text)
    check(out.logit_scale, arrays["f32__logit_scale"].reshape(1), torch.float32)


def seeded_weights(arrays, seed):
    """The weights of parity item 06b, drawn again from its seed, in the order of their names."""
    random = np.random.RandomState(seed)
    state = {}
    for key, shape, checksum in zip(arrays["keys"], arrays["shapes"], arrays["weight_checksum"]):
        key = str(key)
        x = random.standard_normal(json.loads(str(shape))).astype(np.float32)
        if key in ("logit_scale", "shift", "negative_scale"):
            x = 0.1 * x + np.float32({"logit_scale": 2.6593}.get(key, 5))
        elif ".ln_" in f".{key}" and key.endswith(".weight"):
            x = 1 + np.float32(0.1) * x
        else:
            x = x * np.float32(0.1 if key.endswith("bias") else 0.02)
        x = np.asarray(x, dtype=np.float32)
        assert np.abs(x.astype(np.float64)).sum() == pytest.approx(float(checksum), rel=1e-4), key
        state[key] = torch.as_tensor(x)
    return state


HEADS = {"image_encoder": "mean_head", "image_std_encoder": "log_var_head"}
HEADS |= {"linear": "mean_head.linear", "gpool": "mean_head.pool"}
HEADS |= {"std_linear": "log_var_head.linear", "std_gpool": "log_var_head.pool"}


def our_name(tower, theirs):
    """A parameter of a tower of the authors' COCO encoders -> here."""
    part, _, name = theirs.partition(".")
    if part == "backbone":
        return f"{tower}.{name}".replace("transformer.prob_resblocks", "uncertainty_transformer.resblocks")
    return f"{tower}.{HEADS[part]}.{name}".replace(".fc.", ".linear.").replace(".gpool.", ".pool.")


def coco_model(arrays):
    """The authors' COCO encoders (two state dicts, head "gpo") in this project's layout."""
    size = json.loads(str(arrays["config_json"]))
    state = {"logit_scale": torch.zeros(1), "scale": torch.full((1,), 5.0), "shift": torch.full((1,), 5.0)}
    for tower, prefix in (("visual", "img_sd__"), ("text", "txt_sd__")):
        state |= {our_name(tower, key): value for key, value in tensors(arrays, prefix).items()}
    pooling = state["visual.mean_head.pool.gru.weight_ih_l0"]
    vision = {"width": size["w"], "head_width": size["w"] // size["h"], "layers": size["L"], "patch_size": size["p"]}
    text = {"width": size["tw"], "heads": size["th"], "layers": size["tL"], "context_length": size["ctx"]}
    config = {
        "name": "coco",
        "head": "gpo",
        "embed_dim": size["E"],
        "n_unc_layers": [size["u"], size["tu"]],
        "uncertainty_bias": True,
        "pooling": {"code_dim": pooling.shape[1], "hidden_dim": pooling.shape[0] // 3},
        "architecture": {
            "embed_dim": size["E"],
            "quick_gelu": True,
            "vision_cfg": {**vision, "image_size": size["r"]},
            "text_cfg": {**text, "vocab_size": size["V"]},
        },
        "preprocess": plain(vars(PreprocessCfg(size=size["r"]))),
    }
    model = DualEncoder(config)
    model.load_state_dict(state)
    return model


@DTYPES
def test_coco_layout_loss_and_gradients(parity, dtype):
    arrays, name = parity("06e_pcmepp_coco_encoders"), prefix_of(dtype)
    model = coco_model(arrays).to(dtype).eval()
    tokens, lengths = torch.as_tensor(arrays["tokens"]), torch.as_tensor(arrays["lengths"])
    image = model.encode_image(torch.as_tensor(arrays["images"]).to(dtype))
    text = model.encode_text(tokens, torch.arange(tokens.shape[1]) < lengths[:, None])
    check_gaussians(arrays, name, dtype, image=image, text=text)
    criterion = PairwiseMatchLoss(scale=5.0, shift=5.0, distance="csd", pseudo_positive=0.1, vib=1e-4).to(dtype)
    loss = criterion(image, text).loss
    loss.backward()
    check(loss, arrays[f"{name}loss_shift5_scale5_vib1e-4_alpha0.1"], dtype)
    for theirs, ours in {
        "img.backbone.conv1.weight": model.visual.conv1.weight,
        "img.image_std_encoder.fc.weight": model.visual.log_var_head.linear.weight,
        "txt.backbone.token_embedding.weight": model.text.token_embedding.weight,
        "txt.std_linear.weight": model.text.log_var_head.linear.weight,
        "img.image_encoder.gpool.linear.weight": model.visual.mean_head.pool.linear.weight,
    }.items():
        expected = torch.as_tensor(arrays[f"f64__grad__{theirs}"])
        tolerance = 1e-9 if dtype == torch.float64 and expected.dtype == torch.float64 else 1e-5
        scale = expected.abs().max()  # against the largest entry: single entries may cancel to nothing
        assert_close(ours.grad / scale, (expected / scale).to(dtype), rtol=tolerance, atol=tolerance)


@DTYPES
def test_coco_layout_with_size_augmentation(parity, dtype):
    arrays = parity("06e_pcmepp_coco_encoders")
    model = coco_model(arrays).to(dtype)
    images = torch.as_tensor(arrays["images"]).to(dtype)
    random = np.random.RandomState(int(arrays["train_sizeaug_numpy_seed"]))
    n_tokens = len(model.visual.positional_embedding)
    mask = torch.ones(len(images), n_tokens, dtype=torch.bool)
    for row in mask:  # the authors' order of draws
        p = random.rand()
        if p > 0.2:
            row[:] = torch.as_tensor(random.rand(n_tokens) > 0.2 * p)
    name = f"{prefix_of(dtype)}train_sizeaug_"
    assert mask.sum(1).tolist() == arrays[f"{name}lengths"].tolist()
    check_gaussians(arrays, name, dtype, image=model.encode_image(images, token_mask=mask))


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
    name = prefix_of(dtype)
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
