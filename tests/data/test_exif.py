"""EXIF's orientation: applied where it is asked for, in all eight values, and harmless where it is damaged."""

import numpy as np
import pytest

from probemb.data.captions.find import find_captions
from probemb.data.images import decode_image
from probemb.data.labelled import find_images
from tests.orientation import stored, upright
from tests.world import save, write_tar


def away(image, other):
    """Mean difference of two images of one size, in levels."""
    assert image.size == other.size
    return np.abs(np.asarray(image, int) - np.asarray(other, int)).mean()


@pytest.mark.parametrize(("orientation", "form"), [*((one, "JPEG") for one in range(1, 9)), (6, "PNG"), (6, "WEBP")])
def test_every_orientation_decodes_to_the_upright_picture(orientation, form):
    assert away(decode_image(stored(upright(), orientation, form), exif=True), upright()) < 3


def test_drafts_speak_of_the_upright_picture():
    data, asked = stored(upright((640, 416)), 6), []

    def draft(width, height):
        asked.append((width, height))
        return 300, 100  # of the stored picture on its side this would be (100, 300)

    image = decode_image(data, draft, exif=True)
    assert asked == [(640, 416)]
    assert image.size == (320, 208)
    assert away(image, upright((320, 208))) < 3
    assert decode_image(data, 100, exif=True).size == (160, 104)


def test_listed_images_are_turned_if_asked(tmp_path):
    picture = stored(upright(), 6)
    write_tar(tmp_path / "captions" / "val.tar", [("a.jpg", picture), ("a.txt", b"four corners")])
    save(tmp_path / "classes" / "corners" / "a.jpg", picture)
    for find, where in (lambda *a, **k: find_captions(*a, **k).images, "captions"), (find_images, "classes"):
        assert find(tmp_path / where).open(0).size == (48, 64)
        assert find(tmp_path / where, exif=True).open(0).size == (64, 48)
