"""The papers' retrieval methods under one recipe, on photographs or on scenes with exact positives.

    python -m tools.claims --methods all --world flickr8k --data data/flickr8k --word-vectors glove.6B.100d.txt \\
        --images-weights tf_efficientnet_lite0.safetensors --judgements judgements.tsv.gz --out claims-methods
    python -m tools.claims --methods all --world scenes --out claims-methods-scenes

Each training is finetune's command and zeroshot.retrieval's, in processes of their own (`training.py`); OUT/runs has
the run folders, OUT/measured the results, OUT/logs what was printed. The epoch is chosen on validation images. What
differs between methods stands in `variants.py`; everything else is the YAML of the world. `--choose` trains with a seed
of its own at several learning rates, and prints validation RSUM.

On scenes what reads pixels starts from towers that the CLIP loss alone has trained (OUT/start), as the papers' towers
come trained: from random weights the match losses of PCME and PCME++ do not leave the constant answer in 936 steps
(validation RSUM 8 and 22, where InfoNCE has 445), and VSE++'s embeddings become one if the hardest negatives begin
after an epoch (192, then 8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from probemb.errors import UserError
from tools.claims.flickr8k.world import Files
from tools.claims.methods import findings
from tools.claims.methods.training import (
    HERE,
    Inputs,
    Training,
    World,
    measure,
    pretrain,
    seconds_per_step,
    steps_done,
    terminate,
    train,
    validated,
)
from tools.claims.methods.variants import VARIANTS, at_rate, rankings_of, training_of, variant_of
from tools.claims.queue import Archive, train_all
from tools.claims.study import Study, Tell

if TYPE_CHECKING:
    from tools.claims.verdicts import Found

SELECTION_SEED = 1000
LEARNING_RATES = (3e-4, 1e-3, 3e-3)  # of --choose; the worlds' YAMLs have the rate of all trainings
MIN_COUNT = 4  # occurrences of a word of the vocabulary
ARCHITECTURES = {"flickr8k": "vsrn-grid-gru", "scenes": "vsrn-scenes-gru"}  # of what reads regions
GRID = ("--model", "tf_efficientnet_lite0", "--image-size", "128", "--grid", "4")


@dataclass(frozen=True)
class Settings:
    """Settings that all trainings share.

    Attributes:
        world: flickr8k or scenes.
        epochs, batch_size: of every training; 0 epochs for those of the world's YAML.
        scenes, test_scenes: drawn training images, and images of validation and of the test each.
    """

    world: str = "flickr8k"
    epochs: int = 0
    batch_size: int = 128
    scenes: int = 4000
    test_scenes: int = 500


class Methods(Study):
    """The comparison of all methods."""

    title = "Every method under one recipe"
    reading = (
        "All trainings of a seed see the same pairs in the same order, for as many epochs, and choose their epoch on "
        "validation images."
    )
    metric = "RSUM"
    modules = ()

    def __init__(self, files: Files, variants: Sequence[str], settings: Settings):
        if settings.world == "flickr8k" and files.data is None:
            raise UserError("--data is missing.", "Name the shards of Flickr8k, with the splits train, val and test.")
        self.files, self.variants, self.settings = files, list(variants), settings
        self.config = HERE / f"{settings.world}.yaml"
        self.epochs = settings.epochs or yaml.safe_load(self.config.read_text(encoding="utf-8"))["epochs"]

    def plan(self, seeds: Sequence[int]) -> list[Training]:
        """Seed after seed, so that a first seed is complete early."""
        return [training_of(name, seed) for seed in seeds for name in self.variants]

    def identity(self, training: Training) -> dict:
        name = variant_of(training)
        start = {"start": "clip"} if self._starts(name) else {}
        return {"epochs": self.epochs, "rankings": rankings_of(name)} | start

    def _starts(self, name: str) -> bool:
        """True if a variant starts from pretrained towers of drawn scenes."""
        return self.settings.world == "scenes" and not VARIANTS[name].regions

    def prepare(self, seeds: Sequence[int], out: Path, tell: Tell) -> World:
        from probemb.data.captions.find import find_captions

        data, test, test_split = self._data(out, tell)
        train = find_captions(data, "train")
        vocabulary = out / "vocabulary.txt"
        if not vocabulary.is_file():
            from probemb.data.words import count_words, frequent_words, write_vocabulary

            write_vocabulary(vocabulary, frequent_words(count_words(train.flat()), MIN_COUNT))
        shared = [f"--epochs={self.epochs}", f"--batch-size={self.settings.batch_size}"]
        words = [f"--model.vocabulary={vocabulary}"]
        words += [f"--model.word-vectors={self.files.word_vectors}"] if self.files.word_vectors else []
        judged = ["--judgements", str(self.files.judgements)] if self.files.judgements else []
        options = [f"--data.path={data}", *shared]
        if any(map(self._starts, self.variants)):
            tell(f"the towers' pretraining in {out / 'start'}")
            s = self.settings
            options += [f"--model.pretrained={pretrain(data / 'train', vocabulary, s.scenes, s.batch_size, out)}"]
        elif self.settings.world == "flickr8k":
            options += [
                *words,
                f"--model.image-weights={self.files.images_weights or 'timm'}",
                f"--data.cache-features={out / 'features'}",
            ]
        pixels = Inputs(self.config, tuple(options), ("--data", str(test), "--split", test_split, *judged))
        regions = None
        if any(VARIANTS[name].regions for name in self.variants):
            data, test = self._regions(data, test, out, tell)
            options = [f"--data.path={data}", f"--model.name={ARCHITECTURES[self.settings.world]}", *words, *shared]
            options += ["--model.lock-image=false", "--model.image-weights=null"]
            regions = Inputs(self.config, tuple(options), ("--data", str(test), "--split", test_split, *judged))
        return World(pixels, regions, train.n_captions)

    def _data(self, out: Path, tell: Tell) -> tuple[Path, Path, str]:
        """Data with the splits train and val, and the data and split of the test."""
        if self.settings.world == "flickr8k":
            assert self.files.data is not None
            return self.files.data, self.files.data, "test"
        from tools.make_scenes import main as make_scenes

        scenes, test, size = out / "scenes", out / "scenes-test", str(self.settings.test_scenes)
        tell(f"scenes in {scenes} and {test}")
        shared = ["--val", size, "--classes-images", "0", "--boxes"]
        make_scenes([str(scenes), "--train", str(self.settings.scenes), *shared])
        make_scenes([str(test), "--train", "0", "--seed", "1", *shared])
        return scenes, test, "val"

    def _regions(self, data: Path, test: Path, out: Path, tell: Tell) -> tuple[Path, Path]:
        """The same images as regions: data with the splits train and val, and the data of the test."""
        if self.settings.world == "scenes":
            return data / "regions", test / "regions"
        from tools.write_regions.arrays import CAPTIONS, REGIONS, file_of
        from tools.write_regions.command import main as write_regions

        regions = out / "regions"
        missing = [split for split in ("train", "val", "test") if not file_of(regions, split, CAPTIONS).is_file()]
        if missing:
            tell(f"regions in {regions}")
            for split in missing:
                file_of(regions, split, REGIONS).unlink(missing_ok=True)  # written before captions: a start was ended
            weights = str(self.files.images_weights or "timm")
            write_regions(
                ["--data", str(data), "--split", *missing, "--out", str(regions), "--weights", weights, *GRID]
            )
        return regions, regions

    def step_cost(self, training: Training) -> float:
        return VARIANTS[variant_of(training)].step

    def steps(self, world: World, training: Training) -> float:
        return world.pairs // self.settings.batch_size * self.epochs * self.step_cost(training)

    def steps_before(self, training: Training, archive: Archive) -> float:
        return steps_done(archive.out / "runs" / archive.name(training)) * self.step_cost(training)

    def train(self, world: World, training: Training, start, step_done: Callable, archive: Archive, test: bool) -> dict:
        name = archive.name(training)
        inputs = world.regions if VARIANTS[variant_of(training)].regions else world.pixels
        assert inputs is not None
        train(inputs, training, name, archive.out, step_done)
        run = archive.out / "runs" / name
        found: dict = {"validation": validated(run), "step": seconds_per_step(run, self.settings.batch_size)}
        if test:
            found |= findings.extract(measure(inputs, training, name, archive.out, rankings_of(variant_of(training))))
        return found

    def interrupt(self) -> None:
        terminate()

    def judge(self, found: Found, archive: Archive) -> list[dict]:
        return findings.judge(found, self.variants)

    def charts(self, found: Found, claims: list[dict]) -> list[list]:
        return findings.charts(found, claims, self.variants)

    def describe(self, trainings: int, seeds: Sequence[int]) -> str:
        where = "photographs (Flickr8k)" if self.settings.world == "flickr8k" else f"{self.settings.scenes:,} scenes"
        return (
            f"{trainings} trainings of {len(self.variants)} variants, seeds {', '.join(map(str, seeds))}, each of "
            f"{self.epochs} epochs of {where} in batches of {self.settings.batch_size}."
        )

    def choose(self, out: Path, workers: int) -> None:
        """Print validation RSUM of every variant at LEARNING_RATES."""
        archive = Archive(out, self)
        trainings = [at_rate(name, SELECTION_SEED, lr) for name in self.variants for lr in LEARNING_RATES]
        found = train_all(self, trainings, archive, workers, test=False)
        for training in trainings:
            values = found[archive.name(training)]["validation"]
            print(f"{training.name}: {max(values):.1f} ({', '.join(f'{one:.1f}' for one in values)})", flush=True)
