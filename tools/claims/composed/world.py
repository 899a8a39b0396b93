"""Composed retrieval for `tools.claims`: features of a frozen image trunk, computed once for images and their crops.

The trunk of drawn scenes is trained before (`trunk.py`); that of photographs is an EfficientNet with ImageNet's
weights. R rows of features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetune.loading.rows import epoch_order
from finetune.loading.tuple_samples import TupleBatch, TupleRows
from probemb.cli.progress import progress
from probemb.data.compositions.crops import Crop, CroppedImages
from probemb.data.compositions.dataset import Compositions
from probemb.data.compositions.find import find_compositions
from probemb.data.compositions.queries import Query
from probemb.data.image_loader import ImageBatches
from probemb.data.words import read_vectors, split_words
from probemb.files import replace_file
from probemb.models import DualEncoder, create_model, create_transforms
from probemb.models.features import FeatureLayout
from tools.claims.composed.variants import SEEN, UNSEEN, Training

LENGTHS = (2, 3, 4)
INFEASIBLE = "infeasible"
FORWARD = 128  # images at a time


class Files(NamedTuple):
    """Paths of photographs, as given on the command line; None for what is not there."""

    data: Path | None = None
    lists: Path | None = None
    images_weights: Path | None = None
    word_vectors: Path | None = None


@dataclass(frozen=True)
class Kept:
    """Features of one split: its images, then crops of them, (R, width) float16."""

    rows: Tensor
    place: dict[Crop, int]

    def of(self, image: int, box=None) -> Tensor:
        """(width,) of an image or of a crop."""
        return self.rows[self.place[Crop(image, box)]]


@dataclass(frozen=True)
class Asked:
    """Queries of one number of parts, by kind of combination: seen, unseen, infeasible."""

    data: Compositions
    queries: dict[str, list[Query]]


class Apart(NamedTuple):
    """The setup in which the pairs of the test are others than those to train on."""

    train: Compositions
    validation: Asked
    test: Asked


@dataclass(frozen=True)
class World:
    """All data.

    Attributes:
        train, kept: by number of parts, the combinations to train on; and the features of the training images.
        validation, validation_kept: queries by number of parts; test, test_kept: likewise.
        layout: of the features; vocabulary, vectors: of the concepts' words.
        about: sentences on the data.
        apart: the same images with other pairs in the test, of drawn scenes.
    """

    train: dict[int, Compositions]
    kept: Kept
    validation: dict[int, Asked]
    validation_kept: Kept
    test: dict[int, Asked]
    test_kept: Kept
    layout: FeatureLayout
    vocabulary: list[str]
    vectors: dict[str, np.ndarray]
    about: tuple[str, ...]
    apart: Apart | None = None

    def trained(self, training: Training) -> Compositions:
        """Source of a training's examples."""
        return self.apart.train if training.setup == UNSEEN else self.train[training.parts]

    def validated(self, training: Training) -> Asked:
        """Data by which its epoch is chosen."""
        return self.apart.validation if training.setup == UNSEEN else self.validation[training.parts]


def make_model(settings, vocabulary: Sequence[str], **options) -> DualEncoder:
    """A model of the study's architecture, which reads pixels."""
    return create_model(
        settings.name, head=settings.head, embed_dim=settings.embed_dim, n_unc_layers=0, vocabulary=vocabulary,
        **options,
    )  # fmt: skip


def read_world(files: Files, settings, folder: Path, tell: Callable[[str], object]) -> World:
    """Read combinations, draw queries, and compute what is not kept in `folder`: the trunk of scenes, and features.

    Raises:
        UserError: data, weights or vectors cannot be read.
    """
    assert files.data is not None

    def find(split: str, k: int, setup: str = SEEN) -> Compositions:
        return find_compositions(files.data, split, k, setup=setup, lists=files.lists)

    tell(f"combinations of {files.data}")
    train = {k: find("train", k) for k in settings.trained_parts}
    validation = {k: _asked(find("val", k), settings.validation_queries) for k in settings.trained_parts}
    test = {k: _asked(find("test", k), settings.test_queries) for k in LENGTHS}
    apart = None
    if settings.images:  # photographs have too few such pairs
        queries = settings.validation_queries, settings.test_queries
        asked = (_asked(find(split, 2, UNSEEN), number) for split, number in zip(("val", "test"), queries))
        apart = Apart(find("train", 2, UNSEEN), *asked)
    first = train[2]
    vocabulary = sorted({word for concept in first.concepts for word in split_words(concept)})
    torch.manual_seed(0)
    weights = None if settings.images else str(files.images_weights or "timm")
    model = make_model(settings, vocabulary, image_weights=weights).eval()
    if settings.images:
        from tools.claims.composed.trunk import fill_trunk

        fill_trunk(model, first, settings, folder / "trunk.safetensors", tell)
    with torch.no_grad():
        height, width = model.image_tower.image_size
        layout = model.image_tower.layout(torch.linspace(-1, 1, 6 * height * width).view(2, 3, height, width))
    crops = dict.fromkeys(
        crop
        for concept in sorted(asked_concepts([*train.values(), *([apart.train] if apart else [])]))
        for crop in first.crops[concept]
    )
    keep = [
        keep_features(model, layout, data, list(wanted), folder / f"{split}.safetensors", tell)
        for split, data, wanted in (
            ("train", first, crops),
            ("val", validation[2].data, _parts([*validation.values(), *([apart.validation] if apart else [])])),
            ("test", test[2].data, _parts([*test.values(), *([apart.test] if apart else [])])),
        )
    ]
    vectors = {} if files.word_vectors is None else read_vectors(files.word_vectors, vocabulary)
    sizes = f"{len(first):,} / {len(validation[2].data):,} / {len(test[2].data):,} images"
    tuples = ", ".join(f"{len(one.data.tuples):,} combinations of {k}" for k, one in test.items())
    about = (f"{sizes} of train, val and test; {len(first.tuples):,} pairs to train on; in the test {tuples}.",)
    return World(
        train, keep[0], validation, keep[1], test, keep[2], layout, vocabulary, vectors,
        (*about, *test[2].data.notes), apart,
    )  # fmt: skip


