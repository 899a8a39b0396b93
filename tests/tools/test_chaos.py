"""The command that disturbs pretraining: it knows every test that is marked so, and tells how each ended."""

import sys

import pytest

from probemb.errors import UserError
from tools.bench.chaos import FILES, TESTS, main

EXAMPLE = """
import pytest

pytestmark = pytest.mark.chaos

@pytest.mark.parametrize("x", [1, 2, 3])
def test_two_is_refused(x):
    assert x != 2

@pytest.fixture
def no_disk():
    pytest.skip("no disk")

def test_a_disk(no_disk):
    pass
"""


def test_every_marked_test_is_known():
    marked = {
        path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py") if "mark.chaos" in path.read_text()
    }
    assert marked - {"tools/test_chaos.py"} == set(FILES)


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The command's tests are those of EXAMPLE."""
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = chaos\naddopts = --import-mode=importlib")
    monkeypatch.setattr("tools.bench.chaos.TESTS", tmp_path)
    monkeypatch.setattr("tools.bench.chaos.FILES", ("test_example.py",))
    return lambda *words: (monkeypatch.setattr(sys, "argv", ["chaos", *words]), main())[1]


def test_broken_promises_and_skips_are_told(example, capsys):
    assert example() == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "│ two is refused │ 2 of 3 │ 0 │" in text
    assert "│ a disk │ 0 of 1, 1 skipped │ 0 │" in text
    assert example("--only", "a_disk") == 0
    assert "two is refused" not in capsys.readouterr().out


def test_a_word_that_no_test_has_is_refused(example):
    with pytest.raises(UserError, match=r"No test ran \(pytest ended with 5\)"):
        example("--only", "locusts")
