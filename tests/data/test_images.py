"""Decoding: what colours come out of every mode, and that hostile images are refused."""

import numpy as np
import pytest
from PIL import Image

from probemb.data.failures import BadSample
from probemb.data.images import decode_image
from tests.imagesite import bomb
from tests.world import encode, picture


def pixel(data):
    image = decode_image(data)
    assert image.mode == "RGB"
    return image.getpixel((2, 2))


def test_transparency_is_laid_over_white():
    assert pixel(picture((0, 0, 0, 0), mode="RGBA")) == (255, 255, 255)
    assert pixel(picture((10, 20, 30, 255), mode="RGBA")) == (10, 20, 30)
    assert pixel(picture((0, 0), mode="LA")) == (255, 255, 255)
    half = pixel(picture((0, 0, 0, 128), 16, "WEBP", "RGBA", lossless=True))
    np.testing.assert_allclose(half, (127, 127, 127), atol=1)
    palette = Image.new("P", (8, 6), 0)
    palette.putpalette([9, 9, 9, 250, 0, 0])
    assert pixel(encode(palette, "PNG", transparency=0)) == (255, 255, 255)
    assert pixel(picture((1, 2, 3), transparency=(1, 2, 3))) == (255, 255, 255)


def test_truncated_images_are_refused():
    noise = Image.fromarray(np.random.RandomState(0).randint(0, 255, (64, 64, 3), dtype=np.uint8))
    for format in ("JPEG", "PNG", "WEBP"):
        data = encode(noise, format)
        for share in (0.0, 0.1, 0.5, 0.9):
            with pytest.raises(BadSample):
                decode_image(data[: int(len(data) * share)])


def test_a_pixel_bomb_is_refused_before_it_is_decoded():
    for width, height in [(8001, 8000), (60_000, 60_000), (2**31 - 1, 1)]:
        with pytest.raises(BadSample, match="pixels"):
            decode_image(bomb(width, height))


@pytest.mark.parametrize("format", ["BMP", "TIFF"])
def test_other_decoders_are_never_tried(format):
    with pytest.raises(BadSample):
        decode_image(picture("red", 16, format))


def with_scans(count):
    """A progressive JPEG with so many scans, the last of them repeated."""
    data = encode(Image.effect_noise((64, 64), 50), progressive=True)
    start, end = data.rindex(b"\xff\xda"), len(data) - 2
    return data[:end] + data[start:end] * (count - data.count(b"\xff\xda")) + data[end:]


def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded():
    assert decode_image(with_scans(100)).size == (64, 64)
    with pytest.raises(BadSample, match="more than 100 scans"):
        decode_image(with_scans(101))


@pytest.mark.parametrize("fill", [b"\xff", b"\xff\xfe\0\2"])
def test_a_jpeg_of_very_many_markers_is_refused_before_it_is_opened(fill):
    data = picture("red", format="JPEG")
    start = data.index(b"\xff\xda")
    assert decode_image(data[:start] + fill * 100 + data[start:]).size
    with pytest.raises(BadSample, match="1,000 markers"):
        decode_image(data[:start] + fill * 1001 + data[start:])
