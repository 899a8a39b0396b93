"""Claims on photographs: Flickr8k, and captioned COCO images that nothing is trained on.

    python -m tools.claims --world flickr8k --data data/flickr8k --images-weights tf_efficientnet_lite0.safetensors \\
        --word-vectors glove.6B.100d.txt --judgements judgements.tsv.gz --coco data/coco --out claims-flickr8k

A frozen EfficientNet-Lite0 gives the feature map of every image once, in OUT/features; heads and a bidirectional GRU
over words learn. Every training has the same number of epochs, batch, schedule and order of the pairs. The epoch, the
learning rate and the weights of the ranking "tolerance" are chosen on validation images. OUT/embeddings keeps the
embeddings of the validation, test and COCO images, so that `--report` measures anew without training.

MSDA mixes feature maps, cell by cell, with Mixup or CutMix (manifold mixup): the frozen tower sees whole images alone.

`--choose` trains with a seed of its own and prints validation RSUM: every method at the learning rates of GRID, and the
match loss from random heads in the ways of NEEDS. CHOSEN's temperature, margins and scalars' rate are set, not chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from probemb.data.captions.find import CaptionDataset, find_captions
from probemb.errors import UserError
from probemb.metrics.coco import package_metrics
from tools.claims.embeddings import keep_embeddings, read_embeddings
from tools.claims.flickr8k import charts, findings
from tools.claims.flickr8k.judging import Judge
from tools.claims.flickr8k.measuring import measure
from tools.claims.flickr8k.training import CHOSEN, GRID, NEEDS, Settings, Training, embed, fit, reads_maps
from tools.claims.flickr8k.world import SPLITS, Files, World, read_world
from tools.claims.queue import Archive, train_all
from tools.claims.study import Study, Tell
from tools.claims.verdicts import Found

NOISE = (0.2, 0.5)
NOISY = ("infonce", "recipe", "decl", "ncr")
NOISE_ALPHA = {0.0: 0.1, 0.2: 0.01, 0.5: 0.0}  # the paper's pseudo-positive weights
PAPERS_START = (("scale", 5.0), ("shift", 5.0), ("scalars", 1.0))  # a = b = 5, which learn at lr
RECIPE_CLIP = 0.3  # weight of the CLIP loss
SELECTION_SEED = 1000
STEP_COST = {"pcme": 1.5, "ncr": 2.2}  # others: 1


class Flickr8k(Study):
    """The study of photographs."""

    title = "The claims on photographs"
    reading = (
        "All trainings of a seed see the same pairs in the same order. Everything is chosen on validation images; only "
        'numbers labelled "oracle" involve a choice on what is measured.'
    )
    metric = "RSUM"

    def __init__(self, files: Files, settings: Settings | None = None):
        self.files, self.settings = files, settings or Settings()
        for name in ("images_weights", "word_vectors", "judgements"):
            path = getattr(files, name)
            if path is not None and not path.is_file():
                raise UserError(f"--{name.replace('_', '-')} {path} is no file.", "Check the spelling.")

    def plan(self, seeds: Sequence[int]) -> list[Training]:
        """All trainings, seed after seed."""
        trainings = []
        for seed in seeds:
            pcmepp = Training("pcmepp", seed, "pcmepp")
            recipe = replace(pcmepp, name="recipe", clip=RECIPE_CLIP)
            trainings += [
                *(Training(method, seed, method) for method in ("infonce", "vse", "pcme")),
                pcmepp,
                recipe,
                replace(recipe, name="clip 1", clip=1.0),
                replace(pcmepp, name="pcmepp a=5", chosen=PAPERS_START),
                replace(pcmepp, name="with PP", pseudo_positive=0.1),
                replace(pcmepp, name="with MSDA", mix=0.25),
                replace(pcmepp, name="without VIB", vib=0.0),
            ]
            for noise in NOISE:
                for name in NOISY:
                    clean = next((one for one in trainings if (one.name, one.seed) == (name, seed)), None)
                    clean = clean or Training(name, seed, name)
                    trainings.append(replace(clean, name=f"{name} noise {noise:.0%}", noise=noise))
        return trainings

    def identity(self, training: Training) -> dict:
        return {"values": training.values}

    def prepare(self, seeds: Sequence[int], out: Path, tell: Tell) -> World:
        if self.files.coco is not None:
            package_metrics()  # once, before workers are forked
        return read_world(self.files, self.settings, out / "features", tell)

    def step_cost(self, training: Training) -> float:
        return STEP_COST.get(training.method, 1.0)

    def steps(self, world: World, training: Training) -> float:
        networks = 2 if training.method == "ncr" else 1
        steps = len(world.train.tokens) // self.settings.batch_size * training.epochs(self.settings) * networks
        return steps * self.step_cost(training)

    def train(self, world: World, training: Training, start, step_done: Callable, archive: Archive, test: bool) -> dict:
        model, found = fit(world, self.settings, training, step_done)
        if not test:
            return found
        one = model.models[0] if hasattr(model, "models") else model
        parts = {"validation": world.validation, "test": world.test, "coco": world.coco}
        embedded = {name: embed(model, part, reads_maps(one)) for name, part in parts.items() if part is not None}
        keep_embeddings(archive.embeddings(archive.name(training)), embedded)
        return self.measure_again(world, training, found, archive)

    def measure_again(self, world: World, training: Training, found: dict, archive: Archive) -> dict:
        """Measure from the kept embeddings, as `train` does."""
        parts = read_embeddings(archive.embeddings(archive.name(training)))
        datasets = {"validation": world.validation.dataset, "test": world.test.dataset}
        if "coco" in parts and world.coco is None:
            del parts["coco"]
        if world.coco is not None:
            datasets["coco"] = world.coco.dataset
        about = {"probabilistic": training.probabilistic, "sampled": training.method == "pcme"}
        scalars = {name: found.get(name, 1.0) for name in ("scale", "shift")}
        found = {**found, **measure(parts, datasets, {**about, **scalars})}
        judge = self.make_judge(world.test.dataset)
        return found if judge is None else {**found, "judged": judge.measure(*parts["test"], training.probabilistic)}

    def make_judge(self, test: CaptionDataset | None = None) -> Judge | None:
        """People's judgements of test pairs, if they were given."""
        if self.files.judgements is None:
            return None
        return Judge(self.files.judgements, test or find_captions(self.files.data, SPLITS["test"]))

    def judge(self, found: Found, archive: Archive) -> list[dict]:
        judge = self.make_judge()
        return findings.judge(found, None if judge is None else judge.compare(found, archive, findings.PROBABILISTIC))

    def charts(self, found: Found, claims: list[dict]) -> list[list]:
        return charts.charts(found, claims)

    def describe(self, trainings: int, seeds: Sequence[int]) -> str:
        sizes = {name: len(find_captions(self.files.data, split)) for name, split in SPLITS.items()}
        coco = ""
        if self.files.coco is not None:
            images = len(find_captions(self.files.coco))
            coco = f", and on {images:,} captioned COCO images that nothing was trained on"
        return (
            f"{trainings} trainings, seeds {', '.join(map(str, seeds))}. Each sees {sizes['train']:,} photographs with "
            f"their captions {self.settings.epochs} times, chooses its epoch on {sizes['validation']:,} others, and is "
            f"tested on {sizes['test']:,}{coco}."
        )

    def choose(self, out: Path, workers: int) -> None:
        """Print validation RSUM of every entry of CHOSEN at the learning rates of GRID, and of NEEDS."""
        archive = Archive(out, self)
        trainings = [
            Training(
                f"choose {name} lr {lr:g}", SELECTION_SEED, name.partition(" ")[0], chosen=(("lr", lr),),
                clip=RECIPE_CLIP * name.endswith("with CLIP"),
            )
            for name in CHOSEN
            for lr in GRID["lr"]
        ]  # fmt: skip
        trainings += [
            Training(f"choose {name}", SELECTION_SEED, "pcmepp", clip=clip, chosen=tuple(values.items()))
            for name, (clip, values) in NEEDS.items()
        ]
        found = train_all(self, trainings, archive, workers, test=False)
        for training in trainings:
            values = found[archive.name(training)]["validation"]
            print(f"{training.name}: {max(values):.1f} ({', '.join(f'{one:.1f}' for one in values)})", flush=True)
