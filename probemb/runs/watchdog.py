"""A watchdog for ranks that train together: says who waits for what, and ends a run that stands still.

The main thread notes what it does in a `Progress`. A thread looks at it, and another one exchanges it with the other
ranks through the store at which they met, as collectives cannot be used while one of them hangs.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from probemb import distributed
from probemb.data.worker_stacks import of_workers
from probemb.errors import LostRank, UserError

WARN_SECONDS = 60.0  # without a step
BEAT_SECONDS = 2.0  # between two signs of life
START_SECONDS = 600.0  # the least limit of a phase before the first step, which may compile
SHOWN = 6  # groups of ranks in a message


class Progress:
    """State of this rank's main thread, and the time since when."""

    def __init__(self, step: int = 0):
        self.step, self.step_at, self.made_one = step, time.monotonic(), False
        self.doing("starting")

    def doing(self, what: str, detail: Callable[[], str] | None = None) -> None:
        """Begin another phase, such as "computing"; `detail` is called in another thread and says more."""
        self.phase = what, detail, time.monotonic()

    def made(self, step: int) -> None:
        """Note a finished step."""
        self.step, self.step_at, self.made_one = step, time.monotonic(), True

    def describe(self) -> str:
        """The phase with its details."""
        what, detail, _ = self.phase
        try:
            return (detail and detail()) or what
        except Exception:  # the main thread may be closing what it looks at
            return what


