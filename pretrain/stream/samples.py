"""Read, decode, transform and tokenise the samples of slots; replace unusable samples.

Everything is a function of the seed and the slot: the drawn caption and the transform's random numbers do not depend on
the rank, the worker, or earlier samples.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, get_worker_info

from pretrain.stream.order import Order, draw
from pretrain.stream.shards import OpenShards
from probemb.data.failures import BadSample
from probemb.data.images import decode_image
from probemb.data.pixels import empty_stack
from probemb.data.randomness import isolated_randomness, seed_all
from probemb.data.shards.samples import parse_sample
from probemb.errors import UserError

_CAPTION, _TRANSFORM = 11, 12  # uses of random numbers
_SEARCH_LIMIT = 20_000  # samples tried in place of a bad one
_LONGEST_REASON = 300
AHEAD = 2  # batches that workers prepare


def shared_tensor(numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory that processes forked from now on share; not in /dev/shm, which is small in containers."""
    return torch.frombuffer(mmap.mmap(-1, numbers * dtype.itemsize), dtype=dtype)


class Part(NamedTuple):
    """Consecutive rows of a global batch, but for the images, which lie in memory that the workers share."""

    tokens: np.ndarray  # (b, L) int64
    slots: np.ndarray  # (b, 2) int64: shard and index of the slot
    replaced: np.ndarray  # (b,) bool: the slot's own sample is unusable
    keys: list[str]  # "shard/key" of the sample that each row shows
    failures: list[tuple[int, str]]  # shard and reason for every slot whose own sample cannot be used


class Example(NamedTuple):
    """Content of a row."""

    image: torch.Tensor
    tokens: torch.Tensor
    key: str


