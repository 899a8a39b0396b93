"""Copies a run's checkpoints elsewhere, in a thread of rank 0, beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from probemb.runs.checkpoints import complete_steps, superfluous
from probemb.runs.copies.store import CopyFailed, Store
from probemb.runs.log import count

PAUSES = (10.0, 30.0, 60.0, 300.0, 600.0)  # seconds after the first failure in a row, the second, …
ATTEMPTS_AT_END = 3


class Copier:
    """Brings the copy up to date after every call of `wake`, newest checkpoint first.

    The newest checkpoint, those of `keep_every` and the best one are copied; one that is overtaken by a newer one
    before its turn is not. Afterwards the copy keeps as many as the run folder. A failure is told and tried again; it
    never reaches the run.

    Args:
        run: the run folder.
        store: the copy.
        step: the step that the run resumes from: what the copy has up to it needs no other copy.
        keep, keep_every: as the run's `keep_checkpoints` and `keep_every`.
        protected: steps that are kept besides: the best.
        pauses: seconds between attempts.
    """

    def __init__(
        self,
        run: Path,
        store: Store,
        step: int,
        keep: int,
        keep_every: int,
        protected: Callable[[], frozenset[int]],
        pauses: tuple[float, ...] = PAUSES,
    ):
        self.run, self.store, self.step, self.pauses = run, store, step, pauses
        self._keeping, self._protected = (keep, keep_every), protected
        self._copied: set[int] = set()
        self._busy: int | None = None
        self._changed = threading.Condition()
        self._due = self._closing = False
        self._told_of_others = False
        # A daemon: what is not copied when a run fails is copied by the next start.
        self._thread = threading.Thread(target=self._work, daemon=True, name="remote-copy")
        self._thread.start()

    @property
    def in_use(self) -> frozenset[int]:
        """The step that is being copied; its checkpoint must stay."""
        busy = self._busy
        return frozenset() if busy is None else frozenset([busy])

    def wake(self) -> None:
        """A checkpoint, or the mark of the best one, has been written; does not wait."""
        with self._changed:
            self._due = True
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Wait at most so long until the copy is up to date, or cannot be brought up to date; never raises."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)
        if self._thread.is_alive():
            print(f"remote copy {self.store}: not up to date after {seconds:.0f} s; --resume completes it", flush=True)

    def _work(self) -> None:
        failures = last_attempts = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closing)
                if not self._due:
                    return
                self._due = False
            try:
                self._bring_up_to_date()
                failures = 0
                continue
            except CopyFailed as error:
                reason = error
            failures += 1
            last_attempts += self._closing
            if last_attempts >= ATTEMPTS_AT_END:
                print(f"remote copy {self.store}: not up to date ({reason}); --resume completes it", flush=True)
                return
            pause = self.pauses[min(failures, len(self.pauses)) - 1]
            if self._closing:
                pause = min(pause, self.pauses[0])
            print(f"remote copy {self.store}: failed ({reason}); tried again in {pause:g} s", flush=True)
            with self._changed:
                self._due = True
                if not self._closing:
                    self._changed.wait_for(lambda: self._closing, pause)
                else:
                    self._changed.wait(pause)

    def _bring_up_to_date(self) -> None:
        """Raises CopyFailed."""
        there = self.store.steps()
        self._tell_of_others(there)
        there = {step for step in there if step in self._copied or step <= self.step}
        while (step := self._next(there)) is not None:
            self._busy = step
            try:
                self.store.put(self.run / "checkpoints" / f"step-{step}")
            finally:
                self._busy = None
            self._copied.add(step)
            there.add(step)
            print(f"remote copy {self.store}: step {step} is complete", flush=True)
        self.store.put_small(self.run)
        self.store.remove(superfluous(there, there, *self._keeping, self._protected()))

    def _next(self, there: set[int]) -> int | None:
        """The newest step that is still to be copied."""
        here, (_, every), best = complete_steps(self.run), self._keeping, self._protected()
        wanted = [step for step in here if step == here[0] or step in best or (every and step % every == 0)]
        return next((step for step in wanted if step not in there), None)

    def _tell_of_others(self, there: list[int]) -> None:
        newest = max(complete_steps(self.run), default=self.step)
        others = [step for step in there if step > newest and step not in self._copied]
        if others and not self._told_of_others:
            self._told_of_others = True
            print(
                f"remote copy {self.store}: holds {count(len(others), 'checkpoint')} of another attempt, the newest of "
                f"step {others[0]}, which stay; remove them",
                flush=True,
            )
