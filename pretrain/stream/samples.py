"""Decoded samples of many shards, of which a bounded number is open.

A sample is a function of the seed and the slot: the drawn caption and the transform's random numbers do not depend on
the rank, the worker, or earlier samples. Remote shards are fetched whole, if possible in the background.
"""

import errno
import hashlib
import threading
from bisect import bisect
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain, islice
from typing import BinaryIO

import numpy as np
import torch

from pretrain.config import Data
from pretrain.stream.order import draw
from probemb.data.failures import BadSample, BadShard, escaped
from probemb.data.images import decode_image
from probemb.data.randomness import seed_all
from probemb.data.remote import Remote, ShardCache, in_background
from probemb.data.shards.index import Shard
from probemb.data.shards.samples import (
    CAPTIONS,
    IMAGE_EXTENSIONS,
    TEXT_EXTENSIONS,
    Member,
    SampleSpan,
    caption_names,
    group_members,
    list_samples,
    parse_sample,
    read_sample,
    sort_groups,
    split_caption_name,
    walk_tar,
)
from probemb.errors import UserError, nearest

FETCHES = 4  # at a time, in the background
_CAPTION, _TRANSFORM, _NAME = 11, 12, 13  # uses of random numbers
_LOOKED_AT, _LOOKED_AT_SAMPLES = (32, 2), 100  # shards of a corpus, local or remote, and samples of each, for names
_LONGEST_REASON = 300
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OpenShard:
    """An open tar; places of `members` are kept in arrays, as Python objects would take about a kilobyte a sample.

    Raises BadShard, OSError; with `verify` UserError: another SHA-256 than its index says.
    """

    def __init__(self, file: BinaryIO, shard: Shard, verify: bool, members: Collection[str]):
        self._file = file
        samples, _ = list_samples(file)
        if (size := file.seek(0, 2)) != shard.bytes:  # after the walk, which says more of a damaged tar
            raise BadShard(f"{shard.path}: has {size:,} bytes, but its index says {shard.bytes:,}")
        file.seek(0)
        if verify and hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
            what = f"{shard.path} has other content than when it was indexed (another SHA-256, or the index has none)."
            raise UserError(what, "Fetch it again, or bring the index up to date: `python -m tools.shards index`.")
        samples = [span._replace(parts={e: m for e, m in span.parts.items() if e in members}) for span in samples]
        kinds: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._keys = [sample.key for sample in samples]
        self._extensions = [kinds.setdefault(tuple(sample.parts), tuple(sample.parts)) for sample in samples]
        self._first = np.cumsum([0, *map(len, self._extensions)], dtype=np.int64)
        places = [(member.offset, member.size) for sample in samples for member in sample.parts.values()]
        self._places = np.array(places, np.int64).reshape(-1, 2)

    def read(self, index: int) -> tuple[str, dict[str, bytes]]:
        """Key of a sample, and its bytes by extension. Raises BadSample."""
        if index >= len(self._keys):
            raise BadSample(f"sample {index}: the shard holds only {len(self._keys)} samples")
        key, places = self._keys[index], self._places[self._first[index] : self._first[index + 1]].tolist()
        parts = {ext: Member(ext, *place) for ext, place in zip(self._extensions[index], places, strict=True)}
        try:
            return key, read_sample(self._file.fileno(), SampleSpan(key, parts))
        except OSError as error:
            raise _unreadable(key, error) from None


