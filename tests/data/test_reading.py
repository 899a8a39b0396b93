"""The reader that all annotation files share: limits, the place of an error, names, splits and missing images."""

import gzip
import json

import pytest

from probemb.data import reading
from probemb.data.image_loader import locate
from probemb.errors import UserError
from tests.world import save


def test_texts_are_plain_or_gzipped(tmp_path):
    for content in (b'\xef\xbb\xbf["\xc3\xa9"]', gzip.compress(b'["\xc3\xa9"]')):
        assert reading.read_json(save(tmp_path / "x", content)) == ["é"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff\xfe", "is not a text in UTF-8"),
        (b"<!DOCTYPE html>", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (gzip.compress(b"[1, 2]" * 1000, mtime=0)[:-30], "cannot be read"),
    ],
)
def test_files_that_are_refused(tmp_path, content, why):
    with pytest.raises(UserError, match=why) as error:
        reading.read_json(save(tmp_path / "x", content))
    assert len(str(error.value)) < 1000


def test_large_files_are_not_unpacked(tmp_path):
    with pytest.raises(UserError, match="has more than 1 MiB"):
        reading.read_bytes(save(tmp_path / "x", gzip.compress(bytes(9 << 20))), 1 << 20)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({}, "there is no 'id'"),
        ({"id": True}, "the id is not a whole number"),
        ({"id": 2**80}, "the id is not a whole number"),
        ([], "list indices"),
        ({"id": 1, "file": "../../etc/passwd"}, r"the image '\.\./\.\./etc/passwd' does not lie in the image folder"),
        ({"id": 1, "file": "a\0b"}, ".* does not lie in the image folder"),
        ({"id": 1, "file": "C:\\x.jpg"}, ".* does not lie in the image folder"),
        ({"id": 1, "file": 5}, "the name of an image is not a text"),
    ],
)
def test_a_malformed_entry_is_named(tmp_path, row, why):
    def parse(row):
        return reading.as_id(row["id"], "the id"), reading.as_inside(row["file"])

    good = {"id": 0, "file": "a/b.jpg"}
    assert reading.parse_all("x", "a list", [good, good], parse) == [(0, "a/b.jpg")] * 2
    with pytest.raises(UserError, match=f"x is not a list: in entry 2, {why}"):
        reading.parse_all("x", "a list", [good, row], parse)
    lines = save(tmp_path / "lines", f"{json.dumps(good)}\r\n\n{json.dumps(row)}\n")
    with pytest.raises(UserError, match=f"in line 3, {why}"):
        reading.parse_lines(lines, "a list", lambda line: parse(json.loads(line)))


def test_splits_have_other_names_and_parts():
    known = ["train", "restval", "val", "test"]
    assert reading.choose_split("train", known, "x") == ("train", ("train", "restval"))
    assert reading.choose_split("dev", known, "x") == ("val", ("val",))
    assert reading.choose_split("auto", known, "x") == ("test", ("test",))
    assert reading.choose_split("auto", ["a", "test"], "x") == (None, ("a", "test"))
    with pytest.raises(UserError, match=r"no split 'tes', only a and test\. Did you mean 'test'"):
        reading.choose_split("tes", ["a", "test"], "x")


def test_images_are_found_beside_the_annotations_or_in_a_folder(tmp_path):
    save(tmp_path / "images" / "a" / "1.jpg", b"")
    both = [("a/1.jpg", "1.jpg"), ("2.jpg",)]
    with pytest.raises(UserError, match=r"1 of the 2 images of x are missing in /.*: two is one"):
        locate(both, ["one", "two"], "x", None, [tmp_path])
    save(tmp_path / "images" / "2.jpg", b"")
    for images in (None, tmp_path / "images"):
        found = locate(both, ["one", "two"], "x", images, [tmp_path])
        assert [place.file for place in found.places] == [f"{tmp_path}/images/a/1.jpg", f"{tmp_path}/images/2.jpg"]
