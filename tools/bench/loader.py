"""Images per second of the stream against open_clip's webdataset pipeline.

    python -m tools.bench.loader --workers 2

open_clip_train.data needs webdataset 0.2.86, so its stages are composed here in the same order: tarfile_to_samples,
shuffle, select (an image and a caption), decode ("pilrgb"), rename, map_dict (transform, tokenizer), to_tuple, batched,
in a WebLoader, with open_clip's transform (PIL, to 224 px, float32). Both sides read the same generated JPEGs, --images
of each of the --sizes in pixels, with the same random crops, tokenizer, batch and workers. Each repeat restarts every
loader in turn; timing starts after the first batches, so that neither start-up nor prefetched batches count. Aim: 3
times as fast at 256 px, 4 at 1024 px.
"""

import io
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import webdataset as wds
from PIL import Image

from pretrain.config import Data
from pretrain.stream.stream import Stream
from probemb import models
from probemb.cli.command import run_command
from probemb.data.shards.index import read_index
from probemb.data.shards.write import encode_captions, write_corpus
from tools.bench.timing import in_turn, options, report

IMAGE_SIZE = 224
SHARDS = 4


def main() -> None:
    o = options(__doc__, sizes=[256, 1024], images=512, batch=32, batches=16, workers=2, repeats=5)
    torch.set_num_threads(1)
    batch, workers, count = o.batch, o.workers, o.batches
    for size in o.sizes:
        with tempfile.TemporaryDirectory() as folder:
            text, shards = encode_captions(["a photo of some noise, " * 3]), Path(folder, "shards")
            samples = ({"jpg": photograph(size, seed=i), "txt": text} for i in range(o.images))
            write_corpus(shards, samples, -(-o.images // SHARDS))
            loaders = {
                "webdataset": partial(webdataset_batches, shards, batch, workers),
                "stream": partial(stream_batches, shards, batch, workers),
                "stream, resized by PIL": partial(stream_batches, shards, batch, workers, resize="pil"),
            }
            starts = {name: partial(started, make) for name, make in loaders.items()}
            measured = in_turn(dict.fromkeys(loaders, partial(read, count)), o.repeats, starts)
        extra = {name: {"images/s": f"{batch * count / times.median:,.0f}"} for name, times in measured.items()}
        title = f"{batch * count} JPEGs of {size} x {size} px to {IMAGE_SIZE} px, {workers} workers"
        report(title, measured, "webdataset", extra)


def started(make: Callable[[], Iterator]) -> tuple[Iterator]:
    """A loader whose workers run at full speed: what they had prepared is read."""
    batches = make()
    read(8, batches)
    return (batches,)


def read(count: int, batches: Iterator) -> None:
    """Wait for that many batches."""
    for images, tokens in islice(batches, count):
        if images.shape[1:] != (3, IMAGE_SIZE, IMAGE_SIZE) or tokens.shape[1:] != (77,):
            raise RuntimeError(f"the loader gave {tuple(images.shape)} and {tuple(tokens.shape)}")


def photograph(size: int, seed: int) -> bytes:
    """A JPEG with structure at all scales, like a photograph."""
    numbers = np.random.default_rng(seed)
    pixels = np.zeros((size, size, 3), np.float32)
    for scale in (4, 16, 64, size):
        noise = Image.fromarray(numbers.integers(0, 256, (scale, scale, 3), dtype=np.uint8))
        layer = noise.resize((size, size), Image.Resampling.BICUBIC)
        pixels += np.asarray(layer, np.float32) / (2 if scale == 4 else scale**0.5)
    file = io.BytesIO()
    Image.fromarray((pixels * (255 / pixels.max())).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def stream_batches(folder: Path, batch: int, workers: int, resize: str = "tensor") -> Iterator:
    """Infinite batches of the stream, as in training."""
    transform = models.create_transforms({"preprocess": {"size": IMAGE_SIZE}}, resize=resize).train
    data = Data(workers=workers)
    with Stream([read_index(folder)], data, transform, models.Tokenizer(77), batch_size=batch) as stream:
        for loaded in stream:
            yield loaded.images, loaded.tokens


def webdataset_batches(folder: Path, batch: int, workers: int) -> Iterator:
    """Infinite batches of open_clip's stages."""
    from open_clip.transform import PreprocessCfg, image_transform_v2  # takes seconds to import

    transform, tokenizer = image_transform_v2(PreprocessCfg(size=IMAGE_SIZE), is_train=True), models.Tokenizer(77)
    dataset = wds.DataPipeline(
        wds.ResampledShards(sorted(map(str, folder.glob("*.tar")))),
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


if __name__ == "__main__":
    run_command(main)
