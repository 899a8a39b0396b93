"""The main claims of PCME++'s paper, re-tested in miniature on the embedded world, where the truth is known.

    make claims                                        # at most 30 minutes on two cores; run again to go on with it
    python -m tools.claims --out claims --seeds 3      # the same

Every training that is finished stays in OUT/trainings and is not repeated. OUT/claims.json holds all numbers,
OUT/report.html the tables and plots. Verdicts follow from the numbers: a difference of two means over the seeds counts
if it is larger than the spread, the root of the sum of both standard deviations squared.

All methods of a seed start from one pretraining (InfoNCE on other scenes with exact captions), as the paper's start
from one CLIP, and see the same scenes in the same order. Towers, data and schedule are far smaller than the paper's;
losses, mixing, optimizer and trainer are those of `finetune`, without SizeAugment and GPO. Test scenes are used once,
after a training; the epoch is chosen by mAP@R on validation scenes.

How the values in CHOSEN were found: `python -m tools.claims --choose` trains InfoNCE, VSE, PCME and PCME++ with a seed
of its own, each with three values of its loss's own scalar, one more beyond the end if the best is at an end, and with
another learning rate at the best of them, and prints mAP@R on the validation scenes: the same effort for all. Weights
of the regularisers (PP, VIB, share of mixed images) are the paper's.
"""

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
from dataclasses import asdict, replace
from pathlib import Path

from probemb.command import Parser, run_command
from probemb.errors import UserError

GENERATOR = "probemb tools.claims"
METHODS = ("infonce", "vse", "pcme", "pcmepp")
NOISE = (0.2, 0.5)
NOISE_ALPHA = {0.0: 0.1, 0.2: 0.01, 0.5: 0.0}  # the paper's pseudo-positive weights
SELECTION_SEED = 1000
TELL_EVERY = 15.0  # seconds
VARIANT_COST = {"infonce": 1.0, "vse": 1.0, "pcme": 1.5, "pcmepp": 1.3}  # of a step, in steps of InfoNCE


def plan(seeds: Sequence[int]) -> list:
    """All trainings, seed after seed."""
    from tools.claims_training import Training

    trainings = []
    for seed in seeds:
        for noise in (0.0, *NOISE):
            for method in METHODS:
                name = method if not noise else f"{method} noise {noise:.0%}"
                trainings.append(Training(name, seed, method, noise, pseudo_positive=NOISE_ALPHA[noise]))
        plain = Training("csd", seed, "pcmepp", pseudo_positive=0.0, mix=0.0)
        trainings += [
            plain,
            replace(plain, name="wasserstein2", distance="wasserstein2"),
            Training("without PP", seed, "pcmepp", pseudo_positive=0.0),
            Training("without MSDA", seed, "pcmepp", mix=0.0),
            Training("without VIB", seed, "pcmepp", vib=0.0),
            replace(plain, name="without all", vib=0.0),
        ]
    return trainings


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.claims", description="Re-test the paper's main claims in miniature.")
    parser.add_argument("--out", type=Path, default=Path("claims"), help="folder of the results (default: claims)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of every training (default: 3)")
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time, one core each (default: 2)")
    parser.add_argument("--choose", action="store_true", help="compare loss scalars and learning rates on validation")
    options = parser.parse_args(argv)
    for name in ("seeds", "workers"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)} is too small.", "Give at least 1.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: its threads do not outlive a fork
    from tools.claims_training import Settings

    if options.choose:
        choose(Settings(), options.out, options.workers)
    else:
        run(Settings(), options.out, options.seeds, options.workers)
    return 0


def run(settings, out: Path, n_seeds: int = 3, workers: int = 2) -> dict:
    """Train what is not there yet, then judge and write; returns what claims.json holds."""
    from probemb.results import claim_files, write_json
    from tools.claims_findings import Found, judge, text_tables
    from tools.claims_report import report

    claim_files(out, ("claims.json", "report.html"), GENERATOR)
    keep = Kept(out, settings)
    trainings, began = plan(range(n_seeds)), time.perf_counter()
    found = train_all(settings, trainings, keep, workers)
    seconds = time.perf_counter() - began
    by_variant = Found(trainings, found, keep.name)
    claims = judge(by_variant)
    print("\n".join(text_tables(claims)), flush=True)
    content = {
        "settings": asdict(settings),
        "seeds": n_seeds,
        "seconds": seconds,
        "claims": claims,
        "trainings": [{**asdict(training), **found[keep.name(training)]} for training in trainings],
    }
    write_json(out / "claims.json", content, GENERATOR)
    report(out / "report.html", claims, by_variant, describe(settings, len(trainings), n_seeds), GENERATOR)
    print(f"\n{len(trainings)} trainings, {seconds / 60:.1f} min | {out / 'claims.json'} | {out / 'report.html'}")
    return content


