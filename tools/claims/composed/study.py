"""MPC against every rival and ablation, on drawn scenes with exact targets or on photographs (COCO's categories).

    python -m tools.claims --methods composed --out claims-composed
    python -m tools.claims --methods composed --world coco_small --data data/coco_small --lists data/coco_text/mpc \\
        --images-weights tf_efficientnet_lite0.safetensors --word-vectors glove.6B.100d.txt.gz --out claims-coco

All methods of a seed have the same frozen image trunk, the same examples in the same order, and start from the same
random numbers; heads, the words' GRU and the composer learn. The epoch is chosen by R-Precision on validation images.
The drawn world lies in OUT/scenes; its trunk (`trunk.py`) and the features in OUT/features.

How the values of CHOSEN were found: `--choose` trains every variant with a seed of its own at its learning rate and the
next ones and, where the loss has a temperature, at a quarter and at four times of it, and prints R-Precision on the
validation images; the best were taken, until none beside them was a point better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.errors import UserError
from tools.claims.composed import charts, findings
from tools.claims.composed.training import Settings, fit, repeats_of
from tools.claims.composed.variants import CHOSEN, SEEN, VARIANTS, Training, neighbours, training_of
from tools.claims.composed.world import Files, World, read_world
from tools.claims.queue import train_all
from tools.claims.study import Study, Tell

if TYPE_CHECKING:
    from tools.claims.queue import Archive
    from tools.claims.verdicts import Found

SELECTION_SEED = 1000
STEP_COST = 1.0


class Composed(Study):
    """The comparison of composers."""

    title = "Composed retrieval: MPC and its rivals"
    reading = (
        "Queries are two to four images and texts in any mixture; targets are the images with all of their concepts. "
        "All methods of a seed have the same frozen image trunk and see the same examples in the same order."
    )
    metric = "R-Precision"

    def __init__(self, settings: Settings, files: Files | None = None, variants: Sequence[str] = tuple(VARIANTS)):
        self.settings, self.files, self.variants = settings, files or Files(), list(variants)
        if not settings.images:
            self.variants = [name for name in self.variants if VARIANTS[name].setup == SEEN]
        if settings.images and any(self.files):
            raise UserError("Drawn scenes read no files.", "Leave them out, or add --world coco_small.")
        if not settings.images and self.files.data is None:
            raise UserError("--data is missing.", "Name the shards with categories, such as data/coco_small.")

    def plan(self, seeds: Sequence[int]) -> list[Training]:
        """Seed after seed, so that a first seed is complete early."""
        return [training_of(name, seed) for seed in seeds for name in self.variants]

    def identity(self, training: Training) -> dict:
        return {"values": training.values}

    def prepare(self, seeds: Sequence[int], out: Path, tell: Tell) -> World:
        from tools.claims.composed.trunk import draw_scenes

        files = self.files
        if self.settings.images:
            files = files._replace(data=draw_scenes(self.settings, out / "scenes", tell))
        world = read_world(files, self.settings, out / "features", tell)
        for line in world.about:
            tell(line)
        return world

    def step_cost(self, training: Training) -> float:
        return STEP_COST

    def steps(self, world: World, training: Training) -> float:
        s = self.settings
        return (
            len(world.trained(training).tuples) * repeats_of(world, s, training) // s.batch_size * s.epochs * STEP_COST
        )

    def train(self, world: World, training: Training, start, step_done: Callable, archive: Archive, test: bool) -> dict:
        from probemb.models import create_tokenizer
        from tools.claims.composed.measuring import measure

        model, values = fit(world, self.settings, training, step_done)
        found: dict = {"validation": values}
        if not test:
            return found
        return found | measure(model, create_tokenizer(model), world, training) | {"about": list(world.about)}

    def judge(self, found: Found, archive: Archive) -> list[dict]:
        return findings.judge(found, self.variants)

    def charts(self, found: Found, claims: list[dict]) -> list[list]:
        return charts.charts(found, claims, self.variants)

    def describe(self, trainings: int, seeds: Sequence[int]) -> str:
        s = self.settings
        where = f"{s.images:,} composed scenes" if s.images else "photographs with COCO's categories"
        return (
            f"{trainings} trainings of {len(self.variants)} variants, seeds {', '.join(map(str, seeds))}, each of "
            f"{s.epochs} epochs with {s.repeats} examples of a combination in batches of {s.batch_size}, on {where}."
        )

    def choose(self, out: Path, workers: int) -> None:
        """Print validation R-Precision of the variants in CHOSEN at their values, and around them."""
        from tools.claims.queue import Archive

        archive, trainings = Archive(out, self), []
        for name in [one for one in self.variants if one in CHOSEN]:
            one = training_of(name, SELECTION_SEED)
            trainings += [
                replace(one, name=f"choose {name} {what} {at:g}", chosen=tuple({**one.values, what: at}.items()))
                for what, at in neighbours(one.values)
            ]
        found = train_all(self, trainings, archive, workers, test=False)
        for training in trainings:
            values = found[archive.name(training)]["validation"]
            print(f"{training.name}: {max(values):.1f} ({', '.join(f'{one:.1f}' for one in values)})", flush=True)
