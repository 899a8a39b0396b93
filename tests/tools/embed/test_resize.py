"""--resize: which pixels are embedded, in a folder, its index and its queries."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from probemb.errors import UserError
from probemb.models import load_model
from probemb.search import load_index
from probemb.search.embeddings import NAME, open_embeddings
from tests.world import run_folder, write_tar  # noqa: F401 - a fixture
from tools.build_index import main as build
from tools.embed.command import main as embed
from tools.search.command import open_searchers, parse
from tools.search.wish import QueryImage

RESIZES = ("pil", "tensor")


@pytest.fixture(scope="module")
def pictures():
    """Random black and white pixels, on which PIL and torch differ most."""
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.choice(np.array([0, 255], np.uint8), (60 + n, 45, 3))) for n in range(4)]


@pytest.fixture(scope="module")
def stored(pictures):
    found = []
    for picture in pictures:
        data = io.BytesIO()
        picture.save(data, "PNG")
        found.append(data.getvalue())
    return found


@pytest.fixture(scope="module")
def folders(stored, run_folder, tmp_path_factory):  # noqa: F811
    """The same pictures, embedded with either, and an index of each."""
    root = tmp_path_factory.mktemp("resize")
    files = [(f"{n}.{end}", part) for n, data in enumerate(stored) for end, part in (("png", data), ("txt", b"a set"))]
    write_tar(root / "data" / "00000.tar", files)
    for resize in RESIZES:
        assert embed([*command(root, run_folder, resize), "--resize", resize, "--mean-dtype", "float32"]) == 0
        out = root / f"index-{resize}"
        assert build(["--embeddings", str(root / resize), "--out", str(out), "--factory", "Flat"]) == 0
    return root


def command(root, model, out):
    return ["--model", str(model), "--data", str(root / "data"), "--out", str(root / out), "--device", "cpu"]


def means(folder):
    embeddings = open_embeddings(folder)
    return np.concatenate([embeddings.read(part)[0] for part in embeddings.partitions("image")])


def expected(run_folder, pictures, resize):  # noqa: F811
    model, _, transforms = load_model(run_folder, resize=resize)
    with torch.inference_mode():
        return torch.cat([model.encode_image(transforms.evaluate(picture)[None]).mean for picture in pictures]).numpy()


def test_the_pixels_are_those_of_load_model(folders, run_folder, pictures):  # noqa: F811
    wanted = {resize: expected(run_folder, pictures, resize) for resize in RESIZES}
    apart = np.abs(wanted["pil"] - wanted["tensor"]).max()
    assert apart > 5e-5  # rounding is a hundredth of it
    for resize in RESIZES:
        np.testing.assert_allclose(means(folders / resize), wanted[resize], atol=apart / 20)
        assert open_embeddings(folders / resize).resize == resize


def test_a_folder_keeps_its_choice(folders, run_folder, tmp_path):  # noqa: F811
    for resize, other in (RESIZES, RESIZES[::-1]):
        with pytest.raises(UserError, match=f"holds images that were resized by {resize}, not by {other}"):
            embed([*command(folders, run_folder, resize), "--resize", other])
    before = means(folders / "tensor")
    next((folders / "tensor" / "image").glob("*.done.json")).unlink()
    assert embed(command(folders, run_folder, "tensor")) == 0  # the folder's own
    np.testing.assert_array_equal(means(folders / "tensor"), before)


def test_a_folder_that_does_not_say_has_pil(folders, tmp_path):
    about = json.loads((folders / "pil" / NAME).read_text())
    assert about.pop("resize") == "pil"
    (tmp_path / NAME).write_text(json.dumps(about))
    assert open_embeddings(tmp_path).resize == "pil"
    (tmp_path / NAME).write_text(json.dumps(about | {"resize": "nearest"}))
    with pytest.raises(UserError, match="does not describe embeddings"):
        open_embeddings(tmp_path)


def test_an_index_has_one_choice(folders, tmp_path):
    both = ["--embeddings", str(folders / "pil"), str(folders / "tensor")]
    with pytest.raises(UserError, match=r"embedded with --resize pil, .* with tensor"):
        build([*both, "--out", str(tmp_path / "index"), "--factory", "Flat"])
    about = json.loads((folders / "index-pil" / "index.json").read_text())
    assert "resize" not in about  # indexes that are being built resume
    assert [load_index(folders / f"index-{resize}").resize for resize in RESIZES] == list(RESIZES)


def test_the_picture_of_a_query_is_resized_as_the_gallery(folders, run_folder, pictures, stored):  # noqa: F811
    indexes = [word for resize in RESIZES for word in ("--index", str(folders / f"index-{resize}"))]
    searchers = open_searchers(parse(["--serve", *indexes, "--device", "cpu"])).values()
    for resize, searcher in zip(RESIZES, searchers, strict=True):
        found = searcher.encoder.embed([], [QueryImage("upload", stored[0])]).mean.numpy()
        away = {one: np.abs(expected(run_folder, pictures[:1], one) - found).max() for one in RESIZES}
        assert 10 * away[resize] < max(away.values())
