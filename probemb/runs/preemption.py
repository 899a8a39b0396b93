"""Preemption by a scheduler: a signal sets a flag, which is checked at every step and while waiting for data."""

from __future__ import annotations

import signal

REQUEUE = 85
"""Exit code of a run that was asked to stop, has saved, and wants to be started again with --resume."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """A context in which SIGTERM and SIGUSR1 are remembered instead of ending the process.

    On leaving, the earlier handlers return, so that a launcher can end a run that fails or has saved. `name` is the
    first signal that came, such as "SIGTERM", or None.
    """

    def __init__(self):
        self.name: str | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Preemption:
        self._before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame) -> None:
        self.name = self.name or signal.Signals(number).name

    @property
    def description(self) -> str:
        """Name of the signal that stopped the run."""
        return self.name or "a signal to another rank"

    def asked(self) -> bool:
        """Whether this process was asked to stop."""
        return self.name is not None
