"""Read, decode, transform and tokenise the samples of slots; replace unusable samples.

Everything is a function of the seed and the slot: the drawn caption and the transform's random numbers do not depend on
the rank, the worker, or earlier samples.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from pretrain.stream.jpeg_draft import CropDraft
from pretrain.stream.open_shards import OpenShards
from pretrain.stream.order import Order, draw
from pretrain.stream.settings import Settings
from pretrain.stream.workers import shared_tensors
from probemb.data.failures import BadSample
from probemb.data.images import decode_image
from probemb.data.randomness import isolated_randomness, seed_all
from probemb.data.remote.cache import ShardCache
from probemb.data.shards.index import Shard
from probemb.data.shards.samples import parse_sample
from probemb.errors import UserError

_CAPTION, _TRANSFORM = 11, 12  # uses of random numbers
_SEARCH_LIMIT = 20_000  # samples tried in place of a bad one
_LONGEST_REASON = 300
_PIXELS = (torch.uint8, torch.float32)


class Rows(NamedTuple):
    """Rows of a batch, tensors that are filled in place."""

    images: torch.Tensor  # (b, 3, H, W) uint8 or float32
    tokens: torch.Tensor  # (b, L) int64
    slots: torch.Tensor  # (b, 2) int64: shard and index of the slot
    replaced: torch.Tensor  # (b,) bool: the slot's own sample is unusable

    def part(self, start: int, stop: int) -> "Rows":
        """Views of rows [start, stop)."""
        return Rows(*(tensor[start:stop] for tensor in self))


class Report(NamedTuple):
    """Keys and failures of some rows."""

    keys: list[str]  # "shard/key" of the sample that each row shows
    failures: list[tuple[int, str]]  # shard and reason for every slot whose own sample cannot be used
    notices: list[str]  # what is odd about shards that can be used


class Example(NamedTuple):
    """Content of a row."""

    image: torch.Tensor
    tokens: torch.Tensor
    key: str


class SampleMaker:
    """Makes rows [start, stop) of every global batch.

    Args:
        order, shards: the samples and their places.
        labels: readable names of the shards.
        transform: PIL image -> (3, H, W) uint8 or float32; may use the global random numbers of torch, numpy and
            Python.
        tokenizer: list of n strings -> (n, L) int64.
        settings: how a sample is read.
        cache: of remote shards; None if there are none.
    """

    def __init__(
        self,
        order: Order,
        shards: Sequence[Shard],
        labels: Sequence[str],
        start: int,
        stop: int,
        *,
        transform: Callable[[Image.Image], torch.Tensor],
        tokenizer: Callable[[list[str]], torch.Tensor],
        settings: Settings,
        cache: ShardCache | None = None,
    ):
        self.order, self.shards, self.labels, self.start, self.stop = order, shards, labels, start, stop
        self.transform, self.tokenizer, self.settings = transform, tokenizer, settings
        self._draft = CropDraft(transform) if settings.draft else None
        self._lanes = range(start // order.share, (stop - 1) // order.share + 1)
        self._open = OpenShards(limit=len(self._lanes) + 16, spare=16, cache=cache, check=settings.verify_hash)
        self._remote = cache is not None
        self._epoch = -1
        # The number of the shard that is being read, for the process that waits; -1 for none.
        self._now = shared_tensors(((1,), torch.int64))[0].numpy()
        self._now[0] = -1
        self._good = np.full((stop - start, 2), -1, np.int64)  # step and row of each row's stand-in, once known

    def forms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A transformed image (3, H, W) and tokens (1, L), found by trying, for their shapes and types.

        Raises:
            UserError: the transform or tokenizer returns another type or number of dimensions.
        """
        with isolated_randomness():
            seed_all(0)
            image = self.transform(Image.new("RGB", (256, 256)))
        tokens = torch.as_tensor(self.tokenizer(["a"]))
        if not isinstance(image, torch.Tensor) or image.dtype not in _PIXELS or image.ndim != 3:
            raise UserError(
                "The transform does not turn an image into a uint8 or float32 tensor of three dimensions.",
                "Use the transforms that belong to the model.",
            )
        if tokens.dtype != torch.int64 or tokens.ndim != 2 or len(tokens) != 1:
            raise UserError(
                "The tokenizer does not turn n captions into an (n, L) int64 tensor.",
                "Use the tokenizer that belongs to the model.",
            )
        return image, tokens

    def fill(self, samples_seen: int, rows: Rows, while_waiting: Callable[[], None] | None = None) -> Report:
        """Fill these rows of the global batch that follows after `samples_seen` samples.

        Draws from the global random numbers, see `isolated_randomness`. `while_waiting`: see `OpenShards`.
        """
        self._open.while_waiting = while_waiting
        epoch, step = self.order.locate(samples_seen)
        if epoch != self._epoch:
            self._epoch = epoch
            self._good.fill(-1)
        if self._remote:
            self._prepare(epoch, step)
        report = Report([], [], [])
        slots = self.order.rows(epoch, step, self.start, self.stop)
        rows.slots.copy_(torch.from_numpy(np.stack([slots.shard, slots.index], axis=1)))
        for i, (shard, index, visit) in enumerate(zip(*(column.tolist() for column in slots), strict=True)):
            try:
                example = self._example(shard, index, visit)
                rows.replaced[i] = False
                self._good[i] = step, self.start + i
            except BadSample as error:
                report.failures.append((shard, printable(str(error))))
                example = self._stand_in(epoch, step, i)
                rows.replaced[i] = True
            if example.image.shape != rows.images.shape[1:]:
                shapes = tuple(example.image.shape), tuple(rows.images.shape[1:])
                raise UserError(
                    f"The transform gave an image of shape {shapes[0]} where others have {shapes[1]}.",
                    "Use a transform that crops or resizes every image to the same size.",
                )
            rows.images[i].copy_(example.image)
            rows.tokens[i].copy_(example.tokens)
            report.keys.append(example.key)
        self._now[0] = -1
        report.notices.extend(map(printable, self._open.notices))
        self._open.notices.clear()
        return report

    @property
    def reading(self) -> str:
        """The path or address of the shard that is being read, in whichever process; "" for none."""
        return str(self.shards[int(self._now[0])].path) if self._now[0] >= 0 else ""

    def close(self) -> None:
        """Close the shards."""
        self._open.close()

    def _prepare(self, epoch: int, step: int) -> None:
        """Fetch the shards of all lanes, then the lanes' next ones."""
        ahead = [self.order.shards_ahead(epoch, lane, step * self.order.share) for lane in self._lanes]
        self._open.prepare(self.shards[shard] for column in zip(*ahead, strict=True) for shard in column)

    def _example(self, shard: int, index: int, visit: int) -> Example:
        self._now[0] = shard
        reader = self._open.get(self.shards[shard])
        if index >= len(reader):
            raise BadSample(f"sample {index}: the shard holds only {len(reader)} samples")
        key, parts = reader.read(index)
        try:
            sample = parse_sample(parts, key)
            seed = partial(seed_all, draw(self.order.seed, _TRANSFORM, shard, index, visit))
            draft = self._draft and partial(self._draft.needed, seed=seed)
            image = decode_image(sample.image, draft, exif=self.settings.exif)
            which = draw(self.order.seed, _CAPTION, shard, index, visit) % len(sample.captions)
            caption = sample.captions[which if self.settings.caption == "random" else 0]
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

    def _stand_in(self, epoch: int, step: int, i: int) -> Example:
        """The last good sample of the same row in this epoch, or the first good one if there is none before.

        Not of the same lane: its last sample may be in this batch, where a repeat would be a false negative. It is
        read again, so that a restart gives the same sample. A row without any good sample takes the next row's.
        """
        order, row = self.order, self.start + i
        known = [tuple(self._good[i].tolist())] if self._good[i, 0] >= 0 else []
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
            self._good[i] = other
            return example
        raise UserError(
            f"Not one of the {tried} samples tried in place of a bad one can be used (the last: {printable(last)}).",
            "Check the shards: most of their samples are damaged or have no captions.",
        )


def printable(text: str) -> str:
    """Escape characters of names in a tar that a terminal obeys or a log cannot encode."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
