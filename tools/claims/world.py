"""The embedded world for `tools.claims`: scenes in memory, shared by all trainings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from finetune.loading.noise import shuffle_captions
from finetune.loading.pair_samples import PairBatch, epoch_order
from probemb.data.captions.find import CaptionDataset
from probemb.data.labelled.prompts import imagenet_templates, prompt_texts
from probemb.data.scenes import Scene, class_names, class_scene, draw_captions, render, scene
from probemb.evaluation.embed_pairs import exact_match, true_ambiguity
from probemb.metrics import Positives
from probemb.models.inputs import Tokenizer

CONTEXT = 32
MEAN, STD = (0.481, 0.458, 0.408), (0.269, 0.261, 0.276)  # CLIP's
WORD_SCENES = 4000  # their captions contain every word
EXACT_CAPTIONS = 3  # the first of five captions, from exact to vague, that the pretraining sees


@dataclass(frozen=True)
class Sizes:
    """Number of scenes of each kind, and their side in pixels."""

    pixels: int = 32
    pretraining: int = 8000
    training: int = 2048
    validation: int = 250
    test: int = 400
    class_images: int = 1280


@dataclass(frozen=True)
class Part:
    """N images and their M captions.

    Attributes:
        pixels: (N, 3, H, W) uint8.
        tokens: (M, L) int64, of the small vocabulary `Words`.
    """

    dataset: CaptionDataset
    pixels: Tensor
    tokens: Tensor

    def images(self, index: Tensor | slice = slice(None)) -> Tensor:
        """Normalised images, (n, 3, H, W) float32."""
        mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (MEAN, STD))
        return (self.pixels[index].float() / 255 - mean) / std

    @cached_property
    def positives(self) -> Positives:
        """The true captions of every image."""
        return Positives.from_matrix(exact_match(self.dataset, range(len(self.dataset))))

    @cached_property
    def ambiguity(self) -> Tensor:
        """(M,) float64: the share of all images that each caption fits."""
        return true_ambiguity(self.dataset, range(len(self.dataset)))

    def noisy(self, ratio: float, seed: int) -> Part:
        """A copy with a share of the captions at wrong images, as with `finetune --noise-ratio`."""
        dataset, image_of = shuffle_captions(self.dataset, ratio, seed)
        order = np.argsort(image_of, kind="stable")
        return Part(dataset, self.pixels, self.tokens[torch.from_numpy(order)])


@dataclass(frozen=True)
class Classes:
    """Single-object scenes for zero-shot classification.

    pixels (N, 3, H, W) uint8; labels (N,); names of the N images; tokens (C, P, L) of the C classes' P prompts.
    """

    pixels: Tensor
    labels: Tensor
    names: list[str]
    tokens: Tensor


@dataclass(frozen=True)
class World:
    """All scenes; those for pretraining and training by seed."""

    sizes: Sizes
    vocabulary: int
    context: int
    pretraining: dict[int, Part]
    training: dict[int, Part]
    validation: Part
    test: Part
    classes: Classes


class Words:
    """CLIP's tokens that occur, renumbered in order: padding stays 0, and the end token the largest.

    An embedding of all 49,408 tokens would dominate the training step of such small models.
    """

    def __init__(self, texts: Sequence[str]):
        self._tokenizer = Tokenizer(CONTEXT)
        tokens = self._tokenizer(list(dict.fromkeys(texts)))
        self.known = torch.unique(tokens)
        self.context = int((tokens != 0).sum(1).max())

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """(n, L) int64. Raises ValueError: an unknown word, or a text that is too long."""
        distinct = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        tokens = self._tokenizer(list(distinct))
        if not torch.isin(tokens, self.known).all() or (tokens != 0).sum(1).max() > self.context:
            raise ValueError("a text has unknown words or is too long")
        tokens = torch.searchsorted(self.known, tokens)[:, : self.context]
        return tokens[[distinct[text] for text in texts]]


def draw_world(sizes: Sizes, seeds: Sequence[int], tell: Callable[[str], object] = lambda line: None) -> World:
    """Draw all scenes, different ones for every part and seed; a pure function of the arguments."""
    began = time.perf_counter()
    drawn = {f"pretraining {seed}": _scenes(f"claims pretraining {seed}", sizes.pretraining) for seed in seeds}
    drawn |= {f"training {seed}": _scenes(f"claims training {seed}", sizes.training) for seed in seeds}
    drawn |= {name: _scenes(f"claims {name}", getattr(sizes, name)) for name in ("validation", "test")}
    datasets = {
        name: _dataset(name, scenes, slice(EXACT_CAPTIONS) if name.startswith("pretraining") else slice(None))
        for name, scenes in drawn.items()
    }
    prompts = prompt_texts(class_names(), imagenet_templates())
    spoken = _dataset("words", _scenes("claims words", WORD_SCENES), slice(None)).flat()
    words = Words([*spoken, *prompts])  # independent of seeds and sizes: weights are stored between runs
    parts, total, done = {}, sum(map(len, datasets.values())) + sizes.class_images, 0
    for name, dataset in datasets.items():
        parts[name] = Part(dataset, _pixels(drawn[name], sizes.pixels), words(dataset.flat()))
        done += len(dataset)
        left = (time.perf_counter() - began) / done * (total - done)
        tell(f"scenes: {done:,} of {total:,} drawn, about {left:.0f} s left")
    single = [class_scene("claims classes", i) for i in range(sizes.class_images)]
    classes = Classes(
        _pixels(single, sizes.pixels),
        torch.arange(sizes.class_images) % len(class_names()),
        [f"{i:06d}" for i in range(sizes.class_images)],
        words(prompts).view(len(class_names()), -1, words.context),
    )
    return World(
        sizes,
        len(words.known),
        words.context,
        {seed: parts[f"pretraining {seed}"] for seed in seeds},
        {seed: parts[f"training {seed}"] for seed in seeds},
        parts["validation"],
        parts["test"],
        classes,
    )


def _scenes(name: str, count: int) -> list[Scene]:
    return [scene(name, i) for i in range(count)]


def _dataset(name: str, scenes: list[Scene], which: slice) -> CaptionDataset:
    drawn = [draw_captions(one)[which] for one in scenes]
    return CaptionDataset(
        captions=[[caption.text for caption in captions] for captions in drawn],
        image_ids=list(range(len(scenes))),
        scenes=list(zip(scenes, drawn)),
        source=f"the embedded world, {name}",
    )


def _pixels(scenes: Sequence[Scene], size: int) -> Tensor:
    pictures = np.stack([np.asarray(render(one, size)) for one in scenes])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()


class MemoryLoader:
    """`finetune.loading.pair_loader.PairLoader` from memory, with the same order and attributes."""

    def __init__(self, part: Part, batch_size: int, seed: int, step_done: Callable[[], object] = lambda: None):
        self.part, self.batch_size, self.seed, self.step_done = part, batch_size, seed, step_done
        self.n_pairs = len(part.tokens)
        self.steps, self.waited = self.n_pairs // batch_size, 0.0
        self._owner = torch.tensor(part.dataset.owner())

    def epoch(self, n: int, start_step: int = 0) -> Iterator[PairBatch]:
        """Batches of epoch n from a step on; calls `step_done` after each."""
        for pairs in torch.from_numpy(epoch_order(self.n_pairs, self.batch_size, self.seed, n))[start_step:]:
            owner = self._owner[pairs]
            yield PairBatch(self.part.images(owner), self.part.tokens[pairs], owner, pairs)
            self.step_done()
