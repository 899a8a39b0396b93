"""Tars and images for the tests of this folder."""

import io

import pytest
from PIL import Image

from tests import world


@pytest.fixture
def write_tar(tmp_path):
    """write_tar("a.tar", [(name, bytes), ...], format) -> path of a tar under tmp_path."""

    return lambda name, members, *format: world.write_tar(tmp_path / name, members, *format)


@pytest.fixture
def encode():
    """encode("JPEG", mode="RGB", size=(8, 6), colour=..., **options) -> image bytes."""

    def make(format="JPEG", mode="RGB", size=(8, 6), colour=None, image=None, **options):
        image = image if image is not None else Image.new(mode, size, colour if colour is not None else 0)
        file = io.BytesIO()
        image.save(file, format, **options)
        return file.getvalue()

    return make
