"""Run checks, each in a process of its own that is ended when its time is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.bench.gpu.checks import CHECKS, Check
from tools.bench.gpu.notes import Notes, Place, Skip

ROOT = Path(__file__).resolve().parents[3]
LAST = 12  # lines of a failed check's output that are kept
PASSED, SKIPPED = "passed", "skipped"
PROGRAM = (sys.executable, "-m", "tools.bench.gpu")  # runs one check with --run NAME --notes FILE --seconds S


@dataclass(frozen=True)
class Outcome:
    """Outcome of a check.

    Attributes:
        ended: passed, failed, skipped, overran (ended after its time) or crashed (with `output`).
        seconds: it took.
        notes: what it found.
        output: the last lines of what it printed, unless it passed.
    """

    name: str
    ended: str
    seconds: float
    notes: Notes
    output: str = ""

    @property
    def fine(self) -> bool:
        """True if nothing is wrong."""
        return self.ended in (PASSED, SKIPPED)

    def record(self) -> dict:
        """As JSON."""
        content = asdict(self)
        del content["notes"]["path"]
        return content


def run_one(name: str, file: Path, small: bool, seconds: float) -> None:
    """A check in this process."""
    notes = Notes(file)
    try:
        CHECKS[name].load()(Place(small, time.monotonic() + seconds), notes)
    except Skip as reason:
        notes.skip("", str(reason))


@dataclass
class _Running:
    """A check's process."""

    name: str
    folder: Path
    process: subprocess.Popen
    began: float
    until: float

    @classmethod
    def start(cls, program: Sequence[str], name: str, folder: Path, small: bool, seconds: float) -> _Running:
        folder.mkdir()
        words = [*program, "--run", name, "--notes", str(folder / "notes.json")]
        words += ["--seconds", str(seconds), *["--small"] * small]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path}
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder.parent / "compiled"))
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
        began = time.monotonic()
        return cls(name, folder, process, began, began + seconds)

    def poll(self) -> Outcome | None:
        """The outcome, once there is one."""
        code, overran = self.process.poll(), time.monotonic() > self.until
        if code is None and not overran:
            return None
        self.end()
        seconds, notes = time.monotonic() - self.began, Notes.read(self.folder / "notes.json")
        held = [held for _, held in notes.claims]
        if code is None:
            ended = "overran"
        elif code:
            ended = "crashed"
        elif "" in notes.skipped:
            ended = SKIPPED
        else:
            ended = PASSED if held and all(held) else "failed"
        lines = (self.folder / "output").read_text(errors="replace").splitlines()
        return Outcome(self.name, ended, seconds, notes, "" if ended == PASSED else "\n".join(lines[-LAST:]))

    def end(self) -> None:
        """Kill what is left of it, its own processes too."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_checks(
    checks: dict[str, Check],
    small: bool,
    factor: float,
    at_once: int,
    tell: Callable[[Outcome], None],
    program: Sequence[str] = PROGRAM,
) -> list[Outcome]:
    """Outcomes in the order of `checks`; those that measure time run alone, after the others.

    Args:
        factor: of every check's time.
        at_once: others that run beside each other.
        tell: gets every outcome at once.
    """
    done: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        for alone in (False, True):
            waiting, running = [name for name, check in checks.items() if check.alone is alone], []
            try:
                while waiting or running:
                    while waiting and len(running) < (1 if alone else at_once):
                        name = waiting.pop(0)
                        seconds = factor * checks[name].seconds
                        running.append(_Running.start(program, name, Path(folder) / name, small, seconds))
                    time.sleep(0.1)
                    for one in list(running):
                        if outcome := one.poll():
                            running.remove(one)
                            done[one.name] = outcome
                            tell(outcome)
            finally:
                for one in running:
                    one.end()
    return [done[name] for name in checks]


def to_json(outcomes: list[Outcome], about: dict) -> str:
    """Everything in one object."""
    return json.dumps({**about, "checks": {o.name: o.record() for o in outcomes}})
