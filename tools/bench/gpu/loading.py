"""The stream's images per second, against what a GPU takes, and decoding on the GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from pretrain.plan.peak import images_at, peak_flops
from probemb.cli.machine import cores
from tools.bench.gpu.notes import Notes, Place
from tools.bench.gpu.steps import configured
from tools.bench.gpu.throughput import MFU

SIDE = 256  # pixels of the JPEGs
LEVELS = 3  # of 255, that other decoders' pixels may be away in the mean


def loader(place: Place, notes: Notes) -> None:
    """With 8 and 16 workers; enough is what ViT-B/16 takes at the MFU that is asked for."""
    from tools.bench.loader import draw_shards, stream_batches, time_batches

    images, batch, batches = (32, 4, 2) if place.small else (512, 128, 20)
    speeds = {}
    with tempfile.TemporaryDirectory() as folder:
        draw_shards(Path(folder), SIDE, images, shards=4 if place.small else 16)
        for workers in (1, 2) if place.small else (8, 16):
            stream = stream_batches(folder, batch, workers, draft=True)
            seconds = time_batches(stream, batches, warmup=2 if place.small else 2 * workers + 4)
            speeds[workers] = batch * batches / seconds
            notes.value(f"{workers} workers, images/s", speeds[workers])
        stream = stream_batches(folder, batch, workers, device=place.device)
        seconds = time_batches(stream, batches, warmup=2 if place.small else 2 * workers + 4)
        notes.value(f"decoded on the {place.device.type}, images/s", batch * batches / seconds)
    notes.value("cores", cores())
    peak = peak_flops(torch.cuda.get_device_name(), "bf16") if place.gpu else None
    if peak:
        needed = MFU * images_at(peak, configured("ViT-B-16", 256), "bf16", 1)(77)
        notes.value(f"ViT-B/16 at an MFU of {MFU:.0%} takes, images/s", needed)
        notes.claim(f"the faster one feeds ViT-B/16 at an MFU of {MFU:.0%}", max(speeds.values()) > needed)
    else:
        notes.skip("whether it feeds a GPU", "the peak of this device is not known")
        notes.claim("every setting gave its batches", min(speeds.values()) > 0)


def decoding(place: Place, notes: Notes) -> None:
    """`data.decode: device` beside a busy device: pixels like the workers', and the same ones every time."""
    from itertools import islice

    from pretrain.engine.randomness import make_deterministic
    from tools.bench.loader import draw_shards, open_stream

    images, batch, readings = (16, 4, 2) if place.small else (512, 64, 20)
    count, refused = images // batch, 0
    make_deterministic(fill=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            draw_shards(Path(folder), SIDE, images, shards=2)
            with open_stream(folder, batch, 2, draft=False) as stream:
                by_workers = [one.images for one in islice(stream, count)]
            busy, sums, away = Busy(place, by_workers[0]), [], 0.0
            for reading in range(readings):
                with open_stream(folder, batch, 2, draft=False, device=place.device) as stream:
                    for number in range(count):
                        pixels = stream.load(last=number + 1 == count).images
                        sums.append(busy.sums(pixels))
                        if reading == 0:
                            away += (pixels.cpu().float() - by_workers[number].float()).abs().mean().item() / count
                        del pixels  # its memory may be decoded into, once it is read
                    refused += stream.decoder.refused
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    first, *others = torch.stack(sums).reshape(readings, images)
    notes.value("levels of 255 from the workers' pixels, mean", away)
    notes.claim(f"the {place.device.type} decodes every JPEG", refused == 0 and stream.decoder.decoded == images)
    notes.claim(f"pixels decoded on the device are the workers' to {LEVELS} levels in the mean", away <= LEVELS)
    same = all(torch.equal(first, one) for one in others)
    notes.claim(f"{readings} readings beside the device's other work give the same pixels", same)


class Busy:
    """Work of some milliseconds on a GPU, and behind it sums of pixels that tell any change of them."""

    def __init__(self, place: Place, images: torch.Tensor):
        side = 64 if place.small else 4096
        self.work = torch.randn(side, side, device=place.device) / side**0.5
        self.weight = torch.randint(1, 1 << 20, images.shape[1:], device=place.device)

    def sums(self, pixels: torch.Tensor) -> torch.Tensor:
        """(b,) int64 of (b, 3, H, W) pixels, queued."""
        for _ in range(8):
            self.work = (self.work @ self.work).clamp(-1, 1)
        return (pixels.long() * self.weight).sum((1, 2, 3))
