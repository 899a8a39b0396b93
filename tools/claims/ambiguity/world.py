"""Scenes for the study of the variance: pictures drawn once and kept in OUT/scenes, captions as numbers of words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from finetune.loading.rows import epoch_order
from probemb.data.scenes import Scene
from probemb.data.words import count_words, frequent_words
from probemb.files import replace_file
from probemb.models import create_model, create_tokenizer
from tools.claims.scenes.world import (
    WORD_SCENES,
    MemoryLoader,
    Part,
    describe_scenes,
    draw_pixels,
    draw_scenes,
)

CHUNK = 1000  # scenes drawn between two lines of progress


@dataclass(frozen=True)
class Sizes:
    """Numbers of scenes of each kind, and their side in pixels."""

    pixels: int = 64
    start: int = 20_000
    training: int = 2000
    validation: int = 1000
    test: int = 1000


@dataclass(frozen=True)
class World:
    """Everything that is drawn: scenes of the start, which all seeds share, of the finetunings by seed, and others."""

    vocabulary: list[str]
    start: Part
    training: dict[int, Part]
    validation: Part
    test: Part


def draw_world(
    name: str, sizes: Sizes, seeds: Iterable[int], folder: Path, tell: Callable[[str], object] = lambda line: None
) -> World:
    """Draw all scenes, or read those that are kept in `folder`. Every part and every seed has scenes of its own.

    Args:
        name: the architecture, whose tokenizer reads the captions.
    """
    spoken = describe_scenes("words", draw_scenes("claims words", WORD_SCENES)).flat()
    vocabulary = [word for word, _ in frequent_words(count_words(spoken))]  # the same whatever the seeds and sizes
    tokenizer = create_tokenizer(create_model(name, n_unc_layers=0, vocabulary=vocabulary))

    def part(series: str, count: int) -> Part:
        scenes = draw_scenes(f"claims ambiguity {series}", count)
        dataset = describe_scenes(series, scenes)
        path = folder / f"{series.replace(' ', '-')}-{count}-{sizes.pixels}.npy"
        return Part(dataset, _kept_pixels(path, scenes, sizes.pixels, tell), tokenizer(dataset.flat()))

    return World(
        vocabulary,
        part("start", sizes.start),
        {seed: part(f"training {seed}", sizes.training) for seed in seeds},
        part("validation", sizes.validation),
        part("test", sizes.test),
    )


def _kept_pixels(path: Path, scenes: list[Scene], size: int, tell: Callable[[str], object]) -> Tensor:
    """(N, 3, size, size) uint8, memory-mapped from `path`, which is written first if it is not there."""
    if not path.exists():
        parts = []
        for first in range(0, len(scenes), CHUNK):
            parts.append(draw_pixels(scenes[first : first + CHUNK], size).numpy())
            tell(f"{path.stem}: {min(first + CHUNK, len(scenes)):,} of {len(scenes):,} scenes drawn")
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda aside: _save(aside, np.concatenate(parts)))
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def _save(path: Path, pixels: np.ndarray) -> None:
    with open(path, "wb") as file:  # np.save appends an ending to names without one
        np.save(file, pixels)


class OneCaption(MemoryLoader):
    """Epochs of scenes: each once, with one of its captions, in the next epoch with another."""

    def __init__(self, part: Part, batch_size: int, seed: int, step_done: Callable[[], object] = lambda: None):
        super().__init__(part, batch_size, seed, step_done)
        counts = np.bincount(self._owner.numpy())
        self.steps, self._counts, self._first = len(counts) // batch_size, counts, counts.cumsum() - counts
        self._offset = np.random.default_rng([seed, len(counts)]).integers(0, counts)

    def order(self, n: int) -> np.ndarray:
        """The pairs of epoch n, (steps, batch_size)."""
        scenes = epoch_order(len(self._counts), self.batch_size, self.seed, n)
        return self._first[scenes] + (self._offset[scenes] + n) % self._counts[scenes]
