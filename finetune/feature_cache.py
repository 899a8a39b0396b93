"""Cache of a frozen image tower's features, so that heads and text towers train without it.

    FOLDER/KEY/features.f16   (N, width) float16, memory-mapped, one row per image
    FOLDER/KEY/about.json     {"count", "width", "failures": {index: reason}}, written last

KEY is a digest of the trunk's weights, its preprocessing, who resizes, and the images. The row of an unreadable image
stays zero; reading it raises BadSample.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch

from probemb import distributed
from probemb.cli.progress import progress
from probemb.data.boxes.geometry import Box
from probemb.data.captions.find import CaptionDataset
from probemb.data.compositions import Compositions, Crop, CroppedImages
from probemb.data.failures import BadSample
from probemb.data.image_loader import ImageBatches, Images, image_digest
from probemb.errors import UserError
from probemb.files import flush, replace_text
from probemb.models import DualEncoder, create_transforms
from probemb.models.features import FeatureLayout

FEATURES, ABOUT = "features.f16", "about.json"


@dataclass(kw_only=True)
class CachedImages(Images):
    """Images whose features stand in for their pixels: `open` gives a row, (width,) float16."""

    rows: np.memmap
    failures: dict[int, str] = field(default_factory=dict)
    crops: dict[Crop, int] = field(default_factory=dict)  # rows behind those of the whole images

    def open(self, index: int) -> torch.Tensor:
        """The features of one image. Raises BadSample."""
        if index in self.failures:
            raise BadSample(self.failures[index])
        return torch.from_numpy(np.array(self.rows[index]))

    def part(self, index: int, box: Box | None) -> torch.Tensor:
        """The features of a part of an image, or of all of it. Raises BadSample."""
        return self.open(index if box is None else self.crops[Crop(index, box)])


def unchanged(row: torch.Tensor) -> torch.Tensor:
    """The transform of cached images."""
    return row


def cache_features(
    networks: Sequence[DualEncoder],
    dataset: CaptionDataset | Compositions,
    folder: str | Path,
    resize: str = "pil",
    *,
    device: torch.device | str = "cpu",
    batch_size: int = 64,
    workers: int = 0,
    failure_share: float = 0.05,
) -> CaptionDataset | Compositions:
    """The same images, with their captions or concepts, with features instead of pixels; collective.

    The first process computes missing features, with progress, while the others wait. `networks` have equal, frozen
    image trunks, and their image towers read features from now on. Of `Compositions`, what image queries are cut from
    has features of its own.

    Raises UserError, on all processes: the uncertainty branch has its own blocks, too many unreadable images, a folder
    that cannot be written, features beyond float16, networks with different trunks.
    """
    tower = networks[0].image_tower.to(device)
    if not hasattr(tower, "image_size"):
        raise UserError(
            "The image tower reads precomputed regions, which need no cache.", "Leave data.cache_features out."
        )
    height, width = tower.image_size
    for network in networks:
        network.image_tower.feature_layout = None
    crops = {crop: None for of_concept in getattr(dataset, "crops", ()) for crop in of_concept if crop.box is not None}
    crops = {crop: len(dataset) + row for row, crop in enumerate(crops)}
    images = dataset.images
    if crops:
        images = CroppedImages.of(images, [*(Crop(index, None) for index in range(len(dataset))), *crops])
    layout = tower.layout(torch.linspace(-1, 1, 6 * height * width, device=device).view(2, 3, height, width))
    key, *others = (cache_key(network, layout, dataset.images, resize, crops) for network in networks)
    if any(other != key for other in others):
        raise UserError(
            "The method's networks have different image towers, so their features cannot be shared.",
            "Start them from pretrained weights (model.pretrained), or leave data.cache_features out.",
        )
    place = Path(folder) / key

    def compute() -> None:
        transform = create_transforms(networks[0], resize=resize).evaluate
        batches = ImageBatches(images, transform, batch_size, workers, failure_share, "data.failure_share")
        if not (place / ABOUT).is_file():
            _compute(tower, layout, batches, place, device)

    gigabytes = len(images) * layout.width * 2 / 1e9
    remedy = f"The features take {gigabytes:.2f} GB: make room, or name another folder with data.cache_features."
    distributed.on_main(compute, place, remedy)
    for network in networks:
        network.image_tower.feature_layout = layout
    about = json.loads((place / ABOUT).read_text(encoding="utf-8"))
    cached = CachedImages(
        places=dataset.images.places,
        source=dataset.images.source,
        bad=dataset.images.bad,
        rows=np.memmap(place / FEATURES, np.float16, "r", shape=(len(images), layout.width)),
        failures={int(index): reason for index, reason in about["failures"].items()},
        crops=crops,
    )
    return replace(dataset, **{"images" if isinstance(dataset, Compositions) else "located": cached})


def cache_key(
    model: DualEncoder, layout: FeatureLayout, images: Images, resize: str, crops: Iterable[Crop] = ()
) -> str:
    """A digest of everything that the features depend on."""
    digest = hashlib.sha256()
    config = model.config
    about = [config["architecture"], config["preprocess"], layout.parts, images.source, images.exif, resize]
    digest.update(json.dumps(about, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.image_tower.state_dict().items()):
        if model.image_tower.place(name).part == "trunk":
            digest.update(f"|{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    for place in images.places:
        digest.update(f"|{place.name}|{image_digest(place)}".encode("utf-8", "surrogateescape"))
    for image, box in crops:
        digest.update(f"|{image}|{box}".encode())
    return digest.hexdigest()[:32]


@torch.no_grad()
def _compute(tower, layout: FeatureLayout, batches: ImageBatches, place: Path, device) -> None:
    place.mkdir(parents=True, exist_ok=True)
    n = len(batches.images)
    aside = place / f"{FEATURES}.{uuid4().hex}.part"  # another run may be computing the same features
    rows = np.memmap(aside, np.float16, "w+", shape=(n, layout.width))
    training, done = tower.training, 0
    tower.eval()
    try:
        with progress("features", n) as advance:
            for pixels in batches:
                packed = layout.pack(*tower.features(pixels.to(device))).half().cpu()
                if not packed.isfinite().all():
                    raise UserError(
                        "Features of this image tower are larger than float16 can hold.",
                        "Leave data.cache_features out.",
                    )
                rows[batches.kept[done:]] = packed.numpy()
                done = len(batches.kept)
                advance(len(packed))
        rows.flush()
        del rows
        flush(aside)
        os.replace(aside, place / FEATURES)
    finally:
        aside.unlink(missing_ok=True)
        tower.train(training)
    reasons = dict(batches.bad)
    failed = sorted(set(range(n)) - set(batches.kept))
    failures = {i: reasons.get(batches.images.places[i].name, "cannot be read") for i in failed}
    replace_text(place / ABOUT, json.dumps({"count": n, "width": layout.width, "failures": failures}) + "\n")
