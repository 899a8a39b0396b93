"""open_clip's timm and ResNet towers, small: against open_clip's own, and their uncertainty branches."""

import itertools
import json

import open_clip
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from probemb import distributed
from probemb.errors import UserError
from probemb.models import create_model, create_tokenizer, load_model, save_model
from probemb.models.architectures import architecture
from probemb.models.formats import export_open_clip
from probemb.models.towers.open_clip import PatchEmbedding, SelfAttention
from tests.models.test_dual_encoder import total
from tests.ranks import run_ranks

TEXT = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
TIMM = {"timm_model_pretrained": False, "image_size": 160}
VISION = {
    "class token": {**TIMM, "timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": None},
    "attention pool": {**TIMM, "timm_model_name": "test_vit3", "timm_pool": "map", "timm_proj": "none"},
    "rotary": {**TIMM, "timm_model_name": "eva02_tiny_patch14_224", "timm_pool": "token", "image_size": 224},
    "convnext": {**TIMM, "timm_model_name": "test_convnext", "timm_pool": "", "timm_proj": "mlp"},
    "batch norm": {**TIMM, "timm_model_name": "test_efficientnet", "timm_pool": "avg", "timm_proj": None},
    "resnet": {"layers": [1, 1, 1, 1], "width": 8, "head_width": 16, "image_size": 64},
    "vit": {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32},
}


@pytest.fixture(autouse=True)
def names(tmp_path):
    for kind, vision in VISION.items():
        path = tmp_path / f"small {kind}.json"
        embed_dim = 96 if kind == "attention pool" else 16  # that one has no projection
        path.write_text(json.dumps({"embed_dim": embed_dim, "vision_cfg": vision, "text_cfg": TEXT}))
        open_clip.add_model_config(path)


def make(kind, **options):
    torch.manual_seed(0)
    return create_model(f"small {kind}", **options)


def batch(model):
    images = torch.randn(2, 3, model.image_size, model.image_size, generator=torch.Generator().manual_seed(1))
    return images, create_tokenizer(model)(["a photo of a cat", "two dogs"])


@pytest.mark.parametrize("kind", VISION)
def test_mean_equals_open_clip_bit_by_bit(kind, tmp_path):
    torch.manual_seed(0)
    stock = open_clip.create_model(f"small {kind}", force_custom_text=True, nonscalar_logit_scale=True).eval()
    with torch.no_grad():
        for module in stock.modules():  # statistics that are not those of a fresh batch norm
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 2)
    torch.save({"state_dict": {f"module.{key}": x for key, x in stock.state_dict().items()}}, tmp_path / "stock.pt")
    for options in ({"probabilistic": False}, {"n_unc_layers": (2, 1)}):
        model = make(kind, pretrained=str(tmp_path / "stock.pt"), **options).eval()
        images, tokens = batch(model)
        with torch.no_grad():
            assert torch.equal(model.encode_image(images).mean, stock.encode_image(images, normalize=True))
            assert torch.equal(model.encode_text(tokens).mean, stock.encode_text(tokens, normalize=True))
        assert torch.equal(model.logit_scale, stock.logit_scale)


RESIZED = {"class token": 224, "attention pool": 96, "rotary": 112, "convnext": 96, "resnet": 96, "vit": 64}


