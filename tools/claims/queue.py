"""Run the trainings of `tools.claims`, several at a time in forked processes; results are stored on disk."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

from probemb.errors import UserError
from probemb.pools import follow_parent

LOG_EVERY = 15.0  # seconds
STEP_COST = {"infonce": 1.0, "vse": 1.0, "pcme": 2.0, "pcmepp": 1.5}  # relative to InfoNCE


class TrainingStore:
    """Finished trainings on disk: OUT/trainings/NAME.json, and OUT/pretraining/SEED.pt.

    Raises:
        UserError: the folder holds trainings with other settings, or cannot be written.
    """

    def __init__(self, out: Path, settings):
        from probemb.files import replace_text

        self.out = out
        path, content = out / "settings.json", json.dumps(asdict(settings), indent=1) + "\n"
        try:
            if path.exists() and path.read_text(encoding="utf-8") != content:
                raise UserError(f"{out} holds trainings with other settings.", "Name another --out, or remove it.")
            replace_text(path, content)
        except OSError as error:
            raise UserError(f"{out} cannot be written ({error.strerror}).", "Name another --out.") from None

    def name(self, training) -> str:
        """File name without extension: "pcmepp-noise-20-seed-0"."""
        return f"{training.name} seed {training.seed}".replace(" ", "-").replace("%", "").replace("=", "")

    def start(self, seed: int) -> Path:
        """File of a pretraining's weights."""
        return self.out / "pretraining" / f"{seed}.pt"

    def read(self, training) -> dict | None:
        """The results of this training, None if it is not finished."""
        path = self.out / "trainings" / f"{self.name(training)}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return content["found"] if content.get("training") == self._identity(training) else None

    def write(self, training, found: dict) -> None:
        """Store results atomically."""
        from probemb.files import replace_text

        path = self.out / "trainings" / f"{self.name(training)}.json"
        replace_text(path, json.dumps({"training": self._identity(training), "found": found}) + "\n")

    def _identity(self, training) -> dict:
        from tools.claims.training import CHOSEN

        return json.loads(json.dumps({**asdict(training), "values": CHOSEN[training.method]}))


_SHARED: dict = {}  # inherited by forked workers: world, settings, store, steps done, test


def train_all(
    settings,
    trainings: Sequence,
    store: TrainingStore,
    workers: int,
    test: bool = True,
    log: Callable[[str], object] | None = None,
) -> dict:
    """Train what is not stored, `workers` at a time, after their pretraining; returns results by name."""
    log = log or (lambda line: print(line, flush=True))
    found = {store.name(one): store.read(one) for one in trainings}
    missing = [one for one in trainings if found[store.name(one)] is None]
    if len(missing) < len(trainings):
        log(f"{len(trainings) - len(missing)} of {len(trainings)} trainings are stored already")
    if not missing:
        return found
    import torch

    from tools.claims.world import draw_world

    torch.set_num_threads(1)
    seeds = list(dict.fromkeys(one.seed for one in missing))
    world = draw_world(settings.sizes, seeds, log)
    # Compute and import once, before the fork.
    _ = world.validation.positives, world.test.positives, test and world.test.ambiguity
    for module in ("accelerate", "timm.optim", "zeroshot.evaluation"):
        importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    _SHARED.update(world=world, settings=settings, store=store, done=context.Value("d", 0.0), test=test)
    try:
        _run_pool(missing, workers, context, found, log)
    finally:
        _SHARED.clear()
    return found


def _run_pool(missing: Sequence, workers: int, context, found: dict, log: Callable[[str], object]) -> None:
    """Pretrain and train in a pool of processes; adds the results to `found`."""
    world, settings, store, done = (_SHARED[name] for name in ("world", "settings", "store", "done"))
    seeds = list(dict.fromkeys(one.seed for one in missing))
    steps = len(world.training[seeds[0]].tokens) // settings.batch_size * settings.epochs
    first = len(world.pretraining[seeds[0]].tokens) // settings.batch_size * settings.pretraining_epochs
    waiting = {seed: [one for one in missing if one.seed == seed] for seed in seeds}
    unstarted = [seed for seed in seeds if not store.start(seed).exists()]
    total = first * len(unstarted) + sum(steps * STEP_COST[one.method] for one in missing)
    progress = Progress(total, len(missing), lambda: done.value, log)
    queue = [one for seed in seeds if seed not in unstarted for one in waiting[seed]]
    pool = ProcessPoolExecutor(workers, context, _end_with_parent, (os.getpid(),))
    running = {}
    try:
        while unstarted or queue or running:
            while len(running) < workers and (unstarted or queue):
                # Pretrain while few trainings are ready, so that no worker idles later.
                if unstarted and len(queue) < 2 * workers:
                    seed = unstarted.pop(0)
                    running[pool.submit(_pretrain, seed)] = seed
                elif queue:
                    one = queue.pop(0)
                    running[pool.submit(_train, one)] = one
            ready, _ = wait(running, timeout=LOG_EVERY, return_when=FIRST_COMPLETED)
            for future in ready:
                one = running.pop(future)
                if isinstance(one, int):
                    future.result()
                    queue += waiting[one]
                    progress.line(f"pretraining of seed {one} is done")
                else:
                    found[store.name(one)], seconds = future.result()
                    progress.finished(one, found[store.name(one)], seconds)
            if not ready:
                progress.line()
    except BrokenProcessPool:
        raise UserError("A training was killed.", "Restart the command: finished trainings are kept.") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class Progress:
    """Log lines with progress and an estimate of the remaining time."""

    def __init__(self, total: float, count: int, done: Callable[[], float], log: Callable[[str], object]):
        self.total, self.count, self.done, self.log = total, count, done, log
        self.began, self.n = time.perf_counter(), 0

    def line(self, what: str = "training") -> None:
        seconds, share = time.perf_counter() - self.began, self.done() / self.total
        left = f"about {_minutes(seconds / share - seconds)} left" if share > 0 else "estimating"
        self.log(f"[{self.n}/{self.count} | {_minutes(seconds)} | {left}] {what}")

    def finished(self, training, found: dict, seconds: float) -> None:
        self.n += 1
        value = 100 * max(found["validation"])
        self.line(f"{training.name}, seed {training.seed}: validation mAP@R {value:.1f}, {seconds:.0f} s")


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _end_with_parent(parent: int) -> None:
    """Initialise a worker: it ends with its parent, and on Ctrl-C without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    follow_parent(parent)


def _step_done(cost: float) -> Callable[[], None]:
    done = _SHARED["done"]

    def advance() -> None:
        with done.get_lock():
            done.value += cost

    return advance


def _pretrain(seed: int) -> None:
    import torch

    from probemb.files import replace_file
    from tools.claims.training import pretrain

    torch.set_num_threads(1)
    state = pretrain(_SHARED["world"], _SHARED["settings"], seed, _step_done(1.0))
    replace_file(_SHARED["store"].start(seed), lambda aside: torch.save(state, aside))


def _train(training) -> tuple[dict, float]:
    import torch

    from tools.claims.training import train

    torch.set_num_threads(1)
    began = time.perf_counter()
    start = torch.load(_SHARED["store"].start(training.seed), weights_only=True)
    step_done = _step_done(STEP_COST[training.method])
    found = train(_SHARED["world"], _SHARED["settings"], training, start, step_done, _SHARED["test"])
    found["seconds"] = time.perf_counter() - began
    _SHARED["store"].write(training, found)
    return found, found["seconds"]
