"""The command that disturbs pretraining: every row names tests that exist."""

import subprocess
import sys

import pytest

from tools.bench.chaos import ROOT, ROWS, main


def test_an_unknown_row_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["chaos", "--only", "locusts"])
    with pytest.raises(Exception, match=r"No row has 'locusts' in its name\. Choose from: 20 kills, ZeRO 0; "):
        main()


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_has_tests(row):
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-m", "slow or not slow", *row.tests]
    assert subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=120).returncode == 0
