"""The download's decoding, resizing and encoding against img2dataset's own Resizer, which decodes with OpenCV.

    python -m tools.bench.resizing

CPU time, because the requests of a download leave its processes few idle cores. Both sides read the same generated
photographs, in turn, and must give the same pictures: JPEGs of equal bytes, where the two decoders agree.
"""

from __future__ import annotations

import io
import time

from probemb.cli.command import Parser, run_command

SETTINGS = {"image_size": 256, "resize": "keep_ratio", "upscale": False, "min_size": 32, "quality": 95}
SIZES = ((400, 300), (800, 600), (1600, 1200), (4000, 3000))


def main() -> None:
    parser = Parser(prog="python -m tools.bench.resizing", description=__doc__.splitlines()[0])
    parser.add_argument("--megapixels", type=float, default=12.0, help="of all images of one size together")
    parser.add_argument("--formats", nargs="+", default=["JPEG", "PNG", "WEBP"])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()

    from tools.bench.timing import report, time_in_turn

    ours, theirs = resizers(SETTINGS)
    for form in options.formats:
        for size in SIZES if form == "JPEG" else SIZES[1:2]:
            count = max(1, round(options.megapixels * 1e6 / (size[0] * size[1])))
            images = [photograph(*size, form, seed) for seed in range(count)]
            differing = sum(ours(io.BytesIO(one))[0] != theirs(io.BytesIO(one))[0] for one in images)
            variants = {
                name: lambda resize=resize, images=images: [resize(io.BytesIO(one)) for one in images]
                for name, resize in (("img2dataset", theirs), ("download", ours))
            }
            seconds = time_in_turn(variants, options.repeats, clock=time.process_time)
            title = f"CPU time of {count} {form} of {size[0]} x {size[1]} px to {SETTINGS['image_size']} px"
            report(f"{title}, {differing} of other bytes", seconds, "img2dataset", "at most 1.1 of img2dataset's time")


def resizers(settings: dict):
    """The download's resizing and img2dataset's with the same settings."""
    from tools.download.resizing import Resizing

    ours = Resizing(settings)  # first: it silences packages that img2dataset imports
    from img2dataset.resizer import Resizer

    theirs = Resizer(
        image_size=settings["image_size"],
        resize_mode=settings["resize"],
        resize_only_if_bigger=not settings["upscale"],
        min_image_size=settings["min_size"],
        encode_quality=settings["quality"],
    )
    return ours, theirs


def photograph(width: int, height: int, form: str = "JPEG", seed: int = 0) -> bytes:
    """An encoded image with structure at all scales, like a photograph."""
    import numpy as np
    from PIL import Image

    numbers = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), np.float32)
    for scale in 4, 16, 64, min(width, height):
        noise = numbers.integers(0, 256, (scale, scale, 3), dtype=np.uint8)
        layer = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
        pixels += np.asarray(layer, np.float32) / (2 if scale == 4 else scale**0.5)
    file = io.BytesIO()
    Image.fromarray((pixels * (255 / pixels.max())).astype(np.uint8)).save(file, form, quality=90)
    return file.getvalue()


if __name__ == "__main__":
    run_command(main)
