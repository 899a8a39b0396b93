"""python -m finetune.adapt: any dual encoder becomes a model with an uncertainty."""

import json

import open_clip
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from finetune.adapt import main as adapt
from probemb.adapters import prob_cosine
from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from probemb.evaluation.confidence import Task, unlabelled_confidences
from probemb.models import DualEncoder, create_model, last_layer, last_projection, load_model
from probemb.search.embeddings import open_embeddings
from tools.embed import main as embed

NAME = "ViT-Micro-32"
NAMES = ("blue", "green", "red", "white")
METHODS = {
    "gaussian": ["--clip", "0.5"], "loss-order": [], "asymvlm": ["--loss", "von-mises-fisher"], "probvlm": [],
    "laplace": ["--exact"],
}  # fmt: skip


@pytest.fixture(scope="module")
def embedded(tmp_path_factory, captioned):
    """A checkpoint as open_clip's trainer writes them, and embeddings of images listed in a CSV with it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("clip")
    state = {f"module.{key}": value for key, value in open_clip.create_model(NAME).state_dict().items()}
    torch.save({"epoch": 1, "name": "x", "state_dict": state, "optimizer": {}}, folder / "epoch_1.pt")
    data, rows = find_captions(captioned), ["filepath\ttitle"]
    (folder / "photos").mkdir()
    for i, texts in enumerate(data.captions):
        data.images.open(i).save(folder / f"photos/{i}.png")
        rows += [f"{folder}/photos/{i}.png\t{text}" for text in texts]
    (folder / "captions.csv").write_text("\n".join(rows))
    words = ["--model", NAME, "--pretrained", folder / "epoch_1.pt", "--data", folder, "--inputs"]
    assert embed([*map(str, words), "--out", str(folder / "x"), "--mean-dtype", "float32"]) == 0
    return folder


def test_a_csv_is_embedded_with_open_clips_checkpoint(embedded, captioned):
    theirs = open_clip.create_model(NAME, pretrained=str(embedded / "epoch_1.pt")).eval()
    data, folder = find_captions(captioned), open_embeddings(embedded / "x")
    images, texts = (folder.partitions(kind)[0] for kind in ("image", "text"))
    model, tokenizer, transforms = load_model(folder.model)
    pixels = torch.stack([transforms.evaluate(data.images.open(i)) for i in range(len(data))])
    with torch.no_grad():
        expected = theirs.encode_image(model.normalized(pixels), normalize=True)
        words = theirs.encode_text(tokenizer(data.flat()), normalize=True)
    assert_close(torch.from_numpy(folder.read(images)[0]), expected, rtol=1e-4, atol=1e-5)
    assert_close(torch.from_numpy(folder.read(texts)[0]), words, rtol=1e-4, atol=1e-5)
    row = folder.read_items(images).to_pylist()[3]
    assert row["shard"] == str(embedded / "photos/3.png")
    assert row["captions"] == data.captions[3]


@pytest.mark.parametrize("method", METHODS)
def test_an_adapted_model_is_a_model(method, embedded, captioned, tmp_path):
    words = ["--embeddings", str(embedded / "x"), "--out", str(tmp_path / "run"), "--method", method, *METHODS[method]]
    rates = [] if method == "laplace" else ["--epochs", "3", "--batch-size", "8"]
    colours = [Image.new("RGB", (32, 32), name) for name in NAMES]
    for name, image in zip(NAMES, colours):
        (tmp_path / "classes" / name).mkdir(parents=True)
        image.save(tmp_path / "classes" / name / "0.png")
    assert adapt([*words, *rates, "--validation", "0.25", "--classes", str(tmp_path / "classes")]) == 0
    base, _, transforms = load_model(open_embeddings(embedded / "x").model)
    model, tokenizer, _ = load_model(tmp_path / "run")
    texts, pixels = tokenizer(find_captions(captioned).flat()), torch.randn(3, 3, 32, 32)
    found, frozen = model.encode_text(texts), base.encode_text(texts)
    towers = create_model(NAME, pretrained=str(tmp_path / "run"), probabilistic=False).eval()  # without the adapter
    assert_close(towers.encode_text(texts).mean, frozen.mean)
    assert model.probabilistic
    assert found.log_var.isfinite().all()
    assert found.uncertainty().unique().numel() > 20
    same = torch.cosine_similarity(found.mean, frozen.mean)
    assert (same > 1 - 1e-5).all() or method == "gaussian"
    assert (model.encode_image(pixels).log_var == -30).all() == (method == "asymvlm")
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["held_out"] == (3 if method == "gaussian" else 6)  # the other half chose a share of the residual
    assert results["before"].keys() == results["after"].keys()
    assert results["milliseconds_per_item"] > 0
    prompts, seen = (
        tokenizer([f"a photo of a {name}." for name in NAMES]),
        torch.stack([*map(transforms.evaluate, colours)]),
    )
    for when, one in (("before", base), ("after", model)):
        hit = (one.encode_image(seen).mean @ one.encode_text(prompts).mean.T).argmax(1) == torch.arange(len(NAMES))
        assert_close(results["zero_shot"][when], 100 * hit.double().mean().item())
    data, (temperature, power) = find_captions(captioned), model.adapter.temperature[1]
    images = model.encode_image(torch.stack([transforms.evaluate(data.images.open(i)) for i in range(len(data))]))
    owner, epistemic = torch.tensor(data.owner()), getattr(model.adapter.text, "epistemic", None)
    task = Task(found, images, owner, owner, 1.0, model.match_model, (temperature, power), epistemic)
    scores = unlabelled_confidences(task)
    assert ("u, epistemic" in scores) == (method == "probvlm")
    p = (task.cosine / temperature / task.u[:, None] ** power).softmax(1).amax(1)
    assert_close(scores["adapter's softmax"].values, p)
    if method == "laplace":
        raw = base.text(texts, want_features=True).codes
        norm = (raw.norm(dim=1) / found.mean.norm(dim=1)).square()  # E‖z‖²
        assert_close(found.var.sum(1) * norm + raw.square().sum(1), norm, rtol=1e-4, atol=1e-4)
        assert_close((found.mean @ found.mean.T), prob_cosine(found, found)[0], rtol=1e-4, atol=1e-4)


def test_what_cannot_be_adapted_is_refused(embedded, tmp_path):
    words = ["--embeddings", str(embedded / "x"), "--out", str(tmp_path / "run")]
    with pytest.raises(UserError, match="--exact has no effect with method gaussian"):
        adapt([*words, "--exact"])
    with pytest.raises(UserError, match="--epochs has no effect with method laplace"):
        adapt([*words, "--method", "laplace", "--epochs", "3"])
    with pytest.raises(UserError, match="loss prolip is not one of method probvlm"):
        adapt([*words, "--method", "probvlm", "--loss", "prolip"])
    with pytest.raises(UserError, match="nowhere does not exist") as caught:
        adapt([*words, "--classes", "nowhere"])
    assert "leave --classes out" in caught.value.remedy
    with pytest.raises(UserError, match="does not end in a linear layer"):
        last_projection(create_model("RN50").visual)


TIMM = {
    "siglip": {"timm_model_name": "test_vit3", "timm_pool": "map", "timm_proj": "none", "image_size": 160},
    "eva": {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": None, "image_size": 160},
    "convnext": {"timm_model_name": "test_convnext", "timm_pool": "", "timm_proj": "linear", "image_size": 160},
    "mlp": {"timm_model_name": "test_convnext", "timm_pool": "", "timm_proj": "mlp", "image_size": 160},
    "clip": {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 16, "layers": 1},
}
TIMM["max-mean"] = TIMM["clip"]


@pytest.mark.parametrize("kind", TIMM)
@torch.no_grad()
def test_embeddings_are_linear_in_the_inputs_of_the_last_projection(kind):
    text = {
        "context_length": 8,
        "vocab_size": 49408,
        "width": 32,
        "heads": 2,
        "layers": 1,
        "proj_bias": kind == "siglip",
    }
    shape = {"embed_dim": 96, "vision_cfg": TIMM[kind], "text_cfg": text}
    config = create_model(NAME, probabilistic=False).config | {"embed_dim": 96, "architecture": shape}
    config["head"] = kind if kind == "max-mean" else "clip"
    model = DualEncoder(config).eval()
    size = TIMM[kind]["image_size"]
    for tower, batch in ((model.visual, torch.randn(2, 3, size, size)), (model.text, torch.randint(1, 9, (2, 8)))):
        projection = last_projection(tower)
        before, inputs = last_layer(tower, lambda tower=tower, batch=batch, **more: tower(batch, **more))
        change = torch.randn_like(projection.weight)
        projection.weight.add_(change)
        after, _ = last_layer(tower, lambda tower=tower, batch=batch, **more: tower(batch, **more))
        assert inputs.shape[1] == change.shape[1] + (projection.bias is not None)
        assert_close(after.codes - before.codes, inputs[:, : change.shape[1]] @ change.T, rtol=1e-3, atol=1e-3)