class Watchdog:
    """Watches this rank's progress and, with the other ranks, who keeps all of them from a step.

    Args:
        progress: of this rank.
        run: the run folder, which gets stacks/rank-R.txt, of this process and its workers, when the run is ended.
        minutes: longest phase; a longer one ends the process with code 2.
        clean_up: called before the process is ended.
    """

    def __init__(self, progress: Progress, run: Path, minutes: float, clean_up: Callable[[], None] = lambda: None):
        self.progress, self.run, self.minutes, self.limit = progress, run, minutes, 60 * minutes
        self.rank, self.world_size, self.clean_up = distributed.rank(), distributed.world_size(), clean_up
        self.beat = min(BEAT_SECONDS, self.limit / 15)
        store = distributed.connect_to_store("watchdog")
        self.peers = _Peers(self.rank, self.world_size, store, self.beat, progress) if store else None
        self._closed, self._ending = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def __enter__(self) -> Watchdog:
        if self.peers:
            self.peers.start()
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self._ending.locked():  # this process is about to end, and what the main thread found is a consequence
            self._thread.join()
        found = self.explain(error) if isinstance(error, RuntimeError) else None
        self._closed.set()
        if self.peers:
            self.peers.close(found or (error if isinstance(error, UserError) else None))
        if found:
            raise found from error

    def _watch(self) -> None:
        next_warning = WARN_SECONDS
        while not self._closed.wait(self.beat / 2):
            now = time.monotonic()
            stalled = now - self.progress.step_at
            if self.peers:
                self.peers.look = self.rank < 2 and stalled > 2 * self.beat
                if self.peers.end and now - self.peers.ended_at > 5 * self.beat:  # this rank hangs in what they left
                    self.end(self.peers.end)
            if stalled < WARN_SECONDS:
                next_warning = WARN_SECONDS
            elif stalled > next_warning:
                if self._speaks():
                    print(f"step {self.progress.step} | no step for {stalled:.0f} s: {self.states()}", flush=True)
                next_warning *= 2
            limit = self.limit if self.progress.made_one else max(self.limit, START_SECONDS)
            if now - self.progress.phase[2] > limit:
                self.end(self.overdue() if self._speaks() else self._told(4 * self.beat) or self.overdue())

    def _told(self, seconds: float) -> UserError | None:
        """The error with which another rank ends, if there is one within so many seconds."""
        until = time.monotonic() + seconds
        while self.peers and not self.peers.end and time.monotonic() < until:
            time.sleep(self.beat / 4)
        return self.peers.end if self.peers else None

    def _speaks(self) -> bool:
        """Rank 0, or rank 1 if that one is silent."""
        return self.rank == 0 or (self.rank == 1 and self.peers is not None and self.peers.is_silent(0))

    def states(self) -> str:
        """Every rank's state, the same ones together: "rank 0, 2: computing; rank 1: …"."""
        states = self.peers.states() if self.peers else {self.rank: self.progress.describe()}
        ranks: dict[str, list[int]] = {}
        for rank, state in sorted(states.items()):
            ranks.setdefault(state, []).append(rank)
        groups = [f"rank {', '.join(map(str, who[:8]))}{', …' * (len(who) > 8)}: {s}" for s, who in ranks.items()]
        groups.sort(key=lambda group: "no sign of life" not in group)
        return "; ".join(groups[:SHOWN]) + f"; and {len(groups) - SHOWN} more" * (len(groups) > SHOWN)

    def overdue(self) -> UserError:
        """The error of a run that stands still."""
        return UserError(
            f"There was no progress for {self.minutes:g} minutes (engine.timeout): {self.states()}.",
            "Look at what is named, or raise engine.timeout, and continue with --resume; the stacks of all threads are "
            f"in {self.run / 'stacks'}.",
        )

    def explain(self, error: RuntimeError) -> UserError | None:
        """The reason why a collective failed; None if `error` is something else.

        A rank that has ended with an error says so itself; one that was killed or hangs has fallen silent.
        """
        if self.peers is None or not _is_of_a_collective(error):
            return None
        overdue = time.monotonic() - self.progress.phase[2] > 0.9 * self.limit
        until = time.monotonic() + self.peers.silent_after + 2 * self.beat
        self.peers.explaining = True
        while time.monotonic() < until and not self.peers.end and not self.peers.somebody_is_silent():
            time.sleep(self.beat / 4)
        if self.peers.end:
            return self.peers.end
        if overdue:
            self._dump_stacks()
            return self.overdue()
        return LostRank(
            f"The connection to another rank broke in step {self.progress.step + 1}: {self.states()}.",
            "It was killed, or its machine or network failed; look at its output, and continue with --resume.",
        )

    def end(self, error: UserError) -> None:
        """End this process, whose main thread may never return, with an error."""
        from probemb.cli.command import report

        if not self._ending.acquire(blocking=False) or self._closed.is_set():
            return
        self._dump_stacks()
        if self.peers:
            self.peers.close(error)
        _with_patience(lambda: report(error))
        for worker in multiprocessing.active_children():
            worker.kill()
        _with_patience(self.clean_up)
        os._exit(error.exit_code)

    def _dump_stacks(self) -> None:
        def dump() -> None:
            folder = self.run / "stacks"
            folder.mkdir(exist_ok=True)
            with open(folder / f"rank-{self.rank}.txt", "w", encoding="utf-8") as file:
                print(f"rank {self.rank}, step {self.progress.step}: {self.progress.describe()}", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
                print(f"\n{of_workers()}", file=file)

        _with_patience(dump)


class _Peers(threading.Thread):
    """Exchanges progress with the other ranks; a store that does not answer blocks this thread and no other."""

    def __init__(self, rank: int, world_size: int, store, beat: float, progress: Progress):
        super().__init__(daemon=True, name="watchdog-peers")
        self.rank, self.world_size, self.store, self.beat, self.progress = rank, world_size, store, beat, progress
        self.store_is_rank_0 = not distributed.launcher_has_store()
        self.silent_after, self.look, self.explaining = 4 * beat, False, False
        self.end: UserError | None = None  # with which another rank has ended
        self.ended_at = 0.0
        self._mine: UserError | None = None
        self._closing, self._told = threading.Event(), threading.Event()
        self._answered = time.monotonic()  # the store
        self._seen: dict[int, tuple[dict, float]] = {}  # state, and when it last changed

    def run(self) -> None:
        number = 0
        try:
            while not self._told.is_set():
                number += 1
                self._exchange(number)
                self._closing.wait(self.beat)
        except RuntimeError:  # the store is gone, and rank 0 with it
            self._answered = 0.0
        self._told.set()

    def _exchange(self, number: int) -> None:
        closing, mine = self._closing.is_set(), self._mine
        state = {"beat": number, "host": socket.gethostname(), "state": self.progress.describe()}
        self.store.set(f"rank{self.rank}", json.dumps(state))
        if mine:
            self.store.set("end", json.dumps([mine.what, mine.remedy, mine.exit_code]))
        elif not self.end and self.store.check(["end"]):
            what, remedy, code = json.loads(self.store.get("end"))
            self.ended_at = time.monotonic()
            self.end = (LostRank if code == LostRank.exit_code else UserError)(what, remedy)
        if self.look or self.explaining:
            for rank in range(self.world_size):
                if self.store.check([f"rank{rank}"]):
                    self._notice(rank, json.loads(self.store.get(f"rank{rank}")))
        self._answered = time.monotonic()
        if closing:
            self._told.set()

    def _notice(self, rank: int, state: dict) -> None:
        known = self._seen.get(rank)
        if known is None or known[0]["beat"] != state["beat"]:
            self._seen[rank] = state, time.monotonic()

    def close(self, error: UserError | None) -> None:
        """Tell the others about the error that ends this rank."""
        self._mine = error
        self._closing.set()
        self._told.wait(self.beat)
        if error and self.rank == 0 and self.store_is_rank_0:
            time.sleep(2.5 * self.beat)  # the others learn of it from this process

    def somebody_is_silent(self) -> bool:
        return any(self.is_silent(rank) for rank in range(self.world_size))

    def is_silent(self, rank: int) -> bool:
        """True if a rank gives no sign of life."""
        if rank == self.rank:
            return False
        if rank == 0 and self.store_is_rank_0 and time.monotonic() - self._answered > self.silent_after:
            return True
        return rank in self._seen and self._seen_ago(rank) > self.silent_after

    def _seen_ago(self, rank: int) -> float:
        """Seconds since a rank's last sign of life, seen from the store's last answer."""
        return max(self._answered, self._seen[rank][1]) - self._seen[rank][1]

    def states(self) -> dict[int, str]:
        """Activity of every known rank."""
        out = {self.rank: self.progress.describe()}
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            where = f" on {self._seen[rank][0]['host']}" if rank in self._seen else ""
            if self.is_silent(rank):
                out[rank] = f"no sign of life{where} (stopped or killed, or its machine or network hangs)"
            elif rank in self._seen:
                out[rank] = self._seen[rank][0]["state"]
        return out


def _with_patience(work: Callable[[], object], seconds: float = 5.0) -> None:
    """Run `work`, which a hanging file system may block, for at most so many seconds."""

    def run() -> None:
        with suppress(OSError):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


def _is_of_a_collective(error: RuntimeError) -> bool:
    from torch.distributed import DistError

    text = str(error).lower()
    words = ("gloo", "connection closed by peer", "connection reset by peer", "timed out waiting", "nccl")
    return isinstance(error, DistError) or any(word in text for word in words)
