"""Images per second of the stream against open_clip's webdataset pipeline.

    python -m tools.bench.loader --workers 2

open_clip_train.data needs webdataset 0.2.86, so its stages are composed here in the same order: tarfile_to_samples,
shuffle, select (an image and a caption), decode ("pilrgb"), rename, map_dict (transform, tokenizer), to_tuple, batched,
in a WebLoader. Both sides read the same generated JPEGs with the same transform (open_clip's, to 224 px), tokenizer,
batch and workers. The stream runs with draft decoding, as in training, and without. Each repeat restarts every loader
in turn; timing starts after the first batches, so that neither start-up nor prefetched batches count.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from probemb.cli.command import Parser, run_command
from probemb.cli.ranges import Workers

IMAGE_SIZE = 224


def main() -> None:
    parser = Parser(prog="python -m tools.bench.loader", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024], help="pixels of the JPEGs' sides")
    parser.add_argument("--images", type=int, default=512, help="JPEGs of each size, in 4 shards")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=16, help="timed in each repeat")
    parser.add_argument("--workers", type=Workers, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    import torch

    from tools.bench.timing import report

    torch.set_num_threads(1)
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            draw_shards(Path(folder), size, options.images)
            makers = {
                "webdataset": lambda f=folder: webdataset_batches(f, options.batch, options.workers),
                "stream, no draft": lambda f=folder: stream_batches(f, options.batch, options.workers, draft=False),
                "stream": lambda f=folder: stream_batches(f, options.batch, options.workers, draft=True),
            }
            seconds: dict[str, list[float]] = {name: [] for name in makers}
            for _ in range(options.repeats):
                for name, make in makers.items():
                    seconds[name].append(time_batches(make(), options.batches, warmup=2 * options.workers + 4))
        images = options.batch * options.batches
        extra = {
            name: {
                "images/s": f"{images / statistics.median(times):,.0f}",
                "speed-up": f"{statistics.median(b / a for a, b in zip(times, seconds['webdataset'])):.2f}",
            }
            for name, times in seconds.items()
        }
        title = f"{images} JPEGs of {size} x {size} px to {IMAGE_SIZE} px, {options.workers} workers"
        target = "speed-up of the stream at least 1.2 at 256 px, 1.5 at 1024 px"
        report(title, seconds, "webdataset", target, extra)


def draw_shards(folder: Path, size: int, images: int, shards: int = 4) -> None:
    """Write JPEGs with structure at all scales, like photographs, and their index."""
    from probemb.data.shards.index import Shard, write_index
    from probemb.data.shards.writer import encode_captions, tar_writer
    from tools.bench.resizing import photograph

    rows = []
    for s in range(shards):
        path = folder / f"{s:05d}.tar"
        count = images * (s + 1) // shards - images * s // shards
        with open(path, "wb") as shard, tar_writer(shard) as tar:
            for i in range(count):
                caption = encode_captions(["a photo of some noise, " * 3])
                tar.write({"__key__": f"{i:06d}", "jpg": photograph(size, size, seed=s * images + i), "txt": caption})
        rows.append(Shard(path.name, path, count, path.stat().st_size))
    write_index(folder, rows)


def parts():
    """The transform and the tokenizer of both sides."""
    from probemb.models.inputs import Tokenizer, create_transforms

    return create_transforms({"preprocess": {"size": IMAGE_SIZE}}).train, Tokenizer(77)


def stream_batches(folder: str, batch: int, workers: int, draft: bool) -> Iterator:
    """Infinite batches of the stream."""
    from pretrain.stream.settings import Settings
    from pretrain.stream.stream import Stream
    from probemb.data.shards.index import read_index

    transform, tokenizer = parts()
    settings = Settings(batch_size=batch, workers=workers, draft=draft)
    with Stream(read_index(folder), settings, transform, tokenizer) as stream:
        for one in stream:
            yield one.images, one.tokens


def webdataset_batches(folder: str, batch: int, workers: int) -> Iterator:
    """Infinite batches of open_clip's stages."""
    import webdataset as wds

    transform, tokenizer = parts()
    dataset = wds.DataPipeline(
        wds.ResampledShards(sorted(map(str, Path(folder).glob("*.tar")))),
        wds.tarfile_to_samples(),
        wds.shuffle(bufsize=5000, initial=100),
        wds.select(lambda sample: "txt" in sample and "jpg" in sample),
        wds.decode("pilrgb"),
        wds.rename(image="jpg;png;jpeg;webp", text="txt"),
        wds.map_dict(image=transform, text=lambda text: tokenizer([text])[0]),
        wds.to_tuple("image", "text"),
        wds.batched(batch, partial=False),
    )
    yield from wds.WebLoader(dataset, batch_size=None, shuffle=False, num_workers=workers)


def time_batches(batches: Iterator, count: int, warmup: int) -> float:
    """Seconds for `count` batches after `warmup` ones."""
    for _ in range(warmup):
        next(batches)
    began = time.perf_counter()
    for _ in range(count):
        images, tokens = next(batches)
    seconds = time.perf_counter() - began
    if images.shape[1:] != (3, IMAGE_SIZE, IMAGE_SIZE) or tokens.shape[1:] != (77,):
        raise RuntimeError(f"the loader gave {tuple(images.shape)} and {tuple(tokens.shape)}")
    batches.close()
    return seconds


if __name__ == "__main__":
    run_command(main)
