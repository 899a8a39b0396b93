"""Progress of a long step on a terminal and in a log."""

import io
import sys

from probemb.progress import progress


def test_a_terminal_shows_a_step_at_once_and_a_log_no_short_one(monkeypatch):
    for terminal in (True, False):
        monkeypatch.setattr(sys, "stderr", out := io.StringIO())
        out.isatty = lambda terminal=terminal: terminal
        with progress("Fetching shards", 2) as advance:
            assert ("Fetching shards:   0%" in out.getvalue()) == terminal
            advance(2)
        assert bool(out.getvalue()) == terminal
