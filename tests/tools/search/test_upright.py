"""What is searched is what people see: photographs stored on their side are embedded, asked with and shown upright."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from probemb.models import load_model
from probemb.search.embeddings import open_embeddings
from tests.orientation import stored, upright
from tests.world import run_folder, write_tar  # noqa: F401 - a fixture
from tools.embed.command import main as embed
from tools.search.web.thumbnails import shrink
from tools.search.wish import QueryImage, check_image, decode_query

ALL = range(1, 9)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """One picture, in all eight ways to store it."""
    files = [(f"{o}.{end}", data) for o in ALL for end, data in (("jpg", stored(upright(), o)), ("txt", b"corners"))]
    return write_tar(tmp_path_factory.mktemp("data") / "00000.tar", files)


def means(out):
    embeddings = open_embeddings(out)
    (part,) = embeddings.partitions("image")
    return torch.from_numpy(embeddings.read(part)[0].astype(np.float32))


def test_all_orientations_are_embedded_alike(corpus, run_folder, tmp_path):  # noqa: F811
    model, _, transforms = load_model(run_folder)
    with torch.inference_mode():
        seen = model.encode_image(transforms.evaluate(upright())[None]).mean
        other = model.encode_image(transforms.evaluate(upright().rotate(90, expand=True))[None]).mean
    assert embed(["--model", str(run_folder), "--data", str(corpus), "--out", str(tmp_path / "out")]) == 0
    away = (means(tmp_path / "out") - seen).norm(dim=1)
    assert away.max() < 0.2 * (other - seen).norm()


def test_embeddings_of_images_as_stored_are_made_again(corpus, run_folder, tmp_path, capsys):  # noqa: F811
    argv = ["--model", str(run_folder), "--data", str(corpus), "--out", str(tmp_path / "out")]
    assert embed(argv) == 0
    good = means(tmp_path / "out")
    marker = next((tmp_path / "out" / "image").glob("*.done.json"))
    text = marker.read_text()
    assert '"exif": true, ' in text
    marker.write_text(text.replace('"exif": true, ', ""))  # as an older version wrote it
    capsys.readouterr()
    assert embed(argv) == 0
    assert "1 shards were embedded without the EXIF orientation" in capsys.readouterr().out
    assert marker.read_text() == text
    assert torch.equal(means(tmp_path / "out"), good)
    assert embed(argv) == 0
    assert "1 of 1 shards are embedded already" in capsys.readouterr().out


@pytest.mark.parametrize("orientation", ALL)
def test_an_uploaded_picture_is_asked_with_as_it_is_seen(orientation):
    query = QueryImage("upload", stored(upright(), orientation))
    check_image(query)
    assert np.abs(np.asarray(decode_query(query), int) - np.asarray(upright(), int)).mean() < 3


@pytest.mark.parametrize("orientation", ALL)
def test_pictures_of_results_are_upright(orientation):
    small = Image.open(io.BytesIO(shrink(stored(upright((640, 416)), orientation), 320)))
    assert small.size == (320, 208)
    assert not small.getexif()
    corners = [small.getpixel(place) for place in ((40, 40), (240, 40), (40, 160))]
    assert [tuple(level // 200 for level in corner) for corner in corners] == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
