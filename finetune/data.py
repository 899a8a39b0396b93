"""Training data: rows in an order that only the seed decides, read by worker processes; wrong captions on request.

The global batches, the random crops and the replacements of unreadable images are functions of the seed, the epoch
and the row alone: the same for every number of workers, and of processes that divides the batch.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from probemb.data.boxes import Box
from probemb.data.captions.dataset import CaptionDataset
from probemb.data.compositions.dataset import Compositions
from probemb.data.failures import BadSample, Failure, Tally, worst_places
from probemb.data.images import stack
from probemb.data.randomness import isolated_randomness, number_of, seed_all, stream_of
from probemb.data.workers import make_loader, name_workers, next_batch, start_workers
from probemb.errors import UserError

JUDGED_FROM = 1000  # rows


class Rows:
    """Data set: (epoch, step) -> this rank's rows of that global batch, collated, or the error, and (name, reason) of
    images that could not be used. A subclass has `what`, the name of rows,

    read(epoch, number)   one row, a function of the seed and the arguments; raises if an image cannot be used
    collate(rows)         a batch

    `number` rows are an epoch, without an incomplete last batch. `transform` may draw from the global random numbers of
    torch, numpy and Python, which are seeded for every image and restored afterwards. `batch_size` is the global one,
    over all ranks, of which this one reads rows [rank·b, (rank+1)·b).
    """

    what: ClassVar[str]

    def __init__(self, data, number, transform: Callable, tokenizer: Callable, batch_size, seed=0, rank=0, world=1):
        self.data, self.number, self.batch_size, self.seed = data, number, batch_size, seed
        self.transform, self.tokenizer = transform, tokenizer
        if not 1 <= batch_size <= number:
            raise UserError(
                f"{data.source} has {number} {self.what}, from which no batch of {batch_size} can be made.",
                f"Use a batch size from 1 to {number}.",
            )
        each = batch_size // world
        self.steps = number // batch_size  # in an epoch
        self.share = range(rank * each, (rank + 1) * each)
        self._epoch, self._order = -1, np.empty((0, 0), np.int64)
        self.reading = 0  # the image that is being read, or whose text

    def __getitem__(self, place: tuple[int, int]) -> tuple[tuple | UserError, list[tuple[str, str]]]:
        failures: list[tuple[str, str]] = []
        try:
            with isolated_randomness():
                return self.batch(*place, failures), failures
        except UserError as error:  # PyTorch rebuilds exceptions from one argument
            return error, failures

    def batch(self, epoch: int, step: int, failures: list) -> NamedTuple:
        """This rank's rows of a global batch."""
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self.number, self.batch_size, self.seed, epoch)
        order = self._order[step].tolist()
        return self.collate([self._row(epoch, order, row, failures) for row in self.share])

    def _row(self, epoch: int, order: list[int], row: int, failures: list) -> Any:
        """A row; if it cannot be used, the next usable one of the global batch."""
        for ahead in range(len(order)):
            try:
                return self.read(epoch, order[(row + ahead) % len(order)])
            except (UserError, MemoryError):
                raise
            except Exception as error:  # one bad image must not stop a run
                known = isinstance(error, BadSample)
                reason = str(error) if known else f"the transform or tokenizer failed ({type(error).__name__}: {error})"
                name = self.data.images.places[self.reading].name
                if not ahead:
                    failures.append((name, reason))
        raise UserError(
            f"Not one image of a whole batch of {len(order)} can be used (the last, {name}: {reason}).",
            "Check the images.",
        )

    def image(self, index: int, *seeds: int, box: Box | None = None) -> Tensor:
        """An image, or a part of it, transformed; the transform's random numbers are a function of the seeds."""
        self.reading = index
        part = self.data.images.part(index, box)
        seed_all(number_of("transform", self.seed, *seeds))
        return self.transform(part)

    def tokens(self, text: str, index: int) -> Tensor:
        """(L,) int64; `index`: the image that a failure is counted for."""
        self.reading = index
        return torch.as_tensor(self.tokenizer([text]))[0]


