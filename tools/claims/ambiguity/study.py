"""The meaning of the variance, by what the labels say, on scenes whose true matches are all known.

    python -m tools.claims --world ambiguity --out claims-ambiguity

A seed has one start, `scenes-cnn-gru` trained from random weights with the CLIP and the match loss, as in the demo.
Finetunings of that start on 2,000 other scenes differ in their loss and their labels, and two more trainings begin with
random weights. An epoch sees every scene once, with one of its five captions. a and b of the match probability continue
from the start's values, or are set to 5, as `finetune` does by default. The weights of the ranking "tolerance" are
chosen on validation scenes, one of each direction, by mAP@R of all true matches. OUT/scenes keeps the pictures and
OUT/embeddings the embeddings, so that `--report` measures again without training.

`--choose` finetunes with a seed of its own at other learning rates and weights of the CLIP loss, and prints on
validation scenes what the recipe has to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from probemb.models.match import MatchModel
from tools.claims.ambiguity import charts, findings
from tools.claims.ambiguity.measuring import look, measure
from tools.claims.ambiguity.training import NOTHING, RANDOM, START, Settings, Training, pretrain, train
from tools.claims.ambiguity.world import World, draw_world
from tools.claims.embeddings import keep_embeddings, read_embeddings
from tools.claims.queue import Archive, train_all
from tools.claims.scenes.measuring import embed
from tools.claims.study import Study, Tell
from tools.claims.verdicts import Found

SELECTION_SEED = 1000
GRID = {"lr": (1e-4, 2.5e-4, 5e-4, 1e-3), "clip": (1.0, 4.0)}


class Ambiguity(Study):
    """The study of what the variance comes to mean."""

    title = "What the variance comes to mean"
    reading = (
        "All trainings of a seed see the same scenes in the same order. Everything that is chosen is chosen on "
        "validation scenes."
    )
    metric, percent = "mAP@R", 100.0

    def __init__(self, settings: Settings | None = None):
        self.settings = settings or Settings()

    def plan(self, seeds: Sequence[int]) -> list[Training]:
        """All finetunings, seed after seed, then what begins with random weights and takes longer."""
        trainings = []
        for seed in seeds:
            match = Training("match", seed, kept=True)
            recipe = replace(match, name="recipe", clip=1.0)
            trainings += [
                Training("start", seed, NOTHING),
                recipe,
                replace(recipe, name="recipe frozen", frozen=True),
                match,
                replace(match, name="match with PP", pseudo_positive=0.1),
                replace(recipe, name="recipe with PP", pseudo_positive=0.1),
                replace(match, name="all true", all_true=True),
                replace(recipe, name="recipe all true", all_true=True),
                replace(recipe, name="recipe a=5", kept=False),
                replace(match, name="match a=5", kept=False),
                replace(match, name="match with PP a=5", kept=False, pseudo_positive=0.1),
            ]
        for seed in seeds:
            random = Training("random match", seed, RANDOM)
            trainings += [random, replace(random, name="random all true", all_true=True)]
        return trainings

    def identity(self, training: Training) -> dict:
        return {}

    def prepare(self, seeds: Sequence[int], out: Path, tell: Tell) -> World:
        world = draw_world(self.settings.name, self.settings.sizes, seeds, out / "scenes", tell)
        for part in (world.validation, world.test):
            _ = part.positives, part.ambiguity
        return world

    def step_cost(self, training: Training) -> float:
        return 1.0

    def steps(self, world: World, training: Training) -> float:
        sizes = self.settings.sizes
        scenes = {NOTHING: 0, RANDOM: sizes.start, START: sizes.training}[training.begin]
        return scenes // self.settings.batch_size * training.epochs(self.settings)

    def starting_steps(self, world: World) -> float:
        return self.settings.sizes.start // self.settings.batch_size * self.settings.start_epochs

    def pretrain(self, world: World, seed: int, step_done: Callable[[], object]) -> dict:
        return pretrain(world, self.settings, seed, step_done)

    def train(self, world: World, training: Training, start, step_done: Callable, archive: Archive, test: bool) -> dict:
        model = train(world, self.settings, training, start, step_done)
        scalars = {"scale": model.scale.item(), "shift": model.shift.item()}
        parts = {"validation": world.validation, **({"test": world.test} if test else {})}
        embedded = {name: embed(model, part) for name, part in parts.items()}
        if not test:
            return _looked(embedded["validation"], world)
        keep_embeddings(archive.embeddings(archive.name(training)), embedded)
        return self.measure_again(world, training, scalars, archive)

    def measure_again(self, world: World, training: Training, found: dict, archive: Archive) -> dict:
        """Measure from the kept embeddings, as `train` does."""
        parts = read_embeddings(archive.embeddings(archive.name(training)))
        found = {**found, **_looked(parts["validation"], world)}
        weights, match = found["chosen_by"]["tolerance"], MatchModel(found["scale"], found["shift"])
        closely = training.name in findings.CLOSELY
        return {**found, **measure(parts["test"], world.test, weights, match, closely)}

    def judge(self, found: Found, archive: Archive) -> list[dict]:
        return findings.judge(found)

    def charts(self, found: Found, claims: list[dict]) -> list[list]:
        return charts.charts(found, claims)

    def describe(self, trainings: int, seeds: Sequence[int]) -> str:
        s = self.settings
        return (
            f"{trainings} trainings, seeds {', '.join(map(str, seeds))}. A seed's start sees {s.sizes.start:,} scenes "
            f"{s.start_epochs} times, its finetunings see {s.sizes.training:,} others {s.epochs} times, each time with "
            f"one of five captions; all are tested on {s.sizes.test:,} scenes whose true captions are all known."
        )

    def choose(self, out: Path, workers: int) -> None:
        """Print, on validation scenes, the start and the recipe at every value of GRID."""
        archive = Archive(out, self)
        trainings = [Training("choose start", SELECTION_SEED, NOTHING)] + [
            Training(f"choose lr {lr:g} clip {clip:g}", SELECTION_SEED, clip=clip, lr=lr)
            for lr in GRID["lr"]
            for clip in GRID["clip"]
        ]
        found = train_all(self, trainings, archive, workers, test=False)
        for training in trainings:
            one = found[archive.name(training)]["chosen_by"]
            print(
                f"{training.name}: Spearman {one['spearman']:+.3f}, mAP@R i->t {100 * one['i2t']:.2f}, "
                f"t->i {100 * one['t2i']:.2f}, RSUM {one['rsum']:.1f}",
                flush=True,
            )


def _looked(validation, world: World) -> dict:
    """Metrics on validation scenes, and the mean of their mAP@R as the validation metric."""
    one = look(validation, world.validation)
    return {"chosen_by": one, "validation": [(one["i2t"] + one["t2i"]) / 2]}
