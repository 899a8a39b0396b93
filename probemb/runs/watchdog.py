"""A watchdog for ranks that train together: ends a rank that makes no progress, and names what every rank was doing.

The main thread notes what it does in a `Progress`. A thread looks at it, and posts it to the store at which the ranks
met, as collectives cannot be used while one of them hangs.
"""

import faulthandler
import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError

from probemb import distributed
from probemb.errors import LostRank, UserError, report

WARN_SECONDS = 60.0  # without a step
START_SECONDS = 600.0  # the least limit of a phase before the first step, which may compile
ENDING_SECONDS = 20.0  # for the last words of a process: its disk or network may hang
BROKEN = ("gloo", "connection closed by peer", "connection reset by peer", "timed out waiting", "nccl")
LOST = "no sign of life (stopped or killed, or its machine or network hangs)"
SHOWN = 6  # groups of ranks in a message


class Progress:
    """State of this rank's main thread, and since when."""

    def __init__(self, step: int = 0):
        self.step, self.step_at, self.made_one = step, time.monotonic(), False
        self.doing("starting")

    def doing(self, what: str, detail: Callable[[], str] | None = None) -> None:
        """Begin another phase, such as "computing"; `detail` is called in another thread and says more."""
        self.phase = what, detail, time.monotonic()

    def made(self, step: int) -> None:
        self.step, self.step_at, self.made_one = step, time.monotonic(), True

    def describe(self) -> str:
        what, detail, _ = self.phase
        try:
            return (detail and detail()) or what
        except Exception:  # the main thread may be closing what it looks at
            return what


class Watchdog:
    """Ends this process, after `clean_up`, with code 2 when a phase of its `progress` takes longer than `minutes`, with
    the stacks of all threads in `run`/stacks, and explains a collective that failed because another rank is gone.
    """

    def __init__(self, progress: Progress, run: Path, minutes: float, clean_up: Callable[[], None] = lambda: None):
        self.progress, self.run, self.minutes, self.clean_up = progress, run, minutes, clean_up
        self.rank, self.beat = distributed.rank(), min(2.0, 4 * minutes)
        self.store, self.beats = distributed.connect_to_store("watchdog"), 0
        self._closed, self._thread = threading.Event(), threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self._post("starting")
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        broken = isinstance(error, DistError) or any(word in str(error).lower() for word in BROKEN)
        lost = self.states() if self.store and isinstance(error, RuntimeError) and broken else ""
        self._closed.set()
        self._thread.join(self.beat)
        faulthandler.cancel_dump_traceback_later()
        if error:
            self._post("ended with an error")
        if lost:
            raise LostRank(
                f"The connection to another rank broke in step {self.progress.step + 1}: {lost}.",
                "It failed, was killed, or its machine or network did; look at its output, and continue with --resume.",
            ) from error

    def _watch(self) -> None:
        warn_after = WARN_SECONDS
        while not self._closed.wait(self.beat / 2):
            limit = 60 * self.minutes if self.progress.made_one else max(60 * self.minutes, START_SECONDS)
            # Where a thread holds Python's lock for so long, this one cannot end the process.
            faulthandler.dump_traceback_later(limit, file=2, exit=True)
            self._post(self.progress.describe())
            stalled = time.monotonic() - self.progress.step_at
            if stalled < WARN_SECONDS:
                warn_after = WARN_SECONDS
            elif stalled > warn_after:
                warn_after *= 2
                if self.rank == 0:
                    print(f"step {self.progress.step} | no step for {stalled:.0f} s: {self.states()}", flush=True)
            if time.monotonic() - self.progress.phase[2] > limit:
                self._end()

    def _end(self) -> None:
        faulthandler.dump_traceback_later(ENDING_SECONDS, file=2, exit=True)
        what = f"There was no progress for {self.minutes:g} minutes (engine.timeout): {self.states()}."
        where = f"all threads' stacks are in {self.run / 'stacks'}"
        error = UserError(what, f"Look at what is named, or raise engine.timeout, and continue with --resume; {where}.")
        with suppress(OSError):
            (self.run / "stacks").mkdir(exist_ok=True)
            with open(self.run / "stacks" / f"rank-{self.rank}.txt", "w", encoding="utf-8") as file:
                print(f"rank {self.rank}, step {self.progress.step}: {self.progress.describe()}", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        report(error)
        for worker in multiprocessing.active_children():
            worker.kill()
        self.clean_up()
        os._exit(error.exit_code)

    def _post(self, state: str) -> None:
        self.beats += 1
        with suppress(RuntimeError):  # the store is gone, and rank 0 with it
            if self.store:
                self.store.set(f"rank{self.rank}", json.dumps([self.beats, socket.gethostname(), state]))

    def states(self) -> str:
        """Every rank's state, "rank 0, 2: computing; rank 1: …"; waits to see who is silent."""
        states = {self.rank: self.progress.describe()}
        try:
            if self.store:
                keys = [f"rank{rank}" for rank in range(distributed.world_size())]
                self.store.set_timeout(timedelta(seconds=5))
                before = self.store.multi_get(keys)
                for _ in range(5):  # this rank's own signs of life must not end meanwhile
                    time.sleep(self.beat / 2)
                    self._post(self.progress.describe())
                for rank, (old, new) in enumerate(zip(before, self.store.multi_get(keys))):
                    _, host, state = json.loads(new)
                    states[rank] = f"{LOST} on {host}" if old == new and not state.startswith("ended") else state
        except RuntimeError:  # the store is gone, or its process hangs
            states = {0: LOST} | states
        ranks: dict[str, list[str]] = {}
        for rank in sorted(states):
            ranks.setdefault(states[rank], []).append(str(rank))
        groups = [f"rank {', '.join(who[:8])}{', …' * (len(who) > 8)}: {state}" for state, who in ranks.items()]
        groups.sort(key=lambda group: LOST not in group)
        return "; ".join([*groups[:SHOWN], *["…"] * (len(groups) > SHOWN)])
