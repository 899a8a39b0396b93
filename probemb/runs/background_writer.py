"""Writes during training: one job at a time, in a thread of rank 0."""

import threading
from collections.abc import Callable

from probemb.distributed import agree


class BackgroundWriter:
    """Runs one job at a time in a thread. Every rank holds one, only rank 0 gives it jobs.

    A job's error is kept until `check`, which raises it on every rank.
    """

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the previous job, then start this one.

        The thread is not a daemon: a process that ends, also with Ctrl-C, finishes its writes.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-writer")
        self._thread.start()

    def then(self, job: Callable[[], None]) -> None:
        """Start this job after the one in progress, without waiting here; it runs also if that one fails."""
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            self._run(job)

        self._thread = threading.Thread(target=run, name="checkpoint-writer")
        self._thread.start()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Keep an error for `check`, as if a job had raised it."""
        self._failure = self._failure or error

    @property
    def failed(self) -> bool:
        """True if a job of this rank has failed; does not wait."""
        return self._failure is not None

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Raise the error of a job of any rank on every rank; collective, does not wait for a job in progress."""
        failure, self._failure = self._failure, None
        agree(failure)
