"""Warnings of a scheduler: a signal sets a flag, which is looked at around every step and while data is waited for."""

from __future__ import annotations

import signal

REQUEUE = 85
"""Exit code of a run that was asked to stop, has saved, and wants to be started again with --resume."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """While it is entered, SIGTERM and SIGUSR1 are remembered instead of ending the process.

    A second signal changes nothing. On leaving, the signals do again what they did before: a run that fails, or has
    saved, can be ended by its launcher.

    Attributes:
        name: of the first signal that came, such as "SIGTERM"; None if none did.
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
        """Of the signal that stopped the run, for people."""
        return self.name or "a signal to another rank"

    def asked(self) -> bool:
        """Whether this process was asked to stop."""
        return self.name is not None