class Samples:
    """Samples by shard, index and pass over the corpus; of the open shards, `limit` at most, the least recently used
    one is closed first. `labels` are the shards' names for people, `reading` the number of the one that is read, (1,).
    """

    def __init__(
        self, shards: Sequence[Shard], data: Data, transform: Callable, tokenizer: Callable, seed: int, limit: int,
        cache: ShardCache | None,
    ):  # fmt: skip
        self.shards, self.data, self.transform, self.tokenizer, self.seed = shards, data, transform, tokenizer, seed
        counts = Counter(shard.name for shard in shards)
        self.labels = [shard.name if counts[shard.name] == 1 else str(shard.path) for shard in shards]
        self._limit, self._cache, self._crop = limit, cache, find_crop(transform)
        self._open: OrderedDict[int, OpenShard | str] = OrderedDict()
        self._fetches: dict[int, Future[BinaryIO]] = {}
        self.reading = np.array([-1])
        self.members = {*IMAGE_EXTENSIONS, *TEXT_EXTENSIONS}  # that are read
        if isinstance(data.captions, dict):
            self.members |= {split_caption_name(name)[0] for name in data.captions}
        self._turns = threading.Semaphore(FETCHES)

    def read(self, shard: int, index: int, visit: int) -> tuple[torch.Tensor, torch.Tensor, str]:
        """Image (3, H, W), tokens (L,), and "shard/key" for logs. Raises BadSample; UserError: another SHA-256."""
        self.reading[0] = shard
        key, parts = self._shard(shard).read(index)
        try:
            sample = parse_sample(parts, key, names=self.caption_order(shard, index, visit))
            seed = partial(seed_all, draw(self.seed, _TRANSFORM, shard, index, visit))
            draft = self._crop and partial(draft_size, self._crop, seed=seed)
            image = decode_image(sample.image, draft, exif=self.data.exif)
            which = draw(self.seed, _CAPTION, shard, index, visit) % len(sample.captions)
            caption = sample.captions[0 if self.data.captions == "first" else which]
            seed()
            name = printable(f"{self.labels[shard]}/{key}")
            return self.transform(image), torch.as_tensor(self.tokenizer([caption]))[0], name
        except BadSample as error:
            raise BadSample(f"{key}: {error}") from None
        except (UserError, MemoryError):
            raise
        except Exception as error:  # one bad image or caption must not stop a run
            raise BadSample(f"{key}: transform or tokenizer failed ({type(error).__name__}: {error})") from None

    def caption_order(self, *slot: int) -> Sequence[str]:
        """Names by which a sample's captions are looked for: one that is drawn, then all as they are listed."""
        if not isinstance(self.data.captions, dict):
            return CAPTIONS
        names, bounds = list(self.data.captions), list(accumulate(self.data.captions.values()))
        return [names[bisect(bounds[:-1], (draw(self.seed, _NAME, *slot) >> 11) / 2**53 * bounds[-1])], *names]

    def check_names(self, corpora: Sequence[Sequence[int]]) -> None:
        """Raise UserError for a name of `data.captions` by which no sample has captions, as far as is looked: at the
        first ones of shards from all over each corpus, given by its shards' numbers, until all names are found.
        """
        unknown, known, looked = [*self.data.captions], Counter(), 0
        for numbers in corpora:
            most = _LOOKED_AT[isinstance(self.shards[numbers[0]].path, Remote)]
            for names in chain.from_iterable(map(self._names, numbers[:: -(-len(numbers) // most)])):
                unknown, looked = [name for name in unknown if name not in names], looked + 1
                known.update(names)
                if not unknown:
                    return
        if looked:  # or training says why nothing can be read
            what = f"None of {looked:,} samples from all over the data has a caption by the name {unknown[0]}."
            listed = ", ".join(name for name, _ in known.most_common(20)) or "no texts"
            remedy = f"They have {printable(listed)}: name some of these in data.captions."
            raise UserError(f"{what}{nearest(unknown[0], known)}", remedy)

    def _names(self, number: int) -> Iterator[list[str]]:
        """Names of the captions of each of a shard's first samples that can be read."""
        with suppress(BadSample, OSError), self._file(number) as file:
            for key, parts in sort_groups(islice(group_members(walk_tar(file)), _LOOKED_AT_SAMPLES))[0]:
                texts = {ext: member for ext, member in parts.items() if ext not in IMAGE_EXTENSIONS}
                with suppress(BadSample):
                    yield caption_names(read_sample(file.fileno(), SampleSpan(key, texts)))

    def prepare(self, numbers: Iterable[int]) -> list[Future[BinaryIO]]:
        """Fetch the remote shards that are not open, in this order and in the background."""
        return [self._fetch(n) for n in numbers if n not in self._open and isinstance(self.shards[n].path, Remote)]

    def close(self) -> None:
        """Close all shards."""
        self._open.clear()

    def _shard(self, number: int) -> OpenShard:
        if number not in self._open:
            while len(self._open) >= self._limit:
                self._open.popitem(last=False)  # and no other reference keeps it open
            shard = self.shards[number]
            try:
                self._open[number] = OpenShard(self._file(number), shard, self.data.verify_hash, self.members)
            except BadSample as error:
                self._open[number] = str(error)  # so that its samples fail at no cost
            except OSError as error:
                self._open[number] = str(_unreadable(str(shard.path), error))
        self._open.move_to_end(number)
        if isinstance(opened := self._open[number], str):
            raise BadShard(opened)
        return opened

    def _file(self, number: int) -> BinaryIO:
        if isinstance(self.shards[number].path, Remote):
            self._fetch(number)
            return self._fetches.pop(number).result()
        return open(self.shards[number].path, "rb", buffering=0)

    def _fetch(self, number: int) -> Future[BinaryIO]:
        def work() -> BinaryIO:
            with self._turns:
                return self._cache.open(self.shards[number].path, self.shards[number].bytes)

        if number not in self._fetches:
            self._fetches[number] = in_background(work)
        return self._fetches[number]


def _unreadable(what: str, error: OSError) -> BadSample:
    if error.errno in _OUT_OF_RESOURCES:  # not a fault of the data
        remedy = "Free space for fetched shards (data.cache, TMPDIR), raise ulimit -n, or use fewer lanes or workers."
        raise UserError(f"{what} cannot be read: {error.strerror}.", remedy)
    return BadShard(f"{what}: cannot be read ({error.strerror})")


def find_crop(transform: Callable) -> Callable | None:
    """The random crop (torchvision's or `RandomCrop`) with which a transform starts; None if it starts otherwise."""
    first = next(iter(getattr(transform, "transforms", [transform])), None)
    return first if hasattr(first, "get_params") and len(getattr(first, "size", ())) == 2 else None


def draft_size(crop: Callable, width: int, height: int, seed: Callable[[], None]) -> tuple[int, int] | None:
    """Width and height, 1/8, 1/4 or 1/2 of its own, at which a JPEG is decoded for a crop, or None for all of it; after
    `seed` the crop is drawn as it will be, and both its sides keep as many pixels as its result has."""
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
    """`escaped`, and not too long."""
    text = escaped(text)
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
