"""Fashion200k: a product's picture and a change of one word of its description.

FOLDER/labels/dress_train_detect_all.txt, dress_test_detect_all.txt, ...    PATH TAB SCORE TAB description
FOLDER/women/dresses/.../51727804_0.jpeg                                    the images, by PATH
FOLDER/test_queries.txt                                                     "PATH PATH" lines: source and target

Descriptions that differ in one word are neighbours; a query is an image and "replace red with blue", its targets are
all images with the changed description. Concepts are whole descriptions here, of which an image has one. Sources: Han
et al., ICCV 2017; pairs and test queries: Vo et al., CVPR 2019 (TIRG); MPC, supplementary C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from probemb.data.captions.dataset import check_unique, choose_split, missing_images, read_text
from probemb.data.captions.image_files import is_inside, locate
from probemb.data.compositions.crops import Crops
from probemb.data.compositions.dataset import Compositions, Example
from probemb.data.compositions.holdings import Holdings
from probemb.data.compositions.queries import Part, Query, kind_of
from probemb.data.compositions.tuples import no_tuples
from probemb.data.randomness import stream_of
from probemb.errors import UserError

QUERIES = "test_queries.txt"
CHANGE = "replace {} with {}"
MAX_LINES = 2_000_000  # of a split
MAX_WORDS, MAX_WORD = 64, 100  # of a description, and its characters
_FETCH = "Fetch the labels of Fashion200k again."
Key = tuple[str, ...]  # a description without one of its words


@dataclass(frozen=True)
class AttributeChanges(Compositions):
    """Images with one description each, and changes of one word; `tuples` are empty, k is 2."""

    @cached_property
    def neighbours(self) -> dict[Key, dict[int, str]]:
        """Descriptions without one word, each with the descriptions that they are of and the word that these have."""
        found: dict[Key, dict[int, str]] = {}
        for number, text in enumerate(self.concepts):
            if len(self.holds.of_concept(number)):
                for key, word in _shortened(text):
                    found.setdefault(key, {})[number] = word
        return {key: of for key, of in found.items() if len(of) > 1}

    @cached_property
    def sources(self) -> np.ndarray:
        """Images whose description has a neighbour, (n_examples,) int64."""
        known = {number for of in self.neighbours.values() for number in of}
        rows = [row for row in range(len(self)) if int(self.holds.of_image(row)[0]) in known]
        return np.array(rows, dtype=np.int64)

    @property
    def texts(self) -> tuple[str, ...]:
        return *self.concepts, CHANGE.format("", "")

    @property
    def n_examples(self) -> int:
        return len(self.sources)

    def draw(self, example: int, random: np.random.RandomState) -> Example:
        """A source image, one of the changes that lead to a description with images, and one of those images."""
        source = int(self.sources[example])
        mine = int(self.holds.of_image(source)[0])
        keys = sorted({key for key, _ in _shortened(self.concepts[mine]) if key in self.neighbours})
        key = keys[random.randint(len(keys))]
        others = sorted(number for number in self.neighbours[key] if number != mine)
        changed = others[random.randint(len(others))]
        targets = self.targets([changed])
        target = int(targets[random.randint(len(targets))])
        return Example(self.change(source, mine, changed), target, (changed,))

    def change(self, source: int, mine: int, changed: int) -> tuple[Part, Part]:
        """The parts of a query: the image, and "replace x with y"."""
        before, after = _difference(self.concepts[mine], self.concepts[changed])
        return Part(mine, source), Part(-1, text=CHANGE.format(before, after))

    def sampled_queries(self, number: int = 10_000, seed: int = 0, tuples: np.ndarray | None = None) -> list[Query]:
        """So many changes, drawn as for training. `tuples` is of no meaning here."""
        found = []
        number = min(number, self.n_examples)
        for row in range(number):
            parts, _, concepts = self.draw(row * self.n_examples // number, stream_of("query", seed, row))
            found.append(Query(parts, concepts, kind_of(parts)))
        return found


def is_fashion200k(path: Path) -> bool:
    return any((path / "labels").glob("*_detect_all.txt"))


def read_fashion200k(path: Path, split: str, images: Path | None = None) -> AttributeChanges:
    """The images of "train" or "test", and the published test queries. Raises UserError."""
    files = sorted((path / "labels").glob("*_detect_all.txt"))
    named = {file: file.name.removesuffix("_detect_all.txt").rpartition("_")[2] for file in files}
    if split == "val" and "val" not in named.values():
        raise UserError(
            f"{path} is Fashion200k, which has no validation split.",
            "Finetune with --data.validation null, and measure the split test.",
        )
    choose_split(split, named.values(), str(path))
    names, texts = [], []
    for file in (file for file in files if named[file] == split):
        for name, text in _labels(file):
            names.append(name)
            texts.append(text)
        if len(names) > MAX_LINES:
            raise UserError(f"{path} has more than {MAX_LINES:,} images in a split.", _FETCH)
    if not names:
        raise UserError(f"The labels of {path} list no image in the split '{split}'.", _FETCH)
    check_unique(names, "image", str(path))
    located, missing = locate([(name,) for name in names], names, str(path), images, [path])
    if located is None:
        raise missing_images(str(path), missing, len(names))
    concepts = {text: place for place, text in enumerate(sorted(set(texts)))}
    owners = np.array([concepts[text] for text in texts], dtype=np.int64)
    rows = np.arange(len(names))
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(len(concepts) + 1))
    wholes = (rows[order[start:end]] for start, end in pairwise(bounds))
    result = AttributeChanges(
        source=str(path),
        split=split,
        images=located,
        concepts=tuple(concepts),
        holds=Holdings(np.stack([rows, owners], axis=1), len(names), len(concepts)),
        crops=tuple(Crops(one, np.full((len(one), 4), np.nan)) for one in wholes),
        tuples=no_tuples(2),
        unseen=no_tuples(2),
        infeasible=no_tuples(2),
        queries=None,
    )
    file = path / QUERIES
    if split != "test" or not file.is_file():
        return result
    return replace(result, queries=_test_queries(file, result, names))


def _labels(file: Path) -> list[tuple[str, str]]:
    """(path, description) of every line. Raises UserError."""
    found = []
    for number, line in enumerate(_lines(file), 1):
        fields = line.split("\t")
        if len(fields) != 3 or not is_inside(fields[0]):
            raise UserError(f"Line {number} of {file} is not PATH, score and description: {line[:100]!r}.", _FETCH)
        words = [word[:MAX_WORD] for word in fields[2].split()][:MAX_WORDS]
        if words:
            found.append((fields[0], " ".join(words)))
    return found


def _lines(file: Path) -> Sequence[str]:
    try:
        lines = read_text(file).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{file} is not a text in UTF-8.", _FETCH) from None
    return [line for line in lines if line.strip()]


def _test_queries(file: Path, data: AttributeChanges, names: list[str]) -> list[Query]:
    """Raises UserError: a line names an unknown image."""
    row = {name: place for place, name in enumerate(names)}
    found = []
    for number, line in enumerate(_lines(file), 1):
        fields = line.split()
        if len(fields) != 2 or not all(one in row for one in fields):
            raise UserError(f"Line {number} of {file} is not two images of the test labels: {line[:200]!r}.", _FETCH)
        source, target = (row[one] for one in fields)
        mine, changed = (int(data.holds.of_image(one)[0]) for one in (source, target))
        parts = data.change(source, mine, changed)
        found.append(Query(parts, (changed,), kind_of(parts)))
    return found


def _shortened(text: str) -> list[tuple[Key, str]]:
    """A description without each of its words in turn, and that word."""
    words = tuple(text.split())
    return [(words[:place] + words[place + 1 :], word) for place, word in enumerate(words)]


def _difference(source: str, target: str) -> tuple[str, str]:
    """The first word of each description that the other has not, as TIRG writes its changes."""
    a, b = source.split(), target.split()
    before = next((word for word in a if word not in b), a[-1])
    return before, next((word for word in b if word not in a), b[-1])
