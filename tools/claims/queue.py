"""The trainings of `tools.claims`, several at a time in forked processes, each kept on disk when it is finished."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

from probemb.errors import UserError

TELL_EVERY = 15.0  # seconds
STEP_COST = {"infonce": 1.0, "vse": 1.0, "pcme": 2.0, "pcmepp": 1.5}  # of a training step, in steps of InfoNCE


class Kept:
    """Finished trainings on disk: OUT/trainings/NAME.json, and OUT/pretraining/SEED.pt.

    Raises:
        UserError: the folder holds trainings with other settings, or cannot be written.
    """

    def __init__(self, out: Path, settings):
        from probemb.files import replace_text

        self.out = out
        mark, told = out / "settings.json", json.dumps(asdict(settings), indent=1) + "\n"
        try:
            if mark.exists() and mark.read_text(encoding="utf-8") != told:
                raise UserError(f"{out} holds trainings with other settings.", "Name another --out, or remove it.")
            replace_text(mark, told)
        except OSError as error:
            raise UserError(f"{out} cannot be written ({error.strerror}).", "Name another --out.") from None

    def name(self, training) -> str:
        """Of the file, without its ending: "pcmepp-noise-20 seed 0"."""
        return f"{training.name} seed {training.seed}".replace(" ", "-").replace("%", "").replace("=", "")

    def start(self, seed: int) -> Path:
        """Weights of a pretraining."""
        return self.out / "pretraining" / f"{seed}.pt"

    def read(self, training) -> dict | None:
        """What was measured, if the same training is finished."""
        path = self.out / "trainings" / f"{self.name(training)}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return content["found"] if content.get("training") == self._identity(training) else None

    def write(self, training, found: dict) -> None:
        """Keep it; a whole file or none."""
        from probemb.files import replace_text

        path = self.out / "trainings" / f"{self.name(training)}.json"
        replace_text(path, json.dumps({"training": self._identity(training), "found": found}) + "\n")

    def _identity(self, training) -> dict:
        from tools.claims.training import CHOSEN

        return json.loads(json.dumps({**asdict(training), "values": CHOSEN[training.method]}))


_WORK: dict = {}  # what forked workers inherit: world, settings, keep, steps done


def train_all(
    settings,
    trainings: Sequence,
    keep: Kept,
    workers: int,
    test: bool = True,
    tell: Callable[[str], object] | None = None,
) -> dict:
    """Train what is not kept, `workers` at a time, after the pretraining they start from; returns found by name."""
    tell = tell or (lambda line: print(line, flush=True))
    found = {keep.name(one): keep.read(one) for one in trainings}
    missing = [one for one in trainings if found[keep.name(one)] is None]
    if len(missing) < len(trainings):
        tell(f"{len(trainings) - len(missing)} of {len(trainings)} trainings are kept from before")
    if not missing:
        return found
    import torch

    from tools.claims.world import draw_world

    torch.set_num_threads(1)
    seeds = list(dict.fromkeys(one.seed for one in missing))
    world = draw_world(settings.sizes, seeds, tell)
    for part in (world.validation, world.test):
        _ = part.positives
    if test:
        _ = world.test.ambiguity
    context = multiprocessing.get_context("fork")
    done = context.Value("d", 0.0)
    _WORK.update(world=world, settings=settings, keep=keep, done=done, test=test)
    for _module in ("accelerate", "timm.optim", "zeroshot.evaluation"):
        __import__(_module)  # once, before the fork

    steps = len(world.training[seeds[0]].tokens) // settings.batch_size * settings.epochs
    first = len(world.pretraining[seeds[0]].tokens) // settings.batch_size * settings.pretraining_epochs
    waiting = {seed: [one for one in missing if one.seed == seed] for seed in seeds}
    unstarted = [seed for seed in seeds if not keep.start(seed).exists()]
    total = first * len(unstarted) + sum(steps * STEP_COST[one.method] for one in missing)
    progress = Progress(total, len(missing), lambda: done.value, tell)
    queue = [one for seed in seeds if seed not in unstarted for one in waiting[seed]]
    pool = ProcessPoolExecutor(workers, context, _end_with_parent, (os.getpid(),))
    running = {}
    try:
        while unstarted or queue or running:
            while len(running) < workers and (unstarted or queue):
                # A pretraining goes first while few trainings are ready: then nobody waits for it later.
                if unstarted and len(queue) < 2 * workers:
                    seed = unstarted.pop(0)
                    running[pool.submit(_pretrain, seed)] = seed
                elif queue:
                    one = queue.pop(0)
                    running[pool.submit(_train, one)] = one
            ready, _ = wait(running, timeout=TELL_EVERY, return_when=FIRST_COMPLETED)
            for future in ready:
                one = running.pop(future)
                if isinstance(one, int):
                    future.result()
                    queue += waiting[one]
                    progress.line(f"pretraining of seed {one} is done")
                else:
                    found[keep.name(one)], seconds = future.result()
                    progress.finished(one, found[keep.name(one)], seconds)
            if not ready:
                progress.line()
    except BrokenProcessPool:
        raise UserError("A training was ended from outside.", "Start again: finished trainings are kept.") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        _WORK.clear()
    return found


class Progress:
    """Lines with what is done and how long the rest will take."""

    def __init__(self, total: float, count: int, done: Callable[[], float], tell: Callable[[str], object]):
        self.total, self.count, self.done, self.tell = total, count, done, tell
        self.began, self.n = time.perf_counter(), 0

    def line(self, what: str = "training") -> None:
        """One line now."""
        seconds, share = time.perf_counter() - self.began, self.done() / self.total
        left = f"about {_minutes(seconds / share - seconds)} left" if share > 0 else "estimating"
        self.tell(f"[{self.n}/{self.count} | {_minutes(seconds)} | {left}] {what}")

    def finished(self, training, found: dict, seconds: float) -> None:
        """A training has ended."""
        self.n += 1
        value = 100 * max(found["validation"])
        self.line(f"{training.name}, seed {training.seed}: validation mAP@R {value:.1f}, {seconds:.0f} s")


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _end_with_parent(parent: int) -> None:
    """A worker whose parent was killed would wait for work for ever; Ctrl-C ends it without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _step_done(cost: float) -> Callable[[], None]:
    done = _WORK["done"]

    def advance() -> None:
        with done.get_lock():
            done.value += cost

    return advance


def _pretrain(seed: int) -> None:
    import torch

    from probemb.files import replace_file
    from tools.claims.training import pretrain

    torch.set_num_threads(1)
    state = pretrain(_WORK["world"], _WORK["settings"], seed, _step_done(1.0))
    replace_file(_WORK["keep"].start(seed), lambda aside: torch.save(state, aside))


def _train(training) -> tuple[dict, float]:
    import torch

    from tools.claims.training import train

    torch.set_num_threads(1)
    began = time.perf_counter()
    start = torch.load(_WORK["keep"].start(training.seed), weights_only=True)
    step_done = _step_done(STEP_COST[training.method])
    found = train(_WORK["world"], _WORK["settings"], training, start, step_done, _WORK["test"])
    found["seconds"] = time.perf_counter() - began
    _WORK["keep"].write(training, found)
    return found, found["seconds"]
