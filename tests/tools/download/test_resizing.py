"""Resizing of downloads: the pictures that img2dataset itself would store, and names for what is no picture."""

import io

import cv2
import numpy as np
import pytest
from PIL import Image
from tools.bench.resizing import SETTINGS, photograph, resizers

from probemb.data.images import decode_image
from tests.imagesite import picture
from tools.download.resizing import kind_of

MODES = ("keep_ratio", "keep_ratio_largest", "center_crop", "border", "no")
SIZES = ((97, 64), (64, 301), (300, 200), (321, 321), (641, 427), (256, 256))


@pytest.mark.parametrize("upscale", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_pixels_are_those_of_img2dataset(mode, upscale):
    """Its Resizer gets them as a BMP, so that both resize the same ones."""
    ours, theirs = resizers(SETTINGS | {"resize": mode, "upscale": upscale, "image_size": 100, "quality": 80})
    for size in SIZES:
        for form, colours in (("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGBA"), ("PNG", "L"), ("WEBP", "RGB")):
            data, plain = picture(size, size, form, colours), io.BytesIO()
            decode_image(data).save(plain, "BMP")
            assert ours(io.BytesIO(data)) == theirs(plain)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_the_bytes_are_those_of_img2dataset(form):
    """Also where it decodes the file itself. Decoders may differ by a level in a few pixels."""
    ours, theirs = resizers(SETTINGS)
    for size in ((400, 300), (600, 901)):
        data = photograph(*size, form)
        (mine, *about), (other, *same) = ours(io.BytesIO(data)), theirs(io.BytesIO(data))
        assert about == same
        pixels = [cv2.imdecode(np.frombuffer(one, np.uint8), cv2.IMREAD_COLOR).astype(int) for one in (mine, other)]
        assert np.abs(pixels[0] - pixels[1]).mean() < 0.05


def test_large_images_are_read_in_one_piece():
    """Pillow divides those of more than 16 MiB, 4 bytes a pixel, unless it is told."""
    ours, _ = resizers(SETTINGS | {"resize": "no"})
    colours = Image.fromarray(np.arange(27, dtype=np.uint8).reshape(3, 3, 3) * 9).resize(
        (2100, 2100), Image.Resampling.NEAREST
    )
    file = io.BytesIO()
    colours.save(file, "PNG")
    jpeg, width, height, *_ = ours(io.BytesIO(file.getvalue()))
    assert (width, height) == (2100, 2100)
    differences = np.asarray(decode_image(jpeg), np.int16) - np.asarray(colours)
    assert np.abs(differences).mean() < 3


def test_what_no_jpeg_can_hold_is_a_cause():
    """Its sides have at most 65,535 pixels, and OpenCV writes fewer."""
    ours, _ = resizers(SETTINGS | {"resize": "no"})
    file = io.BytesIO()
    Image.new("RGB", (66_000, 661)).save(file, "PNG", compress_level=1)
    *nothing, problem = ours(io.BytesIO(file.getvalue()))
    assert set(nothing) == {None}
    assert problem == "cannot be resized|no JPEG can have 66000 x 661 pixels"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty answer"),
        (b" \r\n", "empty answer"),
        (b"\xef\xbb\xbf <!DOCTYPE html><html>", "HTML, no image"),
        (picture("a", form="GIF", mode="P"), "GIF image"),
        (picture("a", form="TIFF"), "TIFF image"),
        (b"MM\0*\0\0\0\x08", "TIFF image"),
        (b"\x1f\x8b\x08\0", "gzip-encoded"),
        (picture("a")[:50], "broken image"),
        (b"not found", "no image"),
    ],
)
def test_kinds_of_answers(data, kind):
    assert kind_of(data) == kind
