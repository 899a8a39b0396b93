"""Tars and images for the tests of this folder."""

import io
import tarfile

import pytest
from PIL import Image


@pytest.fixture
def write_tar(tmp_path):
    """write_tar("a.tar", [(name, bytes), ...], format) -> path of a tar under tmp_path."""

    def write(name, members, format=tarfile.USTAR_FORMAT):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w", format=format) as tar:
            for member, data in members:
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    return write


@pytest.fixture
def encode():
    """encode("JPEG", mode="RGB", size=(8, 6), colour=..., **options) -> image bytes."""

    def make(format="JPEG", mode="RGB", size=(8, 6), colour=None, image=None, **options):
        image = image if image is not None else Image.new(mode, size, colour if colour is not None else 0)
        file = io.BytesIO()
        image.save(file, format, **options)
        return file.getvalue()

    return make
