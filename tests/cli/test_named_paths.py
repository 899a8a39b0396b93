"""Paths with names, as options take them."""

import pytest

from probemb import UserError
from probemb.cli.named_paths import named_paths, split_name


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, []),
        ([], []),
        ("data/val", [("", "data/val")]),
        (["data/val"], [("", "data/val")]),
        ("coco=data/val", [("coco", "data/val")]),
        (["data/cifar-10.v2/", "v2=b"], [("cifar-10", "data/cifar-10.v2/"), ("v2", "b")]),
        (["https://host/a b.json?key=1", "x"], [("a-b", "https://host/a b.json?key=1"), ("x", "x")]),
        ("data/split=val", [("", "data/split=val")]),
    ],
)
def test_names_of_paths(given, found):
    assert named_paths(given, "data") == found


def test_a_path_that_exists_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert split_name("split=val") == ("split", "val")
    (tmp_path / "split=val").mkdir()
    assert split_name("split=val") == ("", "split=val")


@pytest.mark.parametrize(
    ("given", "what"), [(["a/val", "b/val"], "named 'val'"), (["x=a", "x=b"], "named 'x'"), (["a", " "], "is empty")]
)
def test_names_that_do_not_fit_are_refused(given, what):
    with pytest.raises(UserError, match=what):
        named_paths(given, "data")
