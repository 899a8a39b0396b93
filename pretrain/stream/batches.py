"""One rank's rows of the global batches, filled in turn by this process, or ahead of time by forked workers."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from pretrain.stream.samples import Report, Rows, SampleMaker
from pretrain.stream.settings import Settings
from pretrain.stream.workers import Team, shared_tensors
from probemb.data.randomness import isolated_randomness


class Batches:
    """Rows [start, stop) of the global batches from `start_samples` on, each batch once and in order.

    With workers each fills a run of these rows, up to `settings.prefetch` batches ahead.

    Args:
        maker_of: makes the `SampleMaker` of rows [a, b).
        settings: of the stream.
    """

    def __init__(
        self, maker_of: Callable[[int, int], SampleMaker], start: int, stop: int, start_samples: int, settings: Settings
    ):
        self._batch_size, self._start_samples, self._pin = settings.batch_size, start_samples, settings.pin_memory
        rows = stop - start
        parts = max(1, min(settings.workers, rows))
        self._parts = list(pairwise(rows * i // parts for i in range(parts + 1)))
        self._makers = [maker_of(start + a, start + b) for a, b in self._parts]
        image, tokens = self._makers[0].forms()
        # Pixels whose channels lie beside each other are copied ten times faster into such memory than into planes.
        self._interleaved = image.stride(0) == 1
        self._kinds = (
            ((rows, *(image.permute(1, 2, 0) if self._interleaved else image).shape), image.dtype),
            ((rows, tokens.shape[1]), torch.int64),
            ((rows, 2), torch.int64),
            ((rows,), torch.bool),
        )
        self._prefetch = settings.prefetch if settings.workers else 0
        self._ring: list[Rows] = []
        self._team: Team | None = None

    def start(self) -> None:
        """Start the workers, unless they run or there are none."""
        if self._team is None and self._prefetch:
            self._ring = [self._rows(shared_tensors(*self._kinds)) for _ in range(self._prefetch)]
            self._team = Team([partial(self._job, part) for part in range(len(self._parts))], ahead=self._prefetch)

    def close(self) -> None:
        """End the workers and close the shards."""
        if self._team is not None:
            self._team.close()
        for maker in self._makers:
            maker.close()
        self._ring = []

    def make(self, samples_seen: int, while_waiting: Callable[[], None] | None) -> tuple[Rows, list[Report]]:
        """The rows of the batch at this position, the next one. Raises what `Team.collect` and the reader raise."""
        rows = self._rows([torch.empty(shape, dtype=dtype, pin_memory=self._pin) for shape, dtype in self._kinds])
        if self._team is None:
            with isolated_randomness():
                return rows, [self._makers[0].fill(samples_seen, rows, while_waiting)]
        reports = self._team.collect(while_waiting)
        step = (samples_seen - self._start_samples) // self._batch_size
        for tensor, ready in zip(rows, self._ring[step % self._prefetch], strict=True):
            tensor.copy_(ready)
        self._team.release()
        return rows, reports

    def waiting_for(self) -> str:
        """Description of what `make` waits for: workers and the shards they read; for another thread."""
        late = self._team.late() if self._team else [(0, "")]
        each = [(worker, self._makers[part].reading or "no shard at present") for part, worker in late]
        return ", ".join(
            f"waiting for {worker}, which reads {shard}" if worker else f"reading {shard}" for worker, shard in each
        )

    def _rows(self, tensors: list[torch.Tensor]) -> Rows:
        """Tensors of `_kinds` as rows of a batch."""
        images, *others = tensors
        return Rows(images.permute(0, 3, 1, 2) if self._interleaved else images, *others)

    def _job(self, part: int, step: int) -> Report:
        """In a worker: fill its rows of the step's place in the ring."""
        rows = self._ring[step % self._prefetch].part(*self._parts[part])
        return self._makers[part].fill(self._start_samples + step * self._batch_size, rows)
