import pytest

from probemb.files import replace_file, replace_text


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "x.txt"
    replace_text(path, "one")

    def half(aside):
        aside.write_text("tw")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, half)
    assert path.read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]
