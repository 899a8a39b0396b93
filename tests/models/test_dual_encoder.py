"""PCME++ models: against open_clip's own, and what a training run relies on."""

import open_clip
import pytest
import torch
from open_clip import CustomTextCLIP
from torch.testing import assert_close

from probemb.distances import csd
from probemb.errors import UserError
from probemb.models import POINT_LOG_VAR, DualEncoder, create_model, create_tokenizer, no_weight_decay, save_model

NAME = "ViT-Micro-32"
HEADS = pytest.mark.parametrize("head", ["clip", "gpo"])


def make(head="clip", seed=0, **options):
    torch.manual_seed(seed)
    return create_model(NAME, head=head, embed_dim=None if head == "clip" else 24, **options)


def batch(model, n=4):
    texts = ["a photo of a cat", "two dogs", "", "a large red circle left of a small blue square " * 3][:n]
    generator = torch.Generator().manual_seed(1)
    size = model.image_size
    return torch.randn(n, 3, size, size, generator=generator), create_tokenizer(model)(texts)


def total(out):
    """One number that depends on every output."""
    weight = torch.linspace(-1, 1, out.image.mean.shape[-1], dtype=out.image.mean.dtype)
    gaussians = ((g.mean * weight).sum() + (g.log_var * weight).sum() for g in (out.image, out.text))
    return sum(gaussians) + (out.logit_scale * out.scale + out.shift).sum()


@pytest.mark.parametrize(
    ("vision", "text"),
    [
        ({"pool_type": "avg", "no_ln_pre": True, "final_ln_after_pool": True}, {"no_causal_mask": True}),
        ({"ls_init_value": 0.1, "mlp_ratio": 2.0}, {"ls_init_value": 0.1, "pool_type": "eos", "eos_id": 49407}),
        ({"qk_norm": True, "scale_heads": True}, {"scale_fc": True, "scale_attn": True}),
    ],
)
def test_variants_of_open_clips_towers(vision, text):
    config = create_model(NAME).config
    config["architecture"]["vision_cfg"].update(vision)
    config["architecture"]["text_cfg"].update(text)
    torch.manual_seed(0)
    stock = CustomTextCLIP(**config["architecture"], nonscalar_logit_scale=True).eval()
    images, tokens = batch(create_model(NAME))
    with torch.no_grad():
        image, text, _ = stock(images, tokens)
    model = DualEncoder(config, stock)
    model.set_grad_checkpointing()
    out = model(images, tokens)
    assert_close(out.image.mean, image)
    assert_close(out.text.mean, text)
    total(out).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    gpo = DualEncoder({**config, "head": "gpo"})
    assert torch.isfinite(total(gpo(images, tokens)))


@HEADS
def test_log_variance_starts_at_a_summed_variance_of_one(head):
    model = make(head)
    out = model(*batch(model))
    for gaussian in (out.image, out.text):
        assert_close(gaussian.uncertainty(), torch.ones(4), rtol=0.25, atol=0)
        assert_close(gaussian.mean.norm(dim=-1), torch.ones(4))


def test_decay_is_for_matrices():
    model = make("gpo")
    free = {name for name, parameter in model.named_parameters() if no_weight_decay(name, parameter)}
    assert {"logit_scale", "scale", "shift", "visual.class_embedding", "visual.ln_pre.weight"} <= free
    assert {"visual.log_var_head.linear.bias", "text.mean_head.pool.gru.bias_ih_l0", "text.ln_final.bias"} <= free
    decayed = {name for name, _ in model.named_parameters()} - free
    assert {"text.token_embedding.weight", "visual.conv1.weight", "visual.mean_head.linear.weight"} <= decayed
    assert not any(name.endswith("bias") or "ln_" in name for name in decayed)


def test_wrong_weight_files(tmp_path):
    torch.save(open_clip.create_model(NAME), tmp_path / "pickled_module.pt")
    torch.save(open_clip.create_model("ViT-Tiny-64").state_dict(), tmp_path / "other.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "other.pt").read_bytes()[:50_000])
    (tmp_path / "garbage.safetensors").write_bytes(b"\xff" * 40)
    for file, what in {
        "pickled_module.pt": r"cannot be read as model weights \(UnpicklingError\)",
        "other.pt": "holds the weights of another model .*resblocks",
        "cut.pt": "cannot be read as model weights",
        "garbage.safetensors": r"garbage\.safetensors cannot be read",
    }.items():
        with pytest.raises(UserError, match=what) as error:
            create_model(NAME, pretrained=str(tmp_path / file))
        assert "weights_only" not in str(error.value)  # torch's advice to load it without protection


def test_raw_inputs_are_told_what_makes_them():
    model = make()
    with pytest.raises(UserError, match=r"not str.*tokenizer"):
        model.encode_text("a dog")
    with pytest.raises(UserError, match=r"not list.*transforms"):
        model.encode_image([])


@HEADS
def test_a_point_model_has_the_mean_branch_alone(head):
    model, whole = make(head, probabilistic=False), make(head, n_unc_layers=0)
    assert not model.probabilistic
    assert model.config["n_unc_layers"] == 0
    assert not any("uncertainty" in name or "log_var" in name for name, _ in model.named_parameters())
    model.load_state_dict({key: whole.state_dict()[key] for key in model.state_dict()})
    images, tokens = batch(model)
    out, reference = model(images, tokens), whole(images, tokens)
    for gaussian, other in ((out.image, reference.image), (out.text, reference.text)):
        assert torch.equal(gaussian.mean, other.mean)
        assert (gaussian.log_var == POINT_LOG_VAR).all()
        assert not gaussian.log_var.requires_grad
    similarity = (out.image.mean @ out.text.mean.T).detach()
    ranks = csd(out.image, out.text).detach().argsort(1)
    assert torch.equal(ranks, similarity.argsort(1, descending=True))
    assert_close(csd(out.image, out.text), 2 - 2 * similarity, rtol=0, atol=1e-6)
    out = make(head, probabilistic=False, grad_checkpointing=True)(images, tokens)
    assert (out.text.log_var == POINT_LOG_VAR).all()


@pytest.mark.parametrize("n_unc_layers", [1, 2])
def test_gpo_model_from_a_run_takes_trunk_mean_branch_and_fitting_uncertainty_blocks(tmp_path, caplog, n_unc_layers):
    source = make(seed=5, n_unc_layers=2)
    with torch.no_grad():
        for parameter in source.parameters():  # every number is another than in a fresh one
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    save_model(source, tmp_path / "model")
    fresh = make("gpo", n_unc_layers=n_unc_layers)
    model = make("gpo", n_unc_layers=n_unc_layers, pretrained=str(tmp_path), init_scale=5, init_shift=4)
    given, own, start = (dict(m.named_parameters()) for m in (source, model, fresh))
    copied = {name for name in own if name in given and torch.equal(own[name], given[name])}
    rest = set(own) - copied
    branch = {name for name in given if "uncertainty_transformer" in name}
    assert {"logit_scale", "visual.conv1.weight", "text.ln_final.weight", "visual.positional_embedding"} <= copied
    assert branch <= copied if n_unc_layers == 2 else not branch & copied
    assert all("_head." in name or "uncertainty" in name or name in ("scale", "shift") for name in rest)
    assert all(torch.equal(own[name], start[name]) for name in rest - {"scale", "shift"})
    assert (model.scale.item(), model.shift.item()) == (5, 4)
    assert ("2 blocks in its uncertainty branch, this model has 1" in caplog.text) == (n_unc_layers == 1)
