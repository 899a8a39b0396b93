"""The synthetic world for `tools.claims`: scenes drawn once, kept as bytes in memory, and shared by all trainings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from finetune.loading.noise import shuffle_captions
from finetune.loading.pair_samples import PairBatch
from finetune.loading.rows import epoch_order
from probemb.data.captions.find import CaptionDataset
from probemb.data.labelled.prompts import imagenet_templates, prompt_texts
from probemb.data.scenes import Scene, class_names, class_scene, draw_captions, render, scene
from probemb.evaluation.embed_pairs import exact_match, true_ambiguity
from probemb.metrics import Positives
from probemb.models.inputs import Tokenizer

CONTEXT = 32
MEAN, STD = (0.481, 0.458, 0.408), (0.269, 0.261, 0.276)  # CLIP's
WORD_SCENES = 4000  # whose captions have all words that there are
SURE_CAPTIONS = 3  # of five, from exact to vague: those that the pretraining sees


@dataclass(frozen=True)
class Sizes:
    """Numbers of scenes of each kind, and their side in pixels."""

    pixels: int = 32
    pretraining: int = 8000
    training: int = 2048
    validation: int = 250
    test: int = 400
    class_images: int = 1280


@dataclass(frozen=True)
class Part:
    """N images and their M captions, ready to be used.

    Attributes:
        dataset: the captions, and with them what they state.
        pixels: (N, 3, H, W) uint8.
        tokens: (M, L) int64, numbers of the world's own small vocabulary.
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
        """True captions of each image, images as queries."""
        return Positives.from_matrix(exact_match(self.dataset, range(len(self.dataset))))

    @cached_property
    def ambiguity(self) -> Tensor:
        """(M,) float64, the share of all images that each caption fits."""
        return true_ambiguity(self.dataset, range(len(self.dataset)))

    def noisy(self, ratio: float, seed: int) -> Part:
        """The same with a share of the captions at wrong images, as `finetune --noise-ratio` moves them."""
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
    """Everything that is drawn: pretraining and training scenes by seed, and what all seeds share."""

    sizes: Sizes
    vocabulary: int
    context: int
    pretraining: dict[int, Part]
    training: dict[int, Part]
    validation: Part
    test: Part
    classes: Classes


class Words:
    """CLIP's tokens renumbered in their order: only those that occur. Padding stays 0, the end token the largest.

    A table of all 49,408 tokens would take most of a training step of a model as small as these.
    """

    def __init__(self, texts: Sequence[str]):
        self._tokenizer = Tokenizer(CONTEXT)
        tokens = self._tokenizer(list(dict.fromkeys(texts)))
        self.known = torch.unique(tokens)
        self.context = int((tokens != 0).sum(1).max())

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """(n, L) int64 of texts whose words are known."""
        distinct = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        tokens = self._tokenizer(list(distinct))
        if not torch.isin(tokens, self.known).all() or (tokens != 0).sum(1).max() > self.context:
            raise ValueError("a text has words, or a length, that the vocabulary was not made for")
        tokens = torch.searchsorted(self.known, tokens)[:, : self.context]
        return tokens[[distinct[text] for text in texts]]


def draw_world(sizes: Sizes, seeds: Sequence[int], tell: Callable[[str], object] = lambda line: None) -> World:
    """Draw all scenes. Every part and every seed has scenes of its own; the same arguments give the same world."""
    began = time.perf_counter()
    drawn = {f"pretraining {seed}": draw_scenes(f"claims pretraining {seed}", sizes.pretraining) for seed in seeds}
    drawn |= {f"training {seed}": draw_scenes(f"claims training {seed}", sizes.training) for seed in seeds}
    drawn |= {name: draw_scenes(f"claims {name}", getattr(sizes, name)) for name in ("validation", "test")}
    told = {
        name: describe_scenes(name, scenes, slice(SURE_CAPTIONS) if name.startswith("pretraining") else slice(None))
        for name, scenes in drawn.items()
    }
    prompts = prompt_texts(class_names(), imagenet_templates())
    spoken = describe_scenes("words", draw_scenes("claims words", WORD_SCENES), slice(None)).flat()
    words = Words([*spoken, *prompts])  # the same whatever the seeds and sizes: weights are kept between runs
    parts, total, done = {}, sum(map(len, told.values())) + sizes.class_images, 0
    for name, dataset in told.items():
        parts[name] = Part(dataset, draw_pixels(drawn[name], sizes.pixels), words(dataset.flat()))
        done += len(dataset)
        left = (time.perf_counter() - began) / done * (total - done)
        tell(f"scenes: {done:,} of {total:,} drawn, about {left:.0f} s left")
    single = [class_scene("claims classes", i) for i in range(sizes.class_images)]
    classes = Classes(
        draw_pixels(single, sizes.pixels),
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


def draw_scenes(name: str, count: int) -> list[Scene]:
    """The first scenes of the series `name`, without their pictures."""
    return [scene(name, i) for i in range(count)]


def describe_scenes(name: str, scenes: list[Scene], which: slice = slice(None)) -> CaptionDataset:
    """The scenes with those of their captions, which are in order from exact to vague."""
    told = [draw_captions(one)[which] for one in scenes]
    return CaptionDataset(
        captions=[[caption.text for caption in captions] for captions in told],
        image_ids=list(range(len(scenes))),
        scenes=list(zip(scenes, told)),
        source=f"the synthetic world, {name}",
    )


def draw_pixels(scenes: Sequence[Scene], size: int) -> Tensor:
    """(N, 3, size, size) uint8."""
    pictures = np.stack([np.asarray(render(one, size)) for one in scenes])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()


class MemoryLoader:
    """In place of `finetune.loading.pair_loader.PairLoader`: the same epochs in the same order, from memory.

    Attributes:
        steps, batch_size, waited, groups: as there.
    """

    def __init__(self, part: Part, batch_size: int, seed: int, step_done: Callable[[], object] = lambda: None):
        self.part, self.batch_size, self.seed, self.step_done = part, batch_size, seed, step_done
        self.n_pairs = len(part.tokens)
        self.steps, self.waited = self.n_pairs // batch_size, 0.0
        self._owner = torch.tensor(part.dataset.owner())
        self.groups = torch.arange(len(part.dataset))

    def order(self, n: int) -> np.ndarray:
        """The pairs of epoch n, (steps, batch_size)."""
        return epoch_order(self.n_pairs, self.batch_size, self.seed, n)

    def epoch(self, n: int, start_step: int = 0) -> Iterator[PairBatch]:
        """The batches of epoch n from a step on; `step_done` is called after each."""
        for pairs in torch.from_numpy(self.order(n))[start_step:]:
            owner = self._owner[pairs]
            yield PairBatch(self.part.images(owner), self.part.tokens[pairs], owner, pairs)
            self.step_done()