def describe(settings, trainings: int, seeds: int) -> str:
    """What was trained, in two sentences."""
    sizes = settings.sizes
    return (
        f"{trainings} trainings, seeds 0 to {seeds - 1}. Each sees {sizes.training:,} scenes with five captions "
        f"{settings.epochs} times, after a common pretraining on {sizes.pretraining:,} others, and is tested on "
        f"{sizes.test:,} scenes of which every true caption is known."
    )


def choose(settings, out: Path, workers: int) -> None:
    """Print validation mAP@R for the values of GRID and LEARNING_RATES."""
    from tools.claims_training import CHOSEN, GRID, LEARNING_RATES, Training

    keep = Kept(out, settings)
    seen: dict[str, list[tuple[float, dict]]] = {method: [] for method in GRID}

    def look(grid: dict[str, list[dict]]) -> None:
        trainings = [
            Training(_title(method, value), SELECTION_SEED, method, chosen=tuple(sorted(value.items())))
            for method, values in grid.items()
            for value in values
        ]
        found = train_all(settings, trainings, keep, workers, test=False)
        for training in trainings:
            value = max(found[keep.name(training)]["validation"])
            print(f"{training.name}: {100 * value:.2f}", flush=True)
            seen[training.method].append((value, dict(training.chosen)))

    def best(method: str) -> dict:
        return max(seen[method], key=lambda pair: pair[0])[1]

    first, *others = LEARNING_RATES
    look({method: [{key: one, "lr": first} for one in values] for method, (key, values) in GRID.items()})
    beyond = {}
    for method, (key, values) in GRID.items():
        if best(method)[key] in (values[0], values[-1]):
            end, neighbour = values[:2] if best(method)[key] == values[0] else values[:-3:-1]
            beyond[method] = [{key: end * end / neighbour, "lr": first}]
    look(beyond)
    look({method: [{**best(method), "lr": lr} for lr in others] for method in GRID})
    print("validation mAP@R, the best of each:")
    for method, pairs in seen.items():
        value = max(pair[0] for pair in pairs)
        print(f"  {method}: {100 * value:.2f} with {best(method)}; CHOSEN has {CHOSEN[method]}")


def _title(method: str, value: dict) -> str:
    return f"choose {method} " + " ".join(f"{key} {option:g}" for key, option in sorted(value.items()))


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
        return f"{training.name} seed {training.seed}".replace(" ", "-").replace("%", "")

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
        from tools.claims_training import CHOSEN

        return json.loads(json.dumps({**asdict(training), "values": CHOSEN[training.method]}))


# ----------------------------------------------------------------------------------------------------- two at a time

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

    from tools.claims_world import draw_world

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
    total = first * len(unstarted) + sum(steps * VARIANT_COST[one.method] for one in missing)
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
    from tools.claims_training import pretrain

    torch.set_num_threads(1)
    state = pretrain(_WORK["world"], _WORK["settings"], seed, _step_done(1.0))
    replace_file(_WORK["keep"].start(seed), lambda aside: torch.save(state, aside))


def _train(training) -> tuple[dict, float]:
    import torch

    from tools.claims_training import train

    torch.set_num_threads(1)
    began = time.perf_counter()
    start = torch.load(_WORK["keep"].start(training.seed), weights_only=True)
    step_done = _step_done(VARIANT_COST[training.method])
    found = train(_WORK["world"], _WORK["settings"], training, start, step_done, _WORK["test"])
    found["seconds"] = time.perf_counter() - began
    _WORK["keep"].write(training, found)
    return found, found["seconds"]


if __name__ == "__main__":
    run_command(main)
