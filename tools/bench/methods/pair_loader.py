"""Images per second and bytes an image of finetuning's loader: uint8 against normalised floats of PIL.

    python -m tools.bench.methods.pair_loader --workers 2

All sides read the same generated JPEGs through `PairLoader`, in worker processes, with the same random crops: resized
by torch (`data.resize: tensor`), by PIL (`pil`), and by open_clip's transform (PIL, float32), as finetuning did before
there was a choice. Each repeat restarts every loader in turn; timing starts after the first batches.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from probemb.cli.command import Parser, run_command
from tools.bench.loader import IMAGE_SIZE, draw_shards, open_clips, parse_timing, parts, time_batches


def main() -> None:
    parser = Parser(prog="python -m tools.bench.methods.pair_loader", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=512, help="pixels of the JPEGs' sides (%(default)s)")
    options = parse_timing(parser, images=256, batches=12)

    import torch

    from tools.bench.timing import report

    torch.set_num_threads(1)
    transforms = {"floats": open_clips(), "uint8, pil": parts("pil")[0], "uint8, tensor": parts("tensor")[0]}
    seconds: dict[str, list[float]] = {name: [] for name in transforms}
    held: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        draw_shards(Path(folder), options.size, options.images)
        for _ in range(options.repeats):
            for name, transform in transforms.items():
                batches = noting_bytes(pairs(folder, transform, options.batch, options.workers), name, held)
                seconds[name].append(time_batches(batches, options.batches, warmup=2 * options.workers + 4))
    images = options.batch * options.batches
    extra = {
        name: {
            "images/s": f"{images / statistics.median(times):,.0f}",
            "speed-up": f"{statistics.median(b / a for a, b in zip(times, seconds['floats'])):.2f}",
            "bytes an image": f"{held[name]:,}",
        }
        for name, times in seconds.items()
    }
    title = f"{images} JPEGs of {options.size} x {options.size} px to {IMAGE_SIZE} px, {options.workers} workers"
    report(title, seconds, "floats", "a quarter of the bytes, and no slower", extra)


def pairs(folder: str, transform: Callable, batch: int, workers: int) -> Iterator:
    """Infinite batches of finetuning's loader."""
    from finetune.loading.pair_loader import PairLoader
    from probemb.data.captions.find import find_captions

    with PairLoader(find_captions(folder), transform, parts()[1], batch, workers=workers) as loader:
        for epoch in count():
            for one in loader.epoch(epoch):
                yield one.images, one.tokens


def noting_bytes(batches: Iterator, name: str, held: dict[str, int]) -> Iterator:
    """The same batches; `held` gets the bytes of an image."""
    try:
        for images, tokens in batches:
            held[name] = images.nbytes // len(images)
            yield images, tokens
    finally:
        batches.close()


if __name__ == "__main__":
    run_command(main)
