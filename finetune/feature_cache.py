"""Cache of a frozen image tower's features, so that heads and text towers train without it.

FOLDER/KEY.npy has a row of float16 per image, NaN for an unreadable one, and ends with its CRC-32. KEY is a digest of
the trunk's weights, its preprocessing, who resizes, and the images.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from probemb import distributed
from probemb.data.captions.find import CaptionDataset
from probemb.data.failures import BadSample
from probemb.data.image_loader import ImageBatches, Images, image_digest
from probemb.errors import UserError
from probemb.files import replace_file
from probemb.models import DualEncoder, create_transforms
from probemb.models.encoder import FeatureLayout
from probemb.progress import progress


@dataclass(kw_only=True)
class CachedImages(Images):
    """Images whose features stand in for their pixels: `open` gives a row, (width,) float16."""

    rows: np.ndarray

    def open(self, index: int) -> torch.Tensor:
        """The features of one image. Raises BadSample."""
        row = torch.from_numpy(np.array(self.rows[index]))
        if row.isnan().any():
            raise BadSample("could not be read when its features were computed")
        return row


def unchanged(row: torch.Tensor) -> torch.Tensor:
    """The transform of cached images."""
    return row


def cache_features(
    networks: Sequence[DualEncoder], dataset: CaptionDataset, folder: str | Path, resize: str = "pil", device="cpu",
    batch_size: int = 64, workers: int = 0, failure_share: float = 0.05,
) -> CaptionDataset:  # fmt: skip
    """The same images and captions with features instead of pixels; collective.

    The first process computes missing features while the others wait. `networks` have equal, frozen image trunks, and
    their image towers read features from now on. Raises UserError, on all processes: the uncertainty branch has its own
    blocks, too many unreadable images, a folder that cannot be written, networks with different trunks.
    """
    tower, images = networks[0].image_tower.to(device), dataset.images
    if not hasattr(tower, "image_size"):
        raise UserError(
            "The image tower reads precomputed regions, which need no cache.", "Leave data.cache_features out."
        )
    height, width = tower.image_size
    for network in networks:
        network.image_tower.feature_layout = None
    layout = tower.layout(torch.linspace(-1, 1, 6 * height * width, device=device).view(2, 3, height, width))
    key, *others = (cache_key(network, layout, images, resize) for network in networks)
    if any(other != key for other in others):
        raise UserError(
            "The method's networks have different image towers, so their features cannot be shared.",
            "Start them from pretrained weights (model.pretrained), or leave data.cache_features out.",
        )
    place = Path(folder) / f"{key}.npy"

    def compute() -> None:
        kept = np.memmap(place, np.uint8, "r") if place.is_file() and place.stat().st_size else b""
        if crc32(kept[:-4]).to_bytes(4) != bytes(kept[-4:]):  # missing or damaged
            transform = create_transforms(networks[0], resize=resize).evaluate
            batches = ImageBatches(images, transform, batch_size, workers, failure_share, "data.failure_share")
            replace_file(place, lambda file: _write(file, tower, layout, batches, device))

    gigabytes = len(images) * sum(layout.sizes) * 2 / 1e9
    remedy = f"The features take {gigabytes:.2f} GB: make room, or name another folder with data.cache_features."
    distributed.on_main(compute, place, remedy)
    for network in networks:
        network.image_tower.feature_layout = layout
    rows = np.load(place, mmap_mode="r")
    return replace(dataset, located=CachedImages(places=images.places, source=images.source, bad=images.bad, rows=rows))


def cache_key(model: DualEncoder, layout: FeatureLayout, images: Images, resize: str) -> str:
    """A digest of everything that the features depend on."""
    digest, config = hashlib.sha256(), model.config
    about = [config["architecture"], config["preprocess"], layout, images.source, images.exif, resize]
    digest.update(json.dumps(about, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.image_tower.state_dict().items()):
        if model.image_tower.place(name).part == "trunk":
            digest.update(f"|{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    for place in images.places:
        digest.update(f"|{place.name}|{image_digest(place)}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


@torch.no_grad()
def _write(file: Path, tower, layout: FeatureLayout, batches: ImageBatches, device) -> None:
    n, training, done = len(batches.images), tower.training, 0
    rows = np.lib.format.open_memmap(file, "w+", np.float16, (n, sum(layout.sizes)))
    rows[:] = np.nan
    tower.eval()
    with progress("features", n) as advance:
        for pixels in batches:
            packed = layout.pack(*tower.features(pixels.to(device))).half().cpu()
            rows[batches.kept[done:]] = packed.numpy()
            done = len(batches.kept)
            advance(len(packed))
    rows.flush()
    with file.open("ab") as end:
        end.write(crc32(np.memmap(file, np.uint8, "r")).to_bytes(4))
    tower.train(training)
