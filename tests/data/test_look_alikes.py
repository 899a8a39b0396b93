"""Pictures that occur twice: found when they are saved anew, and not confused with other pictures."""

import pytest
import torch
from PIL import Image

from probemb.data.labelled import find_images
from probemb.data.look_alikes import ALIKE, MAX_SHARE, describe, leave_out, same_picture, seen_in
from probemb.errors import UserError
from tests.orientation import stored
from tests.world import encode, save
from tests.world import photograph as drawn
from tools.make_scenes.drawing import render
from tools.make_scenes.world import scene


def photograph(seed):
    return drawn(160, 120, seed)


AGAIN = {
    "png": lambda image: encode(image, "PNG"),
    "webp": lambda image: encode(image, "WEBP", quality=50),
    "jpeg": lambda image: encode(image, "JPEG", quality=30),
    "smaller": lambda image: encode(image.resize((80, 60), Image.BICUBIC), "JPEG", quality=85),
    "larger": lambda image: encode(image.resize((1280, 960), Image.BICUBIC), "JPEG", quality=85),
    "turned": lambda image: stored(image, 6),
    "grey": lambda image: encode(image.convert("L").convert("RGB"), "PNG"),
}


def folder(path, files):
    for name, data in files.items():
        save(path / f"{name}.jpg", data)
    return find_images(path.parent)


@pytest.mark.parametrize("way", AGAIN)
def test_a_picture_that_is_saved_anew_is_found(way, tmp_path):
    these = folder(tmp_path / "a" / "x", {f"{i}": AGAIN[way](photograph(i)) for i in range(6)})
    those = folder(tmp_path / "b" / "x", {f"{i}": encode(photograph(i), quality=92) for i in (1, 4, 9, 10)})
    assert seen_in(these, those) == ([] if way == "grey" else [1, 4])  # another picture: its colours are gone


def test_distinct_pictures_are_told_apart():
    for pictures in ([photograph(i) for i in range(300)], [render(scene("val", i), 64) for i in range(300)]):
        all_of_them = torch.stack([describe(picture) for picture in pictures])
        apart = (all_of_them[:, None] - all_of_them).square().sum(-1) + torch.eye(300)
        assert apart.min() > ALIKE


def test_groups_are_those_of_a_plain_search(tmp_path):
    files = {f"{i:02d}": encode(photograph(i)) for i in range(12)}
    files |= {"a": AGAIN["png"](photograph(3)), "b": AGAIN["smaller"](photograph(3)), "c": AGAIN["webp"](photograph(7))}
    images = folder(tmp_path / "x" / "y", files | {"broken": b"no image"})
    names = [place.name.split("/")[-1] for place in images.places]
    groups = [names[leader] for leader in same_picture(images)]
    same = {"a.jpg": "03.jpg", "b.jpg": "03.jpg", "c.jpg": "07.jpg"}
    assert groups == [same.get(name, name) for name in names]


def test_a_few_are_left_out_and_many_are_refused(tmp_path):
    evaluated = folder(tmp_path / "a" / "x", {f"{i}": encode(photograph(i)) for i in range(3)})
    files = {f"{i:02d}": encode(photograph(i), "PNG") for i in range(2, 42)}
    rows, told = leave_out(folder(tmp_path / "b" / "x", files), evaluated)
    assert rows == list(range(1, 40))
    assert "1 of the 40 images in" in told
    assert "(2.5%) show the same pictures as evaluated images (such as x/02.jpg)" in told
    assert leave_out(evaluated, folder(tmp_path / "c" / "x", {"z": encode(photograph(99), "PNG")})) == ([0, 1, 2], "")
    few = folder(tmp_path / "d" / "x", {name: files[name] for name in ("02", "03")})
    assert MAX_SHARE < 0.5
    with pytest.raises(UserError, match=r"1 of the 2 images in .* \(50\.0%\) show the same pictures as evaluated"):
        leave_out(few, evaluated)
