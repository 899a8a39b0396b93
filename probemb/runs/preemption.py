"""Requests to stop, by a scheduler or Ctrl-C: a signal sets a flag, which is checked at every step and in waits."""

import os
import signal
import time
from contextlib import suppress

REQUEUE = 85
"""Exit code of a run that was asked to stop, has saved, and wants to be started again with --resume."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME_SECONDS = 1.0  # a launcher forwards a Ctrl-C that the terminal has already sent to its ranks


class Preemption:
    """A context in which SIGTERM, SIGUSR1, SIGHUP and the first Ctrl-C are remembered instead of ending the process; a
    second Ctrl-C raises KeyboardInterrupt, as the first signal among `interrupting` does: what is computed would not be
    saved. SIGHUP stays ignored under nohup, and SIGINT in a script's background.
    """

    def __init__(self):
        self.name: str | None = None  # of the first signal that came, such as "SIGTERM"
        self.interrupting: tuple[signal.Signals, ...] = ()
        self._interrupted: float | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Preemption":
        for number in (*SIGNALS, signal.SIGINT):
            if number not in (signal.SIGHUP, signal.SIGINT) or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame) -> None:
        self.name = self.name or signal.Signals(number).name
        if number in self.interrupting:
            self.interrupting = ()
            raise KeyboardInterrupt
        if number == signal.SIGINT and self._interrupted is None:
            self._interrupted = time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                with suppress(OSError):  # the same Ctrl-C may have ended what reads stderr
                    os.write(2, b"\nstopping, and saving what is done; Ctrl-C again ends at once\n")
        elif number == signal.SIGINT and time.monotonic() > self._interrupted + SAME_SECONDS:
            raise KeyboardInterrupt

    @property
    def description(self) -> str:
        return {None: "a signal to another rank", "SIGINT": "Ctrl-C"}.get(self.name, self.name)

    @property
    def exit_code(self) -> int:
        """Exit code of a run that has stopped and saved; after Ctrl-C, a launcher must not start it again."""
        return 130 if self.name == "SIGINT" else REQUEUE

    def asked(self) -> bool:
        return self.name is not None
