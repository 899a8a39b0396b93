"""Features of a frozen trunk: the embeddings and gradients that pixels give, kept once, refused where wrong."""

import pytest
import torch

from finetune.feature_cache import cache_features, cache_texts
from probemb.data.captions.find import find_captions
from probemb.data.compositions.dataset import Crop
from probemb.errors import UserError
from probemb.models import create_model, create_tokenizer, create_transforms


def make(head="gpo", **options):
    torch.manual_seed(0)
    options = {"n_unc_layers": 0, "embed_dim": 24 if head == "gpo" else None, **options}
    return create_model("ViT-Micro-32", head=head, **options)


@pytest.fixture
def data(captioned):
    return find_captions(captioned, None)


def embed(model, images):
    """Rows (N, …) of pixels or features -> both tensors of the Gaussian."""
    g = model.encode_image(torch.stack(images))
    return g.mean, g.log_var


@pytest.mark.parametrize("head", ["clip", "gpo", "max-mean"])
@pytest.mark.parametrize("probabilistic", [True, False])
def test_features_of_images_and_crops_give_what_their_pixels_give(tmp_path, data, head, probabilistic):
    model = make(head, probabilistic=probabilistic)
    crops = [Crop(4, (2.0, 3.0, 20.5, 30.0)), Crop(0, (0.0, 0.0, 9.0, 9.0))]

    def some(images):
        return [*(images.open(i) for i in range(6)), *(images.part(*crop) for crop in crops)]

    expected = embed(model, list(map(create_transforms(model).evaluate, some(data.images))))
    cached = cache_features([model], data.images, tmp_path, crops=crops)
    assert len(cached.rows) == len(data.images) + 2
    for a, b in zip(embed(model, some(cached)), expected):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)  # float16


@pytest.mark.parametrize("head", ["clip", "gpo", "max-mean"])
def test_features_give_what_texts_give_also_behind_cut_padding(tmp_path, head):
    model, texts = make(head), ["a dog", "a red bird sits on a branch", "a dog", "two"]
    tokenizer = create_tokenizer(model)
    expected = model.encode_text(tokenizer(texts))
    cached = cache_texts([model], texts, tokenizer, tmp_path)
    rows = cached(texts)
    assert rows.dtype == torch.float16
    assert len(cached) == 3
    found = model.encode_text(model.cut_padding(rows))
    torch.testing.assert_close(found.mean, expected.mean, rtol=0, atol=2e-3)
    torch.testing.assert_close(found.log_var, expected.log_var, rtol=0, atol=2e-3)
    (file,) = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    assert cache_texts([make(head)], texts, tokenizer, tmp_path)(texts).equal(rows)
    assert [file] == list(tmp_path.iterdir())
    assert file.stat().st_mtime_ns == before


def test_dropout_is_of_training_alone_also_of_kept_features(tmp_path):
    model, texts = make("max-mean", dropout=0.5), ["a dog", "two"]
    rows = cache_texts([model], texts, create_tokenizer(model), tmp_path)(texts)
    trained = model.encode_text(rows).mean
    evaluated = model.eval().encode_text(rows).mean
    assert not trained.allclose(evaluated, atol=1e-2)
    assert evaluated.equal(model.encode_text(rows).mean)


def test_they_are_computed_once_and_keyed_by_weights_and_images(tmp_path, data, captioned):
    model = make()
    cache_features([model], data.images, tmp_path)
    (first,) = tmp_path.iterdir()
    before = first.stat().st_mtime_ns
    cache_features([make()], data.images, tmp_path)
    assert first.stat().st_mtime_ns == before
    with torch.no_grad():
        model.visual.mean_head.linear.weight.add_(1)  # heads do not matter
    cache_features([model], data.images, tmp_path)
    assert list(tmp_path.iterdir()) == [first]
    with torch.no_grad():
        model.visual.conv1.weight.add_(0.1)
    cache_features([model], data.images, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    for exif, resize in ((False, "pil"), (True, "pil"), (True, "tensor")):  # of another size, turned, resized otherwise
        cache_features([make(image_size=24)], find_captions(captioned, None, exif=exif).images, tmp_path, resize)
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("damage", ["zeros", "end"])
def test_a_damaged_file_is_computed_anew(damage, tmp_path, data):
    cache_features([make()], data.images, tmp_path)
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_bytes(good[:-60] + bytes(40) + good[-20:] if damage == "zeros" else good[:-20])
    cache_features([make()], data.images, tmp_path)
    assert file.read_bytes() == good


def test_what_cannot_be_cached_is_refused(tmp_path, data):
    pair = [make(), create_model("ViT-Micro-32", head="gpo", n_unc_layers=0)]
    with pytest.raises(UserError, match="different image or text towers"):
        cache_features(pair, data.images, tmp_path)
    with pytest.raises(UserError, match="blocks of its own"):
        cache_features([make(n_unc_layers=1)], data.images, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .* GB: make room"):
        cache_features([make()], data.images, tmp_path / "file")
