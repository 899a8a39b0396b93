"""Settings of a stream of training samples."""

from dataclasses import dataclass

from pretrain.stream.filter import NO_FILTER, Filter
from probemb.data.remote.sources import DEFAULT_POLICY, FetchPolicy
from probemb.errors import UserError, nearest

CAPTIONS = ("random", "first")


@dataclass(frozen=True)
class Settings:
    """Settings of how a `Stream` orders and loads its samples.

    Args:
        batch_size: the global batch, over all ranks.
        seed: any integer.
        lanes: see `Order`; None takes the largest divisor of the batch that is at most 64. A run keeps its lanes.
        window: number of samples of a shard that are shuffled together.
        caption: which of a sample's captions: "random" draws one per epoch, "first" takes the first.
        workers: processes that prepare batches ahead; 0 prepares them in this one.
        prefetch: batches that workers prepare ahead, each of rows · (3·H·W + L·8) bytes of shared memory
            (uint8 pixels; 3·H·W·4 of float32).
        pin_memory: put batches into page-locked memory, for an asynchronous copy to a GPU.
        draft: decode a large JPEG at a half, a quarter or an eighth of its size where the transform's random crop has
            enough pixels even then (see `CropDraft`): faster, but not bit-identical where it applies.
        failure_share: the run stops when more than this share of all ranks' samples cannot be used,
        failure_minimum: … once so many, or its part of a whole epoch, were read since the process started.
        exif: turn images as their EXIF orientation says.
        verify_hash: compare the SHA-256 of each shard that is opened with its index, in the background; the run stops
            at a difference.
        cache: folder in which fetched shards stay, for all processes of this machine and for later runs; None takes a
            temporary one that ends with the stream.
        cache_gib: its largest size; it holds a shard for each lane of this machine, and the next one.
        filter: rules that a sample must meet; none by default.
        fetch: retries and timeouts of remote shards.
    """

    batch_size: int
    seed: int = 0
    lanes: int | None = None
    window: int = 4096
    caption: str = "random"
    workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    draft: bool = False
    failure_share: float = 0.05
    failure_minimum: int = 1000
    exif: bool = False
    verify_hash: bool = False
    cache: str | None = None
    cache_gib: float = 100.0
    filter: Filter = NO_FILTER
    fetch: FetchPolicy = DEFAULT_POLICY

    def __post_init__(self):
        if self.caption not in CAPTIONS:
            raise UserError(
                f"'{self.caption}' is no way to choose a caption.{nearest(self.caption, CAPTIONS)}",
                f"Use one of: {', '.join(CAPTIONS)}.",
            )
        if self.workers < 0 or self.prefetch < 1:
            raise UserError(
                f"{self.workers} workers with a prefetch of {self.prefetch} batches cannot work.",
                "Use 0 or more workers and a prefetch of at least 1.",
            )