class Parts(Dataset):
    """One rank's rows of all global batches: item n is part n % parts of batch n // parts, so that each of as many
    workers reads its own lanes, in the order of their steps.

    A worker may be at most AHEAD batches ahead of the one that is read from `images`.

    Args:
        order, shards: the samples and their places.
        labels: readable names of the shards.
        rows: first row of each part, and the end of the last one.
        transform: PIL image -> (3, H, W) uint8 or float32; may use the global random numbers of torch, numpy and
            Python.
        tokenizer: list of n strings -> (n, L) int64.
        caption, exif: see `pretrain.config.Data`.

    Attributes:
        images: of batch n in images[n % len(images)], (b, 3, H, W) as the transform gives them.
        reading: for each worker its pid and the number of the shard that it reads, -1 for none; shared by processes.
    """

    def __init__(
        self,
        order: Order,
        shards: OpenShards,
        labels: Sequence[str],
        rows: Sequence[int],
        *,
        transform: Callable[[Image.Image], torch.Tensor],
        tokenizer: Callable[[list[str]], torch.Tensor],
        caption: str,
        exif: bool,
    ):
        self.order, self.shards, self.labels, self.rows = order, shards, labels, rows
        self.transform, self.tokenizer, self.caption, self.exif = transform, tokenizer, caption, exif
        with isolated_randomness():
            seed_all(0)
            like = empty_stack(transform(Image.new("RGB", (256, 256))), rows[-1] - rows[0])
        flat = [shared_tensor(like.numel(), like.dtype) for _ in range(AHEAD + 1)]
        self.images = [memory.as_strided(like.shape, like.stride()) for memory in flat]
        self.reading = shared_tensor(2 * len(rows) - 2, torch.int64).fill_(-1).view(-1, 2)
        self._now = self.reading[0].numpy()
        self._crop = find_crop(transform)
        self._epoch = -1
        self._good: dict[int, tuple[int, int]] = {}  # step and row of each row's stand-in, once known

    def __getitem__(self, item: int) -> Part | UserError:
        worker = get_worker_info()
        self._now = self.reading[worker.id if worker else 0].numpy()
        self._now[0] = os.getpid()
        try:
            with isolated_randomness():
                return self._part(*divmod(item, len(self.rows) - 1))
        except UserError as error:  # PyTorch rebuilds exceptions from one argument
            return error
        finally:
            self._now[1] = -1

    def fetch_ahead(self, item: int) -> list[Future]:
        """Fetch the remote shards of a part's lanes, then the lanes' next ones; those that it needs are returned."""
        step, part = divmod(item, len(self.rows) - 1)
        epoch, step = divmod(step, self.order.steps)
        lanes = range(self.rows[part] // self.order.share, (self.rows[part + 1] - 1) // self.order.share + 1)
        ahead = [self.order.shards_ahead(epoch, lane, step * self.order.share) for lane in lanes]
        now, following = zip(*ahead, strict=True)
        needed = self.shards.prepare(now)
        self.shards.prepare(following)
        return needed

    def _part(self, batch: int, part: int) -> Part:
        self.fetch_ahead(batch * (len(self.rows) - 1) + part)
        epoch, step = divmod(batch, self.order.steps)
        if epoch != self._epoch:
            self._epoch = epoch
            self._good.clear()
        start, stop = self.rows[part : part + 2]
        images = self.images[batch % len(self.images)][start - self.rows[0] : stop - self.rows[0]]
        slots = self.order.rows(epoch, step, start, stop)
        tokens, keys, failures, replaced = [], [], [], np.zeros(stop - start, bool)
        for i, slot in enumerate(zip(*(column.tolist() for column in slots), strict=True)):
            try:
                example = self._example(*slot)
                self._good[start + i] = step, start + i
            except BadSample as error:
                failures.append((slot[0], printable(str(error))))
                example = self._stand_in(epoch, step, start + i)
                replaced[i] = True
            images[i] = example.image
            tokens.append(example.tokens)
            keys.append(example.key)
        places = np.stack([slots.shard, slots.index], axis=1)
        return Part(torch.stack(tokens).numpy(), places, replaced, keys, failures)

    def _example(self, shard: int, index: int, visit: int) -> Example:
        self._now[1] = shard
        key, parts = self.shards.get(shard).read(index)
        try:
            sample = parse_sample(parts, key)
            seed = partial(seed_all, draw(self.order.seed, _TRANSFORM, shard, index, visit))
            draft = self._crop and partial(draft_size, self._crop, seed=seed)
            image = decode_image(sample.image, draft, exif=self.exif)
            which = draw(self.order.seed, _CAPTION, shard, index, visit) % len(sample.captions)
            caption = sample.captions[which if self.caption == "random" else 0]
            seed()
            return Example(*self._tensors(image, caption), printable(f"{self.labels[shard]}/{key}"))
        except BadSample as error:
            raise BadSample(f"{key}: {error}") from None

    def _tensors(self, image: Image.Image, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self.transform(image), torch.as_tensor(self.tokenizer([caption]))[0]
        except (UserError, MemoryError):
            raise
        except Exception as error:  # one bad image or caption must not stop a run
            raise BadSample(f"the transform or tokenizer failed ({type(error).__name__}: {error})") from None

    def _stand_in(self, epoch: int, step: int, row: int) -> Example:
        """The last good sample of the same row in this epoch, or the first good one if there is none before.

        Not of the same lane: its last sample may be in this batch, where a repeat would be a false negative. It is
        read again, so that a restart gives the same sample. A row without any good sample takes the next row's.
        """
        order = self.order
        known = [self._good[row]] if row in self._good else []
        same_row = ((other, row) for other in chain(range(step - 1, -1, -1), range(step + 1, order.steps)))
        next_rows = ((s, (row + d) % order.batch_size) for d in range(1, order.batch_size) for s in range(order.steps))
        tried, last = 0, ""
        for other in islice(chain(known, same_row, next_rows), _SEARCH_LIMIT):
            shard, index, visit = (int(column[0]) for column in order.rows(epoch, other[0], other[1], other[1] + 1))
            try:
                example = self._example(shard, index, visit)
            except BadSample as error:
                tried, last = tried + 1, f"{self.labels[shard]}: {error}"
                continue
            self._good[row] = other
            return example
        raise UserError(
            f"Not one of the {tried} samples tried in place of a bad one can be used (the last: {printable(last)}).",
            "Check the shards: most of their samples are damaged or have no captions.",
        )


def find_crop(transform: Callable) -> Callable | None:
    """The random crop (torchvision's or `RandomCrop`) with which a transform starts; None if it starts otherwise."""
    first = next(iter(getattr(transform, "transforms", [transform])), None)
    return first if hasattr(first, "get_params") and len(getattr(first, "size", ())) == 2 else None


def draft_size(crop: Callable, width: int, height: int, seed: Callable[[], None]) -> tuple[int, int] | None:
    """Width and height at which a JPEG is decoded for a crop, or None for all of it; `seed` sets the random state.

    A JPEG can be decoded at 1/8, 1/4 or 1/2 of its size, at a fraction of the cost. The crop is drawn as it will be
    drawn; the smallest size is taken at which it has at least as many pixels in both directions as its result.
    """
    for factor in (8, 4, 2):
        if width < factor * crop.size[1] or height < factor * crop.size[0]:
            continue
        small = torch.empty(1, 1, 1).expand(1, -(-height // factor), -(-width // factor))  # no memory, only a size
        seed()
        _, _, crop_height, crop_width = crop.get_params(small, crop.scale, crop.ratio)
        if crop_height >= crop.size[0] and crop_width >= crop.size[1]:
            return width // factor, height // factor
    return None


def printable(text: str) -> str:
    """Escape characters of names in a tar that a terminal obeys or a log cannot encode."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
