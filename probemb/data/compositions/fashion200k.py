"""Fashion200k: a product's picture and a change of one word of its description.

FOLDER/labels/dress_train_detect_all.txt, dress_test_detect_all.txt, ...    PATH TAB SCORE TAB description
FOLDER/women/dresses/.../51727804_0.jpeg                                    the images, by PATH
FOLDER/test_queries.txt                                                     "PATH PATH" lines: source and target

Descriptions that differ in one word are neighbours; a query is an image and "replace red with blue", its targets are
all images with the changed description. Concepts are whole descriptions here, of which an image has one. Sources: Han
et al., ICCV 2017; pairs and test queries: Vo et al., CVPR 2019 (TIRG); MPC, supplementary C.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from probemb.data.compositions.dataset import QUERIES, Compositions, Part, Query
from probemb.data.image_loader import locate
from probemb.data.randomness import stream_of
from probemb.data.reading import as_inside, choose_split, parse_lines
from probemb.errors import UserError

LABELS = "labels/*_detect_all.txt"
CHANGE = "replace {} with {}"
MAX_WORDS, MAX_WORD = 64, 100  # of a description, and its characters
Key = tuple[str, ...]  # a description without one of its words


@dataclass(frozen=True)
class AttributeChanges(Compositions):
    """Images with one description each, and changes of one word; `tuples` are empty, k is 2."""

    @cached_property
    def neighbours(self) -> dict[Key, set[int]]:
        """Descriptions without one word, each with the descriptions that they are of, at least two."""
        found: dict[Key, set[int]] = {}
        for number, text in enumerate(self.concepts):
            for key in _shortened(text):
                found.setdefault(key, set()).add(number)
        return {key: of for key, of in found.items() if len(of) > 1}

    @cached_property
    def sources(self) -> list[int]:
        """Images whose description has a neighbour."""
        known = set().union(*self.neighbours.values())
        return [image for image, (concept,) in enumerate(self.held) if concept in known]

    @property
    def texts(self) -> tuple[str, ...]:
        return *self.concepts, CHANGE.format("", "")

    @property
    def n_examples(self) -> int:
        return len(self.sources)

    def draw(self, example: int, random: np.random.RandomState) -> Query:
        """A source image, one of the changes that lead to a description with images, and one of those images."""
        source = self.sources[example]
        (concept,) = self.held[source]
        keys = sorted(key for key in _shortened(self.concepts[concept]) if key in self.neighbours)
        key = keys[random.randint(len(keys))]
        others = sorted(self.neighbours[key] - {concept})
        changed = others[random.randint(len(others))]
        targets = self.targets([changed])
        target = int(targets[random.randint(len(targets))])
        return Query(self.change(source, changed), (changed,), target)

    def change(self, source: int, changed: int) -> tuple[Part, Part]:
        """The image, and "replace x with y": the first words that the other description has not, as TIRG has it."""
        (concept,) = self.held[source]
        a, b = self.concepts[concept].split(), self.concepts[changed].split()
        before = next((word for word in a if word not in b), a[-1])
        after = next((word for word in b if word not in a), b[-1])
        return Part(concept, source), Part(-1, text=CHANGE.format(before, after))

    def sampled_queries(self, number: int = QUERIES, seed: int = 0, tuples: np.ndarray | None = None) -> list[Query]:
        """So many changes, drawn as for training. `tuples` is of no meaning here."""
        number = min(number, self.n_examples)
        rows = ((row * self.n_examples // number, stream_of("query", seed, row)) for row in range(number))
        return [self.draw(*row)._replace(target=-1) for row in rows]


def read_fashion200k(path: Path, split: str, images: Path | None = None) -> AttributeChanges:
    """The images of "train" or "test", and the published test queries. Raises UserError."""
    named = {file: file.name.removesuffix("_detect_all.txt").rpartition("_")[2] for file in sorted(path.glob(LABELS))}
    choose_split(split, named.values(), path)
    files = [file for file, of in named.items() if of == split]
    rows = [row for file in files for row in parse_lines(file, "a list of PATH, score and description", _label)]
    if not rows:
        raise UserError(f"The labels of {path} list no image in the split '{split}'.", "Fetch the labels again.")
    names, texts = map(list, zip(*rows))
    located = locate([(name,) for name in names], names, path, images, [path])
    number = {text: place for place, text in enumerate(sorted(set(texts)))}
    result = AttributeChanges(
        source=str(path), images=located, names=names, splits=[split] * len(names), concepts=tuple(number),
        held=[[number[text]] for text in texts], cut=[None] * len(names),
    )  # fmt: skip
    file = path / "test_queries.txt"
    if split != "test" or not file.is_file():
        return result
    row_of = {name: row for row, name in enumerate(names)}

    def parse(line: str) -> Query:
        source, target = (row_of[name] for name in line.split())
        (changed,) = result.held[target]
        return Query(result.change(source, changed), (changed,))

    return replace(result, queries=parse_lines(file, "a list of source and target images of the test labels", parse))


def _label(line: str) -> tuple[str, str] | None:
    """Path and description."""
    name, _, description = line.split("\t")
    words = [word[:MAX_WORD] for word in description.split()][:MAX_WORDS]
    return (as_inside(name), " ".join(words)) if words else None


def _shortened(text: str) -> set[Key]:
    """A description without each of its words in turn."""
    words = tuple(text.split())
    return {words[:place] + words[place + 1 :] for place in range(len(words))}
