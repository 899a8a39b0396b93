"""Decode images of queries outside of the model's lock, few at a time, within a time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from threading import BoundedSemaphore
from typing import TYPE_CHECKING

from probemb.errors import UserError
from tools.search.wish import QueryImage, StoredImage, check_image, decode_query

if TYPE_CHECKING:
    from torch import Tensor

QUERIES = 8  # with images at a time; more are refused, so that they cannot occupy all threads of a server
SECONDS = 20.0  # for the images of a query, waiting included
CORES_PER_DECODER = 4  # the rest of the cores stay free for the model


class Busy(UserError):
    """Too many queries with images at once; the same query may succeed later."""

    def __init__(self):
        super().__init__("Too many images are being searched with at once.", "Try again in a moment.")


class DecodingPool:
    """Threads that turn encoded images into a model's input; decoders release Python's lock."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_PER_DECODER), "decoding")
        self._places = BoundedSemaphore(QUERIES)

    def pixels(self, images: Sequence[QueryImage | StoredImage], transform: Callable) -> Tensor:
        """(K, 3, H, W); `transform`: PIL image -> (3, H, W). Raises UserError: an image cannot be decoded; Busy."""
        import torch

        for image in images:
            if isinstance(image, QueryImage):
                check_image(image)  # hopeless ones take no place
        if not self._places.acquire(blocking=False):
            raise Busy
        waiting = []
        try:
            given = [image if isinstance(image, QueryImage) else image.read() for image in images]
            end = time.monotonic() + SECONDS
            waiting = [self._pool.submit(lambda one: transform(decode_query(one)), image) for image in given]
            return torch.stack([one.result(max(0.0, end - time.monotonic())) for one in waiting])
        except TooLate:
            raise Busy from None
        finally:
            for one in waiting:
                one.cancel()
            self._places.release()
