"""Features of a frozen trunk: the embeddings and gradients that pixels give, kept once, refused where wrong."""

import json

import pytest
import torch

from finetune.config import Config, Data
from finetune.loading.feature_cache import ABOUT, FEATURES, cache_features, unchanged
from finetune.loading.pair_loader import PairLoader
from finetune.run import find_data
from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from probemb.models import create_model, create_tokenizer, create_transforms
from tests.world import captioned  # noqa: F401 - fixture


def make(head="gpo", **options):
    torch.manual_seed(0)
    options = {"n_unc_layers": 0, "embed_dim": 24 if head == "gpo" else None, **options}
    return create_model("ViT-Micro-32", head=head, **options)


@pytest.fixture
def data(captioned):  # noqa: F811
    return find_captions(captioned, None)


def embed(model, images):
    """Rows (N, …) of pixels or features -> both tensors of the Gaussian."""
    g = model.encode_image(torch.stack(images))
    return g.mean, g.log_var


@pytest.mark.parametrize("head", ["clip", "gpo"])
@pytest.mark.parametrize("probabilistic", [True, False])
def test_features_give_what_pixels_give(tmp_path, data, head, probabilistic):
    model = make(head, probabilistic=probabilistic)
    transform = create_transforms(model).evaluate
    pixels = [transform(data.images.open(i)) for i in range(6)]
    expected = embed(model, pixels)
    cached = cache_features([model], data, tmp_path)
    found = embed(model, [unchanged(cached.images.open(i)) for i in range(6)])
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)  # float16
    assert cached.captions == data.captions


def test_features_of_turned_images_are_kept_apart(tmp_path, captioned):  # noqa: F811
    for exif in (False, True):
        data = find_data(Config(data=Data(path=str(captioned), train="val", validation=None, exif=exif)))[0]
        assert data.images.exif == exif
        cache_features([make()], data, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_features_of_another_resize_are_kept_apart(tmp_path, data):
    """And are those of the pixels that a run would read without them."""
    expected, rows = {}, {}
    for resize in ("pil", "tensor"):
        model = make(image_size=24)  # smaller than the images
        transform = create_transforms(model, resize=resize).evaluate
        expected[resize] = embed(model, [transform(data.images.open(i)) for i in range(6)])[0]
        cached = cache_features([model], data, tmp_path, resize)
        rows[resize] = torch.stack([cached.images.open(i) for i in range(6)])
        found = embed(model, list(rows[resize]))[0]
        torch.testing.assert_close(found, expected[resize], rtol=0, atol=2e-3)
    assert len(list(tmp_path.iterdir())) == 2
    assert not torch.equal(rows["pil"], rows["tensor"])


def test_gradients_of_the_heads(tmp_path, data):
    model = make()
    transform = create_transforms(model).evaluate

    def gradients(images):
        model.zero_grad()
        mean, log_var = embed(model, images)
        (mean[:, 0].sum() + log_var[:, 1].sum()).backward()
        return {name: p.grad.clone() for name, p in model.visual.named_parameters() if "_head." in name}

    expected = gradients([transform(data.images.open(i)) for i in range(4)])
    cached = cache_features([model], data, tmp_path)
    for name, gradient in gradients([cached.images.open(i) for i in range(4)]).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0.01, atol=2e-3)


def test_they_are_computed_once_and_keyed_by_weights_and_images(tmp_path, data, capsys):
    model = make()
    cache_features([model], data, tmp_path)
    (first,) = tmp_path.iterdir()
    before = (first / FEATURES).stat().st_mtime_ns
    cache_features([make()], data, tmp_path)
    assert (first / FEATURES).stat().st_mtime_ns == before
    with torch.no_grad():
        model.visual.mean_head.linear.weight.add_(1)  # heads do not matter
    cache_features([model], data, tmp_path)
    assert list(tmp_path.iterdir()) == [first]
    with torch.no_grad():
        model.visual.conv1.weight.add_(0.1)
    cache_features([model], data, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_another_run_that_computes_the_same_and_is_ended_does_no_harm(tmp_path, data, monkeypatch):
    whole, seen, opened = type(data.images).open, [], "first"

    def disturbed(images, index):
        nonlocal opened
        if opened == "second":
            raise KeyboardInterrupt
        seen.append(index)
        if len(seen) == len(data.images):
            opened = "second"
            with pytest.raises(KeyboardInterrupt):
                cache_features([make()], data, tmp_path, batch_size=1)
            opened = "first"
        return whole(images, index)

    monkeypatch.setattr(type(data.images), "open", disturbed)
    cached = cache_features([make()], data, tmp_path, batch_size=1)
    monkeypatch.undo()
    assert all(cached.images.open(i).any() for i in range(len(data.images)))
    (place,) = tmp_path.iterdir()
    assert {path.name for path in place.iterdir()} == {ABOUT, FEATURES}


def test_a_loader_serves_them(tmp_path, data):
    model = make()
    cached = cache_features([model], data, tmp_path)
    with PairLoader(cached, unchanged, create_tokenizer(model), batch_size=4, workers=1) as loader:
        batch = next(iter(loader.epoch(0)))
    assert batch.images.shape == (4, model.visual.feature_layout.width)
    assert batch.images.dtype == torch.float16
    assert torch.equal(batch.images[0], cached.images.open(int(batch.image_index[0])))


def test_what_cannot_be_cached_is_refused(tmp_path, data):
    pair = [make(), create_model("ViT-Micro-32", head="gpo", n_unc_layers=0)]
    with pytest.raises(UserError, match="different image towers"):
        cache_features(pair, data, tmp_path)
    model = make(n_unc_layers=1)
    with pytest.raises(UserError, match="blocks of its own"):
        cache_features([model], data, tmp_path)
    model = make()
    cache_features([model], data, tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / FEATURES).write_bytes(b"short")
    with pytest.raises(UserError, match="does not hold the features"):
        cache_features([make()], data, tmp_path)
    (folder / ABOUT).write_text(json.dumps({"count": "many"}))
    with pytest.raises(UserError, match="does not describe"):
        cache_features([make()], data, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be kept"):
        cache_features([make()], data, tmp_path / "file")


def test_changed_features_are_noticed_when_they_are_read(tmp_path, data):
    cache_features([make()], data, tmp_path)
    (folder,) = tmp_path.iterdir()
    with open(folder / FEATURES, "r+b") as file:
        file.write(bytes(2 * 5))
    cached = cache_features([make()], data, tmp_path)
    assert cached.images.open(1).any()
    with pytest.raises(UserError, match="have changed since they were written"):
        cached.images.open(0)