@pytest.mark.parametrize("kind", RESIZED)
@torch.no_grad()
def test_other_sizes_are_open_clip_s_of_the_same_weights(kind, tmp_path):
    """From its weights, from a run, and from a run of another size; and back as an export, where open_clip has one."""
    torch.manual_seed(0)
    name, size = f"small {kind}", RESIZED[kind]
    stock = open_clip.create_model(name, force_custom_text=True)
    torch.save(stock.state_dict(), tmp_path / "stock.pt")
    sizes = {"image_size": size, "context_length": 24}
    ours = create_model(name, pretrained=str(tmp_path / "stock.pt"), **sizes).eval().requires_grad_(False)
    images = torch.randn(2, 3, size, size)
    tokens = create_tokenizer(ours)(["a photo of a cat", "two dogs"])
    assert tokens.shape == (2, 24)
    save_model(create_model(name, pretrained=str(tmp_path / "stock.pt")), tmp_path / "run")
    save_model(create_model(name, pretrained=str(tmp_path / "run"), **sizes), tmp_path / "finished")
    finished = load_model(tmp_path / "finished")
    assert finished.model.image_size == size
    assert finished.model.config["preprocess"]["size"] == size
    assert finished.transforms.evaluate(Image.new("RGB", (90, 70))).shape == (3, size, size)
    assert torch.equal(finished.tokenizer(["a photo of a cat", "two dogs"]), tokens)
    again = create_model(name, pretrained=str(tmp_path / "finished"))  # keeps its sizes
    theirs = []
    if kind != "resnet":  # whose attention pooling open_clip does not resize
        forced = {"force_image_size": size, "force_context_length": 24}
        weights = str(tmp_path / "stock.pt")
        theirs.append(open_clip.create_model(name, pretrained=weights, force_custom_text=True, **forced))
    if kind in ("class token", "convnext", "resnet", "vit"):  # whose weights have no size, or one that open_clip builds
        export_open_clip(finished.model, tmp_path / "exported")
        theirs.append(open_clip.create_model(f"local-dir:{tmp_path / 'exported'}"))
    else:
        with pytest.raises(UserError, match=r"cannot be exported to open_clip: visual\.trunk\.pos_embed is of"):
            export_open_clip(finished.model, tmp_path / "exported")
    for model in theirs:
        model.eval().requires_grad_(False)
        assert torch.equal(ours.encode_image(images).mean, model.encode_image(images, normalize=True))
        assert torch.equal(ours.encode_text(tokens).mean, model.encode_text(tokens, normalize=True))
    for model in (finished.model, again.eval().requires_grad_(False)):
        assert torch.equal(ours.encode_image(images).mean, model.encode_image(images).mean)
        assert torch.equal(ours.encode_text(tokens).mean, model.encode_text(tokens).mean)


def last_trunk_output(tower, images):
    """The mean features' source, in the branch's layout: the last block's output, before any norm."""
    seen = []
    blocks = tower.layer4 if hasattr(tower, "layer4") else None
    if blocks is None:
        trunk = tower.trunk
        blocks = (trunk.blocks if hasattr(trunk, "blocks") else trunk.stages)[-1]
    handle = blocks.register_forward_hook(lambda _module, _args, output: seen.append(output))
    unc = tower.features(images)[1]
    handle.remove()
    x = seen[0]
    return x if x.ndim == 3 else x.flatten(2).transpose(1, 2), unc


@pytest.mark.parametrize(("kind", "n_unc_layers"), [*zip(list(VISION)[:-1], itertools.cycle([1, 2]))])
def test_the_branch_is_the_last_blocks_again(kind, n_unc_layers):
    model = make(kind, n_unc_layers=(n_unc_layers, 1)).eval()
    tower = model.visual
    images = batch(model)[0]
    trunk_output, unc = last_trunk_output(tower, images)
    assert not torch.allclose(unc.tokens, trunk_output)  # its weights are its own
    if hasattr(tower, "layer4"):
        own, blocks = tower.uncertainty_stages, [tower.layer3, tower.layer4]
    else:
        own = tower.uncertainty_blocks
        blocks = list(tower.trunk.blocks if hasattr(tower.trunk, "blocks") else tower.trunk.stages)
    for mine, block in zip(own, blocks[-n_unc_layers:], strict=True):
        mine.load_state_dict(block.state_dict())
    unc = tower.features(images)[1]
    assert torch.equal(unc.tokens, trunk_output)
    n_prefix = tower.trunk.num_prefix_tokens if kind == "attention pool" else 0  # registers, which no average has
    class_token = kind in ("class token", "rotary")
    assert_close(unc.pooled, unc.tokens[:, 0] if class_token else unc.tokens[:, n_prefix:].mean(1))


@pytest.mark.parametrize("kind", ["class token", "convnext", "resnet"])
def test_recomputed_blocks_change_nothing(kind):
    plain, recomputed = make(kind), make(kind, grad_checkpointing=True)
    for model in (plain, recomputed):
        total(model(*batch(model))).backward()
    for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert a.grad is b.grad is None or torch.equal(a.grad, b.grad)


BATCH_NORMS = pytest.mark.parametrize("kind", ["batch norm", "resnet"])


