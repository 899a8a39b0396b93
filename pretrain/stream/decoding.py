"""Decode JPEGs on the device, and crop and resize them there, while the step before is computed.

A worker hands over the bytes of a JPEG in the place of its pixels, with the crop that it drew. What a device's decoder
may read otherwise than libjpeg, or cannot read, workers decode as ever (`undecoded`).

torchvision's decoder on CUDA writes its results without regard for kernels that are queued and still read that memory
(pytorch/vision pull request 9606). So a thread decodes, with a CUDA stream of its own, and waits for all that it has
queued there before it decodes again; neither the training's thread nor its stream waits for that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import nullcontext
from functools import partial
from threading import Event, Thread
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from probemb.data.failures import BadSample
from probemb.data.images import decode_image, size_of_plain_jpeg
from probemb.data.pixels import RandomCrop, as_pixels, random_box, resize
from probemb.errors import UserError

ENTRY = 7  # numbers that describe a JPEG
MAX_PIXELS = 16_000_000  # of a JPEG that is decoded on the device
MAX_REDUCTION = 32  # of a crop's side; CUDA's resizing ends with an error beyond 47
_PIXELS_AT_ONCE = 64_000_000  # 192 MB
_REFUSED_AT_ONCE = 16  # JPEGs in a group that is decoded again where one of more is refused
_LOOK_UP_SECONDS = 0.5
_CLOSING_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Jpeg(NamedTuple):
    """A JPEG that is not decoded yet, its (width, height), and the part that is wanted (top, left, height, width)."""

    data: bytes
    size: tuple[int, int]
    box: tuple[int, int, int, int]

    @property
    def entry(self) -> tuple[int, ...]:
        """Its `ENTRY` numbers for `DeviceDecoder.start`."""
        return len(self.data), *self.size, *self.box


class Decoded(NamedTuple):
    """Pixels of a batch (b, 3, H, W) uint8 on the device, and the reason for each row that could not be decoded."""

    images: Tensor
    failures: dict[int, str]
    ready: torch.cuda.Event | None


def crop_of(transform: Callable) -> RandomCrop:
    """The random crop that a transform consists of.

    Raises:
        UserError: it does more than that, or something else.
    """
    steps = getattr(transform, "transforms", [transform])
    if len(steps) == 1 and isinstance(steps[0], RandomCrop):
        return steps[0]
    raise UserError(
        "A device decodes images of which the transform only crops and resizes pixels, as torch does.",
        "Set data.decode to workers.",
    )


def undecoded(data: bytes, crop: RandomCrop, seed: Callable[[], None], room: int, exif: bool) -> Jpeg | None:
    """The image as it is stored, if a device may decode it and it has at most `room` bytes; else None.

    `seed` sets the random state from which the crop is drawn. Raises BadSample, by the header alone.
    """
    size = size_of_plain_jpeg(data, exif=exif) if len(data) <= room else None
    if size is None or size[0] * size[1] > MAX_PIXELS:
        return None
    seed()
    box = random_box(*size, crop.scale, crop.ratio)
    if box[2] > MAX_REDUCTION * crop.size[0] or box[3] > MAX_REDUCTION * crop.size[1]:
        return None
    return Jpeg(data, size, box)


class DeviceDecoder:
    """Decodes one batch at a time in the background.

    Args:
        device: where; a CPU's decoder is libjpeg, as PIL's.
        crop: what the workers drew boxes for.

    Attributes:
        decoded, refused, by_workers: images that the device has decoded, that it could not decode, and that came as
            pixels.
        awaited: whether somebody waits for a batch at present.

    Raises:
        UserError: torchvision has no such decoder; from `finish`: it decodes nothing, or has no memory.
    """

    def __init__(self, device: torch.device, crop: RandomCrop):
        self.device, self.size, self.interpolation = device, crop.size, crop.interpolation
        self.decoded, self.refused, self.by_workers, self.awaited = 0, 0, 0, False
        self._closed, self._thread = Event(), None
        self._queue: torch.cuda.Stream | None = None  # made by the thread: workers fork before CUDA is in use
        try:
            from torchvision.io import decode_jpeg
        except ImportError as error:
            raise UserError(
                "This version of torchvision does not decode JPEGs.",
                "Set data.decode to workers, or install the version that constraints.txt names.",
            ) from error
        self._decode_jpegs = partial(decode_jpeg, mode="RGB", device=device)

    def start(self, images: Tensor, jpegs: Tensor) -> Future[Decoded]:
        """Begin with a batch; the one before is finished.

        Args:
            images: (b, 3, H, W) uint8 on the CPU, the channels of a pixel beside each other; a JPEG's bytes are the
                first ones of its row.
            jpegs: (b, 7) int64, `Jpeg.entry` of each row; zeros for pixels.
        """
        self.by_workers += int((jpegs[:, 0] == 0).sum())
        batch: Future[Decoded] = Future()
        self._thread = Thread(target=self._run, args=(batch, images, jpegs), name="decoding", daemon=True)
        self._thread.start()
        return batch

    def finish(self, batch: Future[Decoded], while_waiting: Callable[[], None] | None = None) -> Decoded:
        """The decoded batch, for the stream of the caller; `while_waiting` is called about every half second."""
        self.awaited = True
        try:
            while not wait([batch], _LOOK_UP_SECONDS).done:
                if while_waiting:
                    while_waiting()
            found = batch.result()
        finally:
            self.awaited = False
        if found.ready is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_event(found.ready)
            found.images.record_stream(here)
        return found

    def close(self) -> None:
        """End with the group of images that is being decoded; waits no longer than a few seconds for that."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_CLOSING_SECONDS)

    def _run(self, batch: Future[Decoded], images: Tensor, jpegs: Tensor) -> None:
        try:
            batch.set_result(self._decode_batch(images, jpegs))
        except BaseException as error:  # for the thread that waits for the batch
            batch.set_exception(error)

    def _decode_batch(self, images: Tensor, jpegs: Tensor) -> Decoded:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own
            self._queue = self._queue or torch.cuda.Stream(self.device)
        stored = images.permute(0, 2, 3, 1).flatten(1)  # a view
        with torch.cuda.stream(self._queue) if self._queue else nullcontext():
            out = images.to(self.device, non_blocking=True, copy=True)
            failures = {}
            for rows in _some_at_once(jpegs.tolist()):
                data = [stored[row, :length] for row, (length, *_) in rows]
                for (row, (_, *place)), one, pixels in zip(rows, data, self._decode(data), strict=True):
                    try:
                        out[row] = self._cropped(pixels, *place) if pixels is not None else self._read(one, *place)
                    except BadSample as error:
                        failures[row] = str(error)
            return Decoded(out, failures, self._queue.record_event() if self._queue else None)

    def _decode(self, data: Sequence[Tensor]) -> list[Tensor | None]:
        """(3, H, W) uint8 each; None for what the decoder refuses."""
        if self._closed.is_set():
            raise CancelledError
        if self._queue:
            self._queue.synchronize()
        try:
            found = self._decode_jpegs(list(data))
        except RuntimeError as error:  # of any of them
            if len(data) == 1:
                self._refuse(str(error))
                return [None]
            step = _REFUSED_AT_ONCE if len(data) > _REFUSED_AT_ONCE else 1
            parts = [self._decode(data[i : i + step]) for i in range(0, len(data), step)]
            return [one for part in parts for one in part]
        self.decoded += len(found)
        return found

    def _refuse(self, reason: str) -> None:
        """Count a refusal. Raises UserError if it comes from the machine and not from the image."""
        self.refused += 1
        first = " ".join(reason.split())[:300]
        if "out of memory" in reason:
            remedy = "Lower batch_size, or set data.decode to workers."
            raise UserError(f"There is no memory for decoding on {self.device}: {first}", remedy)
        if self.refused == _REFUSED_AT_ONCE and not self.decoded:
            what = f"{self.device} has decoded none of the first {self.refused} JPEGs: {first}"
            raise UserError(what, "Set data.decode to workers.")
        if self.refused == 1:
            _log.warning("data: %s does not decode a JPEG, and the CPU reads it instead: %s", self.device, first)

    def _cropped(self, pixels: Tensor, w: int, h: int, top: int, left: int, height: int, width: int) -> Tensor:
        """The box of decoded pixels, resized to (3, H, W) uint8 on the device."""
        if pixels.shape != (3, h, w):
            raise BadSample("the image is corrupt: it has another size than its header says")
        part = pixels[:, top : top + height, left : left + width]
        if part.shape[1:] == tuple(self.size):
            return part
        # CUDA has no antialiased kernel for uint8.
        mode = self.interpolation.value
        resized = F.interpolate(part[None].float(), tuple(self.size), mode=mode, antialias=True, align_corners=False)
        return resized[0].round_().clamp_(0, 255).to(torch.uint8)

    def _read(self, data: Tensor, w: int, h: int, top: int, left: int, height: int, width: int) -> Tensor:
        """The same by `decode_image`, which decodes more, and says what is wrong. Raises BadSample."""
        pixels = as_pixels(decode_image(data.numpy().tobytes()))
        return resize(pixels[:, top : top + height, left : left + width], self.size, self.interpolation)


def _some_at_once(jpegs: list[list[int]]) -> Iterator[list[tuple[int, list[int]]]]:
    """Rows of JPEGs with their entries, in groups that have at most `_PIXELS_AT_ONCE` pixels, or one."""
    group, pixels = [], 0
    for row, entry in enumerate(jpegs):
        if not entry[0]:
            continue
        area = entry[1] * entry[2]
        if group and pixels + area > _PIXELS_AT_ONCE:
            yield group
            group, pixels = [], 0
        group.append((row, entry))
        pixels += area
    if group:
        yield group
