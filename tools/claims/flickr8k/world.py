"""Photographs with captions for `tools.claims`: features of a frozen image tower, kept once, and tokens in memory.

N images, M captions, L tokens; h x w cells of the tower's feature map with C channels: those of the mean's features
and, where they are others, those of the log-variance's behind them.
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
from finetune.loading.pair_samples import PairBatch
from finetune.loading.rows import epoch_order
from probemb.data.captions.find import CaptionDataset, find_captions
from probemb.data.words import count_words, frequent_words, read_vectors
from probemb.errors import UserError
from probemb.models import DualEncoder, create_model, create_tokenizer
from probemb.models.features import FeatureLayout, Features

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
        rows: (N, width) float16, memory-mapped, and their `layout`.
        pooled: (N, C) float32, averages of the feature maps, in memory.
        tokens: (M, L) int64.
    """

    dataset: CaptionDataset
    rows: np.ndarray
    layout: FeatureLayout
    pooled: Tensor
    tokens: Tensor

    def maps(self, index: Tensor) -> Tensor:
        """(n,) -> feature maps, (n, C, h, w) float32."""
        kept = self.layout.unpack(torch.from_numpy(self.rows[index.numpy()]))
        cells = _side_by_side(self.layout, [features.tokens for features in kept])
        side = round(cells.shape[1] ** 0.5)
        return cells.view(len(index), side, side, -1).permute(0, 3, 1, 2)

    def noisy(self, ratio: float, seed: int) -> Part:
        """The same with a share of the captions at wrong images, as `finetune --noise-ratio` moves them."""
        dataset, image_of = shuffle_captions(self.dataset, ratio, seed)
        order = np.argsort(image_of, kind="stable")
        return replace(self, dataset=dataset, tokens=self.tokens[torch.from_numpy(order)])


def _side_by_side(layout: FeatureLayout, both: list[Tensor]) -> Tensor:
    """Channels of the mean's features, and those of the log-variance's where they are kept apart."""
    apart = any(name.startswith("unc") for name, _ in layout.parts)
    return torch.cat(both, -1) if apart else both[0]


class KeptFeatures:
    """In place of a `FeatureLayout`: averages (B, C) or maps (B, C, h, w) -> the features that heads read.

    Args:
        channels: of the mean's features; those behind them are the log-variance's, which reads the same if there are
            none.
    """

    def __init__(self, channels: int, probabilistic: bool):
        self.channels, self.probabilistic = channels, probabilistic

    def unpack(self, kept: Tensor) -> tuple[Features, Features | None]:
        """The features of the mean and of the log-variance."""
        if kept.ndim == 2:
            tokens, pooled = kept.new_empty(len(kept), 0, kept.shape[1]), kept
        else:
            tokens = kept.flatten(2).transpose(1, 2)
            pooled = tokens.mean(1)
        mean = Features(tokens[..., : self.channels], pooled[:, : self.channels])
        if not self.probabilistic:
            return mean, None
        apart = pooled.shape[1] > self.channels
        return mean, Features(tokens[..., self.channels :], pooled[:, self.channels :]) if apart else mean


@dataclass(frozen=True)
class World:
    """All parts, the vocabulary of the training captions and the vectors of its words.

    channels: of the mean's features.
    """

    train: Part
    validation: Part
    test: Part
    coco: Part | None
    vocabulary: list[str]
    vectors: dict[str, np.ndarray]
    channels: int


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
        cached = cache_features([model], dataset, features, failure_share=0.0).images
        assert isinstance(cached, CachedImages)
        parts[name] = _part(dataset, cached.rows, model.image_tower.feature_layout, tokenizer(dataset.flat()))
    vectors = {} if files.word_vectors is None else read_vectors(files.word_vectors, vocabulary)
    tell(f"{len(vectors):,} of {len(vocabulary):,} words start from a vector")
    channels = dict(model.image_tower.feature_layout.parts)["pooled"][0]
    return World(parts["train"], parts["validation"], parts["test"], parts.get("coco"), vocabulary, vectors, channels)


def _part(dataset: CaptionDataset, rows: np.ndarray, layout: FeatureLayout, tokens: Tensor) -> Part:
    pooled = [
        _side_by_side(layout, [features.pooled for features in layout.unpack(torch.from_numpy(np.array(some)))])
        for some in np.array_split(rows, -(-len(rows) // 500))
    ]
    return Part(dataset, rows, layout, torch.cat(pooled), tokens)


def captioned(path: Path) -> CaptionDataset:
    """Images with captions; others in the same shards are not counted as unusable."""
    found = find_captions(path)
    return replace(found, located=replace(found.images, bad=[]))


def reading_model(settings, vocabulary: list[str], weights: str | None) -> DualEncoder:
    """A model whose head reads tokens, so that whole feature maps are kept; only its image trunk matters."""
    torch.manual_seed(0)
    return create_model(
        settings.name, embed_dim=8, head="gpo", n_unc_layers=0, vocabulary=vocabulary, image_weights=weights
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
        steps, batch_size, waited, groups: as there.
    """

    def __init__(
        self, part: Part, batch_size: int, seed: int, whole_maps: bool, step_done: Callable[[], object] = lambda: None
    ):
        self.part, self.batch_size, self.seed = part, batch_size, seed
        self.whole_maps, self.step_done = whole_maps, step_done
        self.n_pairs = len(part.tokens)
        self.steps, self.waited = self.n_pairs // batch_size, 0.0
        self._owner = torch.tensor(part.dataset.owner())
        self.groups = torch.arange(len(part.dataset))
        self._lengths = (part.tokens != 0).sum(1).numpy()

    def epoch(self, n: int, start_step: int = 0) -> Iterator[PairBatch]:
        """The batches of epoch n from a step on; `step_done` is called after each."""
        order = torch.from_numpy(bucketed_order(self._lengths, self.batch_size, self.seed, n))
        for pairs in order[start_step:]:
            owner = self._owner[pairs]
            images = self.part.maps(owner) if self.whole_maps else self.part.pooled[owner]
            yield PairBatch(images, self.part.tokens[pairs], owner, pairs)
            self.step_done()
