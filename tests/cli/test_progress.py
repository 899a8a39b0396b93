"""Progress where there is no terminal."""

import probemb.cli.progress
from probemb.cli.progress import progress


def test_lines(monkeypatch, capsys):
    monkeypatch.setattr(probemb.cli.progress, "LINE_EVERY", 0.0)
    with progress("known", 4) as advance:
        advance(4)
    with progress("unknown", 0) as advance:
        advance(4)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "known: 4 of 4, about 0 s left"
    assert lines[2] == "unknown: 4"
