"""Images per second of the stream against open_clip's webdataset pipeline.

    python -m tools.bench.loader --workers 2

open_clip_train.data needs webdataset 0.2.86, so its stages are composed here in the same order: tarfile_to_samples,
shuffle, select (an image and a caption), decode ("pilrgb"), rename, map_dict (transform, tokenizer), to_tuple, batched,
in a WebLoader, with open_clip's transform (PIL, to 224 px, float32). Both sides read the same generated JPEGs with the
same random crops, tokenizer, batch and workers. The stream runs as in training (`data.resize: tensor`), with PIL's
resizing, and without draft decoding. Each repeat restarts every loader in turn; timing starts after the first batches,
so that neither start-up nor prefetched batches count. Then the stages of an image in one process, in turn, beside the
stream's own time for it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.cli.command import Parser, run_command
from probemb.cli.ranges import Workers

if TYPE_CHECKING:
    import torch

    from pretrain.stream.stream import Stream

IMAGE_SIZE = 224


def main() -> None:
    parser = Parser(prog="python -m tools.bench.loader", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024], help="pixels of the JPEGs' sides")
    options = parse_timing(parser, images=512, batches=16)

    import torch

    from tools.bench.timing import report

    torch.set_num_threads(1)
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            draw_shards(Path(folder), size, options.images)
            makers = {
                "webdataset": lambda f=folder: webdataset_batches(f, options.batch, options.workers),
                "stream, no draft": lambda f=folder: stream_batches(f, options.batch, options.workers, draft=False),
                "stream, pil": lambda f=folder: stream_batches(f, options.batch, options.workers, resize="pil"),
                "stream": lambda f=folder: stream_batches(f, options.batch, options.workers),
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
        target = "speed-up of the stream at least 2.3 at 256 px, 4 at 1024 px"
        report(title, seconds, "webdataset", target, extra)
        report_stages(size, options.repeats)


def parse_timing(parser: Parser, images: int, batches: int) -> Namespace:
    """Parse the command line with the options of every bench of a loader, of which these are defaults."""
    parser.add_argument("--images", type=int, default=images, help="JPEGs of each size, in 4 shards (%(default)s)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=batches, help="timed in each repeat (%(default)s)")
    parser.add_argument("--workers", type=Workers, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


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


def parts(resize: str = "tensor"):
    """This project's transform and tokenizer."""
    from probemb.models.inputs import Tokenizer, create_transforms

    return create_transforms({"preprocess": {"size": IMAGE_SIZE}}, resize=resize).train, Tokenizer(77)


def open_clips():
    """open_clip's transform for training, to normalised float32."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    return image_transform_v2(PreprocessCfg(size=IMAGE_SIZE), is_train=True)


def report_stages(size: int, repeats: int, images: int = 32) -> None:
    """A table of where an image's time goes in one process, and the stream's whole time for it."""
    from functools import partial

    import torch

    from pretrain.stream.jpeg_draft import CropDraft
    from probemb.data.images import decode_image
    from probemb.data.randomness import seed_all
    from tools.bench.resizing import photograph
    from tools.bench.timing import report, time_in_turn

    transform, tokenizer = parts("tensor")
    crop, draft = transform.transforms[0], CropDraft(transform)
    jpegs = [photograph(size, size, seed=i) for i in range(images)]
    seeds = [partial(seed_all, i) for i in range(images)]
    decoded = [decode_image(jpeg, partial(draft.needed, seed=seed)) for jpeg, seed in zip(jpegs, seeds)]
    one, batch = (torch.empty(IMAGE_SIZE, IMAGE_SIZE, 3, dtype=torch.uint8).permute(2, 0, 1) for _ in range(2))
    caption = "a photo of some noise, " * 3

    def each(stage):
        return lambda: [stage(i) for i in range(images)]

    with tempfile.TemporaryDirectory() as folder:
        draw_shards(Path(folder), size, images, shards=1)
        stream = stream_batches(folder, images, 0)
        variants = {
            "decode": each(lambda i: decode_image(jpegs[i], partial(draft.needed, seed=seeds[i]))),
            "seed and crop's box": each(lambda i: (seeds[i](), crop.get_params(decoded[i], crop.scale, crop.ratio))),
            "seed, box, crop, resize": each(lambda i: (seeds[i](), transform(decoded[i]))),
            "copy to the batch": each(lambda i: batch.copy_(one)),
            "tokens": each(lambda i: tokenizer([caption])),
            "stream, whole": lambda: next(stream),
        }
        seconds = time_in_turn(variants, 4 * repeats, clock=time.process_time)
    extra = {name: {"ms an image": f"{1e3 * statistics.median(times) / images:.3f}"} for name, times in seconds.items()}
    title = f"CPU time of {images} JPEGs of {size} x {size} px, one process"
    report(title, seconds, "decode", "the whole at most 1.3 times decoding", extra)


def stream_batches(
    folder: str,
    batch: int,
    workers: int,
    draft: bool = True,
    resize: str = "tensor",
    device: torch.device | None = None,
) -> Iterator:
    """Infinite batches of the stream; `device` decodes, or the workers if it is None."""
    with open_stream(folder, batch, workers, draft, resize, device) as stream:
        for one in stream:
            yield one.images, one.tokens


def open_stream(
    folder: str, batch: int, workers: int, draft: bool, resize: str = "tensor", device: torch.device | None = None
) -> Stream:
    """The stream over `draw_shards`' folder, for as many batches as are asked for."""
    from pretrain.stream.settings import Settings
    from pretrain.stream.stream import Stream
    from probemb.data.shards.index import read_index

    transform, tokenizer = parts(resize)
    decode, pin = ("device", device.type == "cuda") if device else ("workers", False)
    settings = Settings(batch_size=batch, workers=workers, draft=draft, decode=decode, pin_memory=pin)
    return Stream(read_index(folder), settings, transform, tokenizer, device=device)


def webdataset_batches(folder: str, batch: int, workers: int) -> Iterator:
    """Infinite batches of open_clip's stages."""
    import webdataset as wds

    transform, tokenizer = open_clips(), parts()[1]
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
