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

from probemb.cli.progress import progress
from probemb.errors import UserError
from tools.claims.study import Study, Tell

TELL_EVERY = 15.0  # seconds


class Archive:
    """Finished trainings on disk: OUT/trainings/NAME.json, OUT/embeddings/NAME.safetensors, OUT/pretraining/SEED.pt.

    Raises:
        UserError: the folder holds trainings with other settings, or cannot be written.
    """

    def __init__(self, out: Path, study: Study):
        from probemb.files import replace_text

        self.out, self._identity_of = out, study.identity
        mark, told = out / "settings.json", json.dumps(asdict(study.settings), indent=1) + "\n"
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

    def embeddings(self, name: str) -> Path:
        """Embeddings of the test sets, by the training of that `name`."""
        return self.out / "embeddings" / f"{name}.safetensors"

    def read(self, training) -> dict | None:
        """Measurements, if the same training is finished."""
        path = self.out / "trainings" / f"{self.name(training)}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return content["found"] if content.get("training") == self._identity(training) else None

    def write(self, training, found: dict) -> None:
        """Archive a finished training; a whole file or none."""
        from probemb.files import replace_text

        path = self.out / "trainings" / f"{self.name(training)}.json"
        replace_text(path, json.dumps({"training": self._identity(training), "found": found}) + "\n")

    def _identity(self, training) -> dict:
        return json.loads(json.dumps({**asdict(training), **self._identity_of(training)}))


_INHERITED: dict = {}  # what forked workers inherit: study, world, archive, steps done


def train_all(
    study: Study, trainings: Sequence, archive: Archive, workers: int, test: bool = True, tell: Tell | None = None
) -> dict:
    """Train what is not kept, `workers` at a time, after the pretraining they start from; returns found by name."""
    tell = tell or (lambda line: print(line, flush=True))
    found = {archive.name(one): archive.read(one) for one in trainings}
    missing = [one for one in trainings if found[archive.name(one)] is None]
    if len(missing) < len(trainings):
        tell(f"{len(trainings) - len(missing)} of {len(trainings)} trainings are kept from before")
    if not missing:
        return found
    seeds = list(dict.fromkeys(one.seed for one in missing))
    world, context = _prepare(study, seeds, archive, tell, test)
    done, first = _INHERITED["done"], study.starting_steps(world)
    unstarted = [seed for seed in seeds if first and not archive.start(seed).exists()]
    total = first * len(unstarted)
    total += sum(study.steps(world, one) - study.steps_before(one, archive) for one in missing)
    progress = Progress(total, len(missing), lambda: done.value, study, tell)
    queue = [one for one in missing if one.seed not in unstarted]
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
                    queue = sorted(queue + [other for other in missing if other.seed == one], key=missing.index)
                    progress.line(f"pretraining of seed {one} is done")
                else:
                    found[archive.name(one)], seconds = future.result()
                    progress.finished(one, found[archive.name(one)], seconds)
            if not ready:
                progress.line()
    except BrokenProcessPool:
        raise UserError("A training was ended from outside.", "Start again: finished trainings are kept.") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        _INHERITED.clear()
    return found


def measure_all(study: Study, trainings: Sequence, archive: Archive, workers: int, tell: Tell | None = None) -> dict:
    """Measure finished trainings again, from what is kept of them; returns found by name."""
    seeds = list(dict.fromkeys(one.seed for one in trainings))
    if type(study).measure_again is Study.measure_again:
        return {archive.name(one): archive.read(one) for one in trainings}
    _, context = _prepare(study, seeds, archive, tell or (lambda line: print(line, flush=True)), True)
    try:
        with ProcessPoolExecutor(workers, context, _end_with_parent, (os.getpid(),)) as pool:
            measured, found = pool.map(_measure, trainings), {}  # forks before the bar has a thread
            with progress("measured", len(trainings)) as advance:
                for training, one in zip(trainings, measured):
                    found[archive.name(training)] = one
                    advance(1)
            return found
    finally:
        _INHERITED.clear()


def _prepare(study: Study, seeds: list[int], archive: Archive, tell: Tell, test: bool) -> tuple:
    """World and context of workers that are about to be forked."""
    import torch

    torch.set_num_threads(1)
    world = study.prepare(seeds, archive.out, tell)
    context = multiprocessing.get_context("fork")
    _INHERITED.update(study=study, world=world, archive=archive, done=context.Value("d", 0.0), test=test)
    for module in study.modules:
        __import__(module)  # once, before the fork
    return world, context


class Progress:
    """Lines with what is done and how long the rest will take."""

    def __init__(self, total: float, count: int, done: Callable[[], float], study: Study, tell: Tell):
        self.total, self.count, self.done, self.study, self.tell = total, count, done, study, tell
        self.began, self.n = time.perf_counter(), 0

    def line(self, what: str = "training") -> None:
        """One line now."""
        seconds, share = time.perf_counter() - self.began, self.done() / max(1.0, self.total)
        left = f"about {_minutes(seconds / share - seconds)} left" if share > 0 else "estimating"
        self.tell(f"[{self.n}/{self.count} | {_minutes(seconds)} | {left}] {what}")

    def finished(self, training, found: dict, seconds: float) -> None:
        """A training has ended."""
        self.n += 1
        value = self.study.percent * max(found["validation"])
        what = f"validation {self.study.metric} {value:.1f}"
        self.line(f"{training.name}, seed {training.seed}: {what}, {seconds:.0f} s")


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _end_with_parent(parent: int) -> None:
    """A worker whose parent was killed would wait for work for ever; Ctrl-C ends it without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        if "study" in _INHERITED:
            _INHERITED["study"].interrupt()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _step_done(cost: float) -> Callable[[], None]:
    done = _INHERITED["done"]

    def advance() -> None:
        with done.get_lock():
            done.value += cost

    return advance


def _pretrain(seed: int) -> None:
    import torch

    from probemb.files import replace_file

    torch.set_num_threads(1)
    state = _INHERITED["study"].pretrain(_INHERITED["world"], seed, _step_done(1.0))
    replace_file(_INHERITED["archive"].start(seed), lambda aside: torch.save(state, aside))


def _train(training) -> tuple[dict, float]:
    import torch

    torch.set_num_threads(1)
    study, world, archive = (_INHERITED[name] for name in ("study", "world", "archive"))
    began, cpu = time.perf_counter(), time.process_time()
    start = torch.load(archive.start(training.seed), weights_only=True) if study.starting_steps(world) else None
    step_done = _step_done(study.step_cost(training))
    found = study.train(world, training, start, step_done, archive, _INHERITED["test"])
    found |= {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    archive.write(training, found)
    return found, found["seconds"]


def _measure(training) -> dict:
    import torch

    torch.set_num_threads(1)
    archive = _INHERITED["archive"]
    found = _INHERITED["study"].measure_again(_INHERITED["world"], training, archive.read(training), archive)
    archive.write(training, found)
    return found
