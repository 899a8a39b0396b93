"""Claims on the synthetic world, where every true match and the ambiguity of every caption are known.

All methods of a seed start from one pretraining (InfoNCE on other scenes with exact captions), as the paper's start
from one CLIP, and see the same scenes in the same order. Towers, data and schedule are far smaller than the paper's;
losses, mixing, optimizer and trainer are those of `finetune`, without SizeAugment and GPO. Test scenes are used once,
after a training; the epoch is chosen by mAP@R on validation scenes.

How the values in CHOSEN were found: `python -m tools.claims --choose` trains InfoNCE, VSE, PCME and PCME++ with a seed
of its own and prints mAP@R on the validation scenes: for each method three values of its loss's own scalar, one more
beyond the end if the best is at an end, and another learning rate at the best of them; four or five trainings a
method. Weights of the regularisers (PP, VIB, share of mixed images) are the paper's, and the trainings without them or
with 2-Wasserstein take PCME++'s values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tools.claims.queue import Archive, train_all
from tools.claims.scenes import charts, findings
from tools.claims.scenes.findings import PAPERS_START, PRETRAINING, WITH_CLIP
from tools.claims.scenes.training import CHOSEN, GRID, LEARNING_RATES, Settings, Training, pretrain, train
from tools.claims.scenes.world import World, draw_world
from tools.claims.study import Study, Tell
from tools.claims.verdicts import Found

METHODS = ("infonce", "vse", "pcme", "pcmepp")
NOISE = (0.2, 0.5)
NOISE_ALPHA = {0.0: 0.1, 0.2: 0.01, 0.5: 0.0}  # the paper's pseudo-positive weights
SELECTION_SEED = 1000
STEP_COST = {"infonce": 1.0, "vse": 1.0, "pcme": 2.0, "pcmepp": 1.5}


class Scenes(Study):
    """The study of drawn scenes."""

    title = "The main claims in miniature"
    reading = (
        "All methods of a seed start from the same pretraining and see the same scenes in the same order. Only numbers "
        'labelled "oracle" involve a choice on the test scenes.'
    )
    metric, percent = "mAP@R", 100.0
    modules = (*Study.modules, "zeroshot.filtering.evaluation")

    def __init__(self, settings: Settings | None = None):
        self.settings = settings or Settings()

    def plan(self, seeds: Sequence[int]) -> list[Training]:
        """All trainings, seed after seed."""
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
                Training(PAPERS_START, seed, "pcmepp", chosen=(("scale", 5.0),)),
                Training(WITH_CLIP, seed, "pcmepp", clip=1.0),
                replace(plain, name=PRETRAINING, clip=1.0),
            ]
        return trainings

    def identity(self, training: Training) -> dict:
        return {"values": CHOSEN[training.method]}

    def prepare(self, seeds: Sequence[int], out: Path, tell: Tell) -> World:
        world = draw_world(self.settings.sizes, seeds, tell)
        for part in (world.validation, world.test):
            _ = part.positives
        _ = world.test.ambiguity
        return world

    def step_cost(self, training: Training) -> float:
        return STEP_COST[training.method]

    def steps(self, world: World, training: Training) -> float:
        steps = len(world.training[training.seed].tokens) // self.settings.batch_size * self.settings.epochs
        return steps * self.step_cost(training)

    def starting_steps(self, world: World) -> float:
        part = next(iter(world.pretraining.values()))
        return len(part.tokens) // self.settings.batch_size * self.settings.pretraining_epochs

    def pretrain(self, world: World, seed: int, step_done: Callable[[], object]) -> dict:
        return pretrain(world, self.settings, seed, step_done)

    def train(self, world, training, start, step_done, archive: Archive, test: bool) -> dict:
        return train(world, self.settings, training, start, step_done, test)

    def judge(self, found: Found, archive: Archive) -> list[dict]:
        return findings.judge(found)

    def charts(self, found: Found, claims: list[dict]) -> list[list]:
        return charts.charts(found)

    def describe(self, trainings: int, seeds: Sequence[int]) -> str:
        sizes = self.settings.sizes
        return (
            f"{trainings} trainings, seeds {', '.join(map(str, seeds))}. Each sees {sizes.training:,} scenes with five "
            f"captions {self.settings.epochs} times, after a common pretraining on {sizes.pretraining:,} others, and "
            f"is tested on {sizes.test:,} scenes of which every true caption is known."
        )

    def choose(self, out: Path, workers: int) -> None:
        """Print validation mAP@R for the values of GRID and LEARNING_RATES."""
        archive = Archive(out, self)
        seen: dict[str, list[tuple[float, dict]]] = {method: [] for method in GRID}

        def look(grid: dict[str, list[dict]]) -> None:
            trainings = [
                Training(_title(method, value), SELECTION_SEED, method, chosen=tuple(sorted(value.items())))
                for method, values in grid.items()
                for value in values
            ]
            found = train_all(self, trainings, archive, workers, test=False)
            for training in trainings:
                value = max(found[archive.name(training)]["validation"])
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