def epoch_order(number: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the rows drawn from (seed, epoch), cut into whole batches, (steps, batch_size) int64."""
    permutation = stream_of("order", seed, epoch).permutation(number)
    steps = number // batch_size
    return permutation[: steps * batch_size].reshape(steps, batch_size)


# ------------------------------------------------------------------------------------------------------------- pairs


class PairBatch(NamedTuple):
    """This rank's rows of a global batch, b = batch_size / world; behind them perhaps unpaired images and tokens."""

    images: Tensor  # (b, 3, H, W) uint8, or what else the transform gives, in the memory order that it gives
    tokens: Tensor  # (b, L) int64
    image_index: Tensor  # (b,) int64: which image of the `CaptionDataset`; rows with the same one match each other
    pair_index: Tensor  # (b,) int64: which caption, in the order of `CaptionDataset.flat`


class Pairs(Rows):
    """Images with one of their captions, in the order of `CaptionDataset.flat`; batches of `unpaired` stand behind."""

    what = "pairs"

    def __init__(self, data: CaptionDataset, *settings, unpaired: Self | None = None, **more):
        self.texts, self.owner, self.unpaired = data.flat(), data.owner(), unpaired
        super().__init__(data, len(self.texts), *settings, **more)

    def read(self, epoch: int, number: int) -> tuple[Tensor, Tensor, int]:
        image = self.image(self.owner[number], epoch, number)
        return image, self.tokens(self.texts[number], self.owner[number]), number

    def collate(self, rows: list) -> PairBatch:
        images, tokens, pairs = map(list, zip(*rows))
        owner = torch.tensor([self.owner[pair] for pair in pairs])
        return PairBatch(stack(images), torch.stack(tokens), owner, torch.tensor(pairs))

    def batch(self, epoch: int, step: int, failures: list) -> PairBatch:
        pairs = super().batch(epoch, step, failures)
        if self.unpaired is None:
            return pairs
        other = self.unpaired.batch(*divmod(epoch * self.steps + step, self.unpaired.steps), failures)
        images, tokens = torch.cat([pairs.images, other.images]), torch.cat([pairs.tokens, other.tokens])
        return pairs._replace(images=images, tokens=tokens)


def pairs_digest(data: CaptionDataset, unpaired: CaptionDataset | None = None) -> str:
    """Of all that batches are made of but the pixels."""
    digest = hashlib.sha256()
    for image, texts in zip(data.image_ids, data.captions):
        digest.update(f"{image}\0{len(texts)}\0".encode(errors="replace"))
        for text in texts:
            digest.update(f"{text}\0".encode(errors="replace"))
    if unpaired is not None:
        digest.update(pairs_digest(unpaired).encode())
    return digest.hexdigest()[:16]


def shuffle_captions(dataset: CaptionDataset, ratio: float, seed: int) -> CaptionDataset:
    """The data with a share of its captions at wrong images.

    The images of these captions are permuted among themselves: every image keeps its number of captions, and of the
    floor(ratio · M) captions drawn, a few may return to their own image. Source: NCR §4.1; PCME++ Table 2 (20 % and
    50 %).
    """
    owner = np.array(dataset.owner(), np.int64)
    draw = np.random.RandomState([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, 0x6E6F])
    chosen = draw.permutation(len(owner))[: int(ratio * len(owner))]
    image_of = owner.copy()
    image_of[chosen] = owner[draw.permutation(chosen)]
    cuts = np.cumsum([len(texts) for texts in dataset.captions])[:-1]
    groups = np.split(np.argsort(image_of, kind="stable"), cuts)

    flat = dataset.flat()
    moved = [[flat[caption] for caption in group] for group in groups]
    return replace(dataset, captions=moved, caption_ids=None, truth=None)


# -------------------------------------------------------------------------------------------------- composed queries


class TupleBatch(NamedTuple):
    """This rank's b rows of one global batch, each a query of k parts and its target.

    m and t, the numbers of parts that are images and texts, differ from rank to rank and from step to step.
    """

    images: Tensor  # (b + m, 3, H, W) uint8: the b targets, then the m parts
    tokens: Tensor  # (t, L) int64; one unused row where no part is a text, as a tower needs one
    part_rows: Tensor  # (b, k) int64: r >= 0 is images[b + r], r < 0 is tokens[-r - 1]
    target_index: Tensor  # (b,) int64: which image of `Compositions` the target is
    concepts: Tensor  # (b, c) int64: what a correct target has; c = k but for changes of attributes, where it is 1


class Tuples(Rows):
    """Queries with their targets, both drawn from (seed, epoch, row); row r is of combination r modulo their number.

    `repeats`: rows of an epoch for each combination, with other targets and parts each time.
    """

    what = "queries"

    def __init__(self, data: Compositions, *settings, repeats: int = 1, **more):
        super().__init__(data, data.n_examples * repeats, *settings, **more)

    def read(self, epoch: int, number: int) -> tuple:
        """The example, its target, and for each part pixels or tokens."""
        example = self.data.draw(number % self.data.n_examples, stream_of("example", self.seed, epoch, number))
        target = self.image(example.target, epoch, number, 0)
        parts = [
            self.image(part.image, epoch, number, place, box=part.box)
            if part.is_image
            else self.tokens(part.text, example.target)
            for place, part in enumerate(example.parts, 1)
        ]
        return example, target, parts

    def collate(self, rows: list) -> TupleBatch:
        images, texts, places = [], [], []
        for example, _, parts in rows:
            row = []
            for part, content in zip(example.parts, parts):
                kind = images if part.is_image else texts
                row.append(len(kind) if part.is_image else -len(kind) - 1)
                kind.append(content)
            places.append(row)
        examples, targets, _ = map(list, zip(*rows))
        if not texts:
            texts.append(self.tokens(self.data.concepts[examples[0].concepts[0]], examples[0].target))
        asked = ([example.target for example in examples], [example.concepts for example in examples])
        return TupleBatch(stack(targets + images), torch.stack(texts), torch.tensor(places), *map(torch.tensor, asked))


class Loader:
    """Batches of one rank, which are prepared ahead; `waited`, the seconds spent waiting for them so far.

    Raises UserError: while iterating, more than `failure_share` of this rank's rows cannot be used, once JUDGED_FROM of
    them, or its part of a whole epoch, were read; or a worker was killed.
    """

    def __init__(self, rows: Rows, workers: int = 0, *, pin_memory: bool = False, failure_share: float = 0.05):
        self.rows, self.steps, self.waited = rows, rows.steps, 0.0
        self._tally = Tally(failure_share, min(JUDGED_FROM, rows.steps * len(rows.share)))
        self._places: list[tuple[int, int]] = []  # (epoch, step) of the batches to read
        self._batches: Iterator | None = None
        options = {"persistent_workers": True, "multiprocessing_context": "fork"}  # once, before a thread writes
        # A generator of its own: otherwise each epoch would draw from the global random numbers.
        self._loader = make_loader(
            rows, workers, batch_size=None, sampler=self._places, collate_fn=tuple, pin_memory=pin_memory,
            generator=torch.Generator(), **(options if workers else {}),
        )  # fmt: skip

    def epoch(self, n: int, start_step: int = 0) -> Iterator[NamedTuple]:
        """The batches of epoch n from a step on; nothing before it is read. One epoch is read at a time."""
        self._places[:] = [(n, step) for step in range(start_step, self.steps)]
        self._batches = start_workers(self._loader, self)
        while True:
            began = time.perf_counter()
            try:
                batch, failures = next_batch(self._batches)
            except StopIteration:
                return
            self.waited += time.perf_counter() - began
            tally = self._tally
            if tally.add(len(self.rows.share), failures):
                raise UserError(
                    f"The images of {tally.failed} of {tally.read} {self.rows.what} cannot be used "
                    f"({tally.failed / tally.read:.1%}, allowed are {tally.share:.1%}): "
                    f"{worst_places([tally.failures])[1]}.",
                    "Repair these images or leave them out, or allow a larger failure share.",
                )
            if isinstance(batch, UserError):
                raise batch
            yield batch

    @property
    def failures(self) -> dict[str, Failure]:
        """By name of the image, of this rank since the process started."""
        return self._tally.failures

    def waiting_for(self) -> str:
        """The workers that prepare batches, with what keeps them from it."""
        return ", ".join(["waiting for data", *name_workers(self._batches)])

    def close(self) -> None:
        """End the workers; dropping the loader or ending the interpreter does the same."""
        if self._batches is not None:
            self._batches.end()
