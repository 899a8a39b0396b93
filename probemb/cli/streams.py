"""stdout and stderr that do not decide what becomes of a run."""

from __future__ import annotations

import sys


class _Unfailing:
    """A text stream whose writes may be lost where its file's disk is full; a closed pipe still raises."""

    def __init__(self, stream):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._try(self._stream.write, text) or len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call, *arguments):
        try:
            return call(*arguments)
        except BrokenPipeError:
            raise
        except OSError:
            return None

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def make_output_unfailing() -> None:
    """From now on, a full disk under stdout or stderr loses lines instead of raising OSError, also at the very end."""
    sys.stdout, sys.stderr = (
        stream if isinstance(stream, _Unfailing) else _Unfailing(stream) for stream in (sys.stdout, sys.stderr)
    )
