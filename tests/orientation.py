"""Pictures as cameras store them: on their side or mirrored, with an EXIF orientation that puts them right."""

from PIL import Image
from PIL.Image import Transpose as Turn

from tests.world import encode

# Orientation -> the way from the upright picture to the stored one. Viewers go the other way (EXIF 2.32, table 6).
STORED = {
    1: None,
    2: Turn.FLIP_LEFT_RIGHT,
    3: Turn.ROTATE_180,
    4: Turn.FLIP_TOP_BOTTOM,
    5: Turn.TRANSPOSE,
    6: Turn.ROTATE_90,
    7: Turn.TRANSVERSE,
    8: Turn.ROTATE_270,
}


def upright(size=(64, 48)):
    """Four different corners, in blocks of 8, which JPEG keeps nearly as they are."""
    image = Image.new("RGB", size, (128, 128, 128))
    half = size[0] // 16 * 8, size[1] // 16 * 8
    for place, colour in {(0, 0): "red", (half[0], 0): "lime", (0, half[1]): "blue"}.items():
        image.paste(colour, (*place, place[0] + half[0], place[1] + half[1]))
    return image


def stored(image, orientation, form="JPEG"):
    """The encoded picture that viewers show as `image`."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    way = STORED[orientation]
    turned = image if way is None else image.transpose(way)
    options = {"quality": 95, "subsampling": 0} if form == "JPEG" else {"lossless": True} if form == "WEBP" else {}
    return encode(turned, form, exif=exif, **options)