@BATCH_NORMS
def test_batch_norms_of_pretrained_towers_use_their_stored_statistics(kind, tmp_path):
    save_model(make(kind), tmp_path / "model")
    model = make(kind, pretrained=str(tmp_path / "model")).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    images = batch(model)[0]
    both = model.encode_image(images)
    assert_close(model.encode_image(images[:1]).log_var, both.log_var[:1])
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


@BATCH_NORMS
def test_batch_norms_of_random_towers_normalise_by_the_batch(kind):
    """As torch's own batch norm in training: embeddings, gradients and stored statistics."""
    torch.manual_seed(0)
    stock = open_clip.create_model(f"small {kind}", force_custom_text=True).train()
    model = make(kind, probabilistic=False)
    model.visual.load_state_dict(stock.visual.state_dict())
    images = torch.randn(6, 3, model.image_size, model.image_size)
    for _ in range(2):
        ours, theirs = model.encode_image(images).mean, stock.encode_image(images, normalize=True)
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        for out in (ours, theirs):
            out[:, 0].sum().backward()
    expected = dict(stock.visual.named_parameters())
    for name, parameter in model.visual.named_parameters():
        assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-4)
    for name, buffer in model.visual.named_buffers():
        assert_close(buffer, stock.visual.get_buffer(name), rtol=1e-4, atol=1e-5)
    assert_close(model.eval().encode_image(images).mean, stock.eval().encode_image(images, normalize=True))


def normalised(rank, world, share):
    """Means, gradients and stored statistics of 8 images, of which the first rank has `share`."""
    model, g = make("resnet", probabilistic=False).double(), torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, 64, 64, generator=g, dtype=torch.float64)
    means = model.encode_image(images[:share] if rank == 0 else images[share:]).mean
    (means[:, 0] * means[:, 1]).sum().backward()
    gradients = [p.grad for p in model.visual.parameters()]
    if world > 1:
        for gradient in gradients:
            torch.distributed.all_reduce(gradient)
    rows = [torch.from_numpy(rows) for rows in distributed.all_of(means.detach().numpy())]
    return [x.numpy() for x in (torch.cat(rows), *gradients, *model.visual.buffers())]


def test_batch_norms_of_two_ranks_equal_those_of_one_process():
    (expected,) = run_ranks(1, normalised, 8)
    for found in run_ranks(2, normalised, 3):  # composed queries have different numbers of images on each rank
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("head", ["gpo", "pie"])
def test_padding_of_siglip_takes_no_part_in_a_head(monkeypatch, head):
    """Its tokenizer pads with 1, which open_clip's configuration does not say."""
    config = architecture("ViT-B-16-SigLIP")
    config["vision_cfg"] = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
    config["text_cfg"] |= {"width": 64, "heads": 1, "layers": 1, "vocab_size": 100}
    monkeypatch.setattr("probemb.models.create.architecture", lambda *_: config)
    model = create_model("ViT-B-16-SigLIP", head=head, embed_dim=8)
    tokens = torch.ones(2, 64, dtype=torch.int64)
    tokens[0, :4] = torch.tensor([5, 6, 7, 8])
    assert model.text.text_mask(tokens).sum(1).tolist() == [4, 1]  # an empty text has its first token
    with torch.no_grad():
        assert model.encode_text(tokens).mean.norm(dim=1).tolist() == pytest.approx([1, 1])


def test_gpus_ways_give_the_same():
    """What runs on a GPU alone: the patches as a product, and attention without copies and masks."""
    g = torch.Generator().manual_seed(1)
    conv = PatchEmbedding(3, 8, (4, 2), (4, 2))
    pixels = torch.randn(2, 3, 14, 9, generator=g)
    assert_close(conv.product(pixels), conv(pixels))
    attention, x = SelfAttention(8, 2, batch_first=True), torch.randn(3, 5, 8, generator=g)
    causal = torch.full((5, 5), -torch.inf).triu(1)
    own = causal.repeat(6, 1, 1).masked_fill(torch.rand(6, 1, 5, generator=g) < 0.3, -torch.inf)
    own[:, :, 0] = 0
    for mask in (None, causal, own):
        assert_close(attention.fused(x, mask), attention(x, x, x, attn_mask=mask)[0])
