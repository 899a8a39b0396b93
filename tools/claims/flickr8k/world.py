"""Photographs with captions for `tools.claims`: features of a frozen image tower, kept once, and tokens in memory.

N images, M captions, C channels and h x w cells of the tower's last feature map, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from finetune.loading.feature_cache import CachedImages, cache_features
from finetune.loading.noise import shuffle_captions
from finetune.loading.pair_samples import PairBatch, epoch_order
from probemb.data.captions.find import CaptionDataset, find_captions
from probemb.data.words import count_words, frequent_words, read_vectors
from probemb.errors import UserError
from probemb.models import DualEncoder, create_model, create_tokenizer, create_transforms
from probemb.models.features import Features

SPLITS = {"train": "train", "validation": "val", "test": "test"}
BUCKET = 16  # batches whose captions are sorted by length together


class Files(NamedTuple):
    """Paths of the data, as given on the command line; None for what is not there."""

    data: Path
    images_weights: Path | None = None
    word_vectors: Path | None = None
    judgements: Path | None = None
    coco: Path | None = None


@dataclass(frozen=True)
class Part:
    """N images and their M captions, ready to be used.

    Attributes:
        dataset: the captions.
        rows: (N, h * w * C + C) float16, memory-mapped: the feature map, cell after cell, and its average.
        pooled: (N, C) float32, the averages in memory.
        tokens: (M, L) int64.
    """

    dataset: CaptionDataset
    rows: np.ndarray
    pooled: Tensor
    tokens: Tensor

    def maps(self, index: Tensor) -> Tensor:
        """(n,) -> feature maps, (n, C, h, w) float32."""
        channels = self.pooled.shape[1]
        cells = torch.from_numpy(self.rows[index.numpy(), :-channels].astype(np.float32))
        side = round((cells.shape[1] / channels) ** 0.5)
        return cells.view(len(index), side, side, channels).permute(0, 3, 1, 2)

    def noisy(self, ratio: float, seed: int) -> Part:
        """The same with a share of the captions at wrong images, as `finetune --noise-ratio` moves them."""
        dataset, image_of = shuffle_captions(self.dataset, ratio, seed)
        order = np.argsort(image_of, kind="stable")
        return Part(dataset, self.rows, self.pooled, self.tokens[torch.from_numpy(order)])


class KeptFeatures:
    """In place of a `FeatureLayout`: averages (B, C) or maps (B, C, h, w) -> the features that heads read."""

    def __init__(self, probabilistic: bool):
        self.probabilistic = probabilistic

    def unpack(self, kept: Tensor) -> tuple[Features, Features | None]:
        """The same features for the mean and for the log-variance."""
        if kept.ndim == 2:
            features = Features(kept.new_empty(len(kept), 0, kept.shape[1]), kept)
        else:
            tokens = kept.flatten(2).transpose(1, 2)
            features = Features(tokens, tokens.mean(1))
        return features, features if self.probabilistic else None


@dataclass(frozen=True)
class World:
    """All parts, the vocabulary of the training captions and the vectors of its words."""

    train: Part
    validation: Part
    test: Part
    coco: Part | None
    vocabulary: list[str]
    vectors: dict[str, np.ndarray]


def read_world(files: Files, settings, features: Path, tell: Callable[[str], object]) -> World:
    """Read captions, compute features that are not kept in the folder `features`, and tokenise.

    Raises:
        UserError: data, weights or vectors cannot be read.
    """
    datasets = {name: find_captions(files.data, split) for name, split in SPLITS.items()}
    if files.coco is not None:
        datasets["coco"] = captioned(files.coco)
    counts = count_words(datasets["train"].flat())
    vocabulary = [word for word, _ in frequent_words(counts, settings.min_count)]
    if not vocabulary:
        raise UserError(
            f"No word occurs {settings.min_count} times in the captions of {files.data}.", "Name more captions."
        )
    weights = None if files.images_weights is None else str(files.images_weights)
    model = reading_model(settings, vocabulary, weights)
    tokenizer, parts = create_tokenizer(model), {}
    for name, dataset in datasets.items():
        tell(f"features of the {name} images: {len(dataset):,} in {features}")
        cached = cache_features([model], create_transforms(model).evaluate, dataset, features, failure_share=0.0).images
        assert isinstance(cached, CachedImages)
        channels = dict(model.image_tower.feature_layout.parts)["pooled"][0]
        pooled = torch.from_numpy(np.array(cached.rows[:, -channels:], np.float32))
        parts[name] = Part(dataset, cached.rows, pooled, tokenizer(dataset.flat()))
    vectors = {} if files.word_vectors is None else read_vectors(files.word_vectors, vocabulary)
    tell(f"{len(vectors):,} of {len(vocabulary):,} words start from a vector")
    return World(parts["train"], parts["validation"], parts["test"], parts.get("coco"), vocabulary, vectors)


def captioned(path: Path) -> CaptionDataset:
    """Images with captions; others in the same shards are not counted as unusable."""
    found = find_captions(path)
    return replace(found, located=replace(found.images, bad=[]))


def reading_model(settings, vocabulary: list[str], weights: str | None) -> DualEncoder:
    """A model whose head reads tokens, so that whole feature maps are kept; only its image trunk matters."""
    torch.manual_seed(0)
    return create_model(
        settings.name, embed_dim=8, head="gpo", probabilistic=False, vocabulary=vocabulary, image_weights=weights
    )


def bucketed_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """`epoch_order` with captions of similar length in a batch, (steps, batch_size): less padding.

    The captions of BUCKET batches are sorted by length and cut into batches again; the batches come in random order. A
    function of its arguments alone.
    """
    order = epoch_order(len(lengths), batch_size, seed, epoch)
    batches = []
    for start in range(0, len(order), BUCKET):
        bucket = order[start : start + BUCKET].ravel()
        bucket = bucket[np.argsort(lengths[bucket], kind="stable")]
        batches.append(bucket.reshape(-1, batch_size))
    return np.concatenate(batches)[epoch_order(len(order), 1, seed, epoch).ravel()]


class Loader:
    """In place of `finetune.loading.pair_loader.PairLoader`: batches from memory, in `bucketed_order`.

    Attributes:
        steps, batch_size, waited: as there.
    """

    def __init__(
        self, part: Part, batch_size: int, seed: int, whole_maps: bool, step_done: Callable[[], object] = lambda: None
    ):
        self.part, self.batch_size, self.seed = part, batch_size, seed
        self.whole_maps, self.step_done = whole_maps, step_done
        self.n_pairs = len(part.tokens)
        self.steps, self.waited = self.n_pairs // batch_size, 0.0
        self._owner = torch.tensor(part.dataset.owner())
        self._lengths = (part.tokens != 0).sum(1).numpy()

    def epoch(self, n: int, start_step: int = 0) -> Iterator[PairBatch]:
        """The batches of epoch n from a step on; `step_done` is called after each."""
        order = torch.from_numpy(bucketed_order(self._lengths, self.batch_size, self.seed, n))
        for pairs in order[start_step:]:
            owner = self._owner[pairs]
            images = self.part.maps(owner) if self.whole_maps else self.part.pooled[owner]
            yield PairBatch(images, self.part.tokens[pairs], owner, pairs)
            self.step_done()