def asked_concepts(datas) -> set[int]:
    return {int(concept) for data in datas for concept in np.unique(data.tuples)}


def _asked(data: Compositions, number: int) -> Asked:
    """Queries of seen combinations, drawn or published, and of unseen and infeasible ones, every mixture of each."""
    seen = data.queries or data.sampled_queries(number)
    kinds = {SEEN: seen}
    for name, tuples in ((UNSEEN, data.unseen), (INFEASIBLE, data.infeasible)):
        if len(tuples) and data.k == 2:
            kinds[name] = data.sampled_queries(len(tuples) * 2**data.k, tuples=tuples)
    return Asked(data, kinds)


def _parts(asked) -> dict[Crop, None]:
    queries = (query for one in asked for some in one.queries.values() for query in some)
    return dict.fromkeys(Crop(part.image, part.box) for query in queries for part in query.parts if part.is_image)


def keep_features(
    model: DualEncoder, layout: FeatureLayout, data: Compositions, crops: Sequence[Crop], file: Path,
    tell: Callable[[str], object],
) -> Kept:  # fmt: skip
    """Features of all images of a split and of crops of them, computed once. Raises UserError: an unreadable image."""
    parts = [Crop(image, None) for image in range(len(data))]
    parts += [crop for crop in crops if crop.box is not None]
    place = {crop: row for row, crop in enumerate(parts)}
    digest = _digest(model, layout, data, parts)
    if file.is_file():
        held = load_file(file)
        if digest in held:
            return Kept(held[digest], place)
    tell(f"features of {len(data):,} images and {len(parts) - len(data):,} crops in {file}")
    images = CroppedImages.of(data.images, parts)
    batches, found = ImageBatches(images, create_transforms(model).evaluate, FORWARD, max_bad=0.0), []
    with torch.inference_mode(), progress("features", len(parts)) as advance:
        for pixels in batches:
            found.append(layout.pack(*model.image_tower.features(pixels)).half())
            advance(len(pixels))
    rows = torch.cat(found).clone()
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, lambda aside: save_file({digest: rows}, aside))
    return Kept(rows, place)


def _digest(model: DualEncoder, layout: FeatureLayout, data: Compositions, parts: Sequence[Crop]) -> str:
    """Of everything that the features depend on but the pixels."""
    found = hashlib.sha256(f"{layout.parts} {model.config['preprocess']} {data.digest()} {parts}".encode())
    for name, tensor in sorted(model.image_tower.state_dict().items()):
        if model.image_tower.place(name).part == "trunk":
            found.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:32]


class KeptRows(TupleRows):
    """`TupleRows` with features in place of pixels."""

    def __init__(self, data: Compositions, kept: Kept, tokenizer, batch_size: int, seed: int, repeats: int):
        super().__init__(data, lambda image: image, tokenizer, batch_size, seed, repeats)
        self.kept = kept
        self._tokens = dict(zip(data.concepts, tokenizer(list(data.concepts))))

    def image(self, index: int, *seeds: int, box=None) -> Tensor:
        return self.kept.of(index, box)

    def tokens(self, text: str, index: int) -> Tensor:
        return self._tokens[text]


class Loader:
    """In place of `finetune.loading.tuple_loader.TupleLoader`: its batches, from memory.

    Attributes:
        steps, batch_size, waited: as there.
    """

    def __init__(self, rows: KeptRows, step_done: Callable[[], object] = lambda: None):
        self.rows, self.batch_size, self.step_done = rows, rows.batch_size, step_done
        self.steps, self.waited = len(rows) // rows.batch_size, 0.0

    def epoch(self, n: int, start_step: int = 0) -> Iterator[TupleBatch]:
        """The batches of epoch n from a step on; `step_done` is called after each."""
        for numbers in epoch_order(len(self.rows), self.batch_size, self.rows.seed, n)[start_step:]:
            yield self.rows.batch([self.rows.read(n, int(number)) for number in numbers])
            self.step_done()
