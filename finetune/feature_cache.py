"""Cache of frozen towers' features, so that heads and other towers train without them.

FOLDER/KEY.npy has a row of float16 per image and part of one, NaN for an unreadable one, or per distinct text, and ends
with its CRC-32. KEY is a digest of the trunk's weights, its preprocessing, the resize backend, and the images or texts.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from probemb import distributed
from probemb.data.compositions.dataset import Crop, crop_images
from probemb.data.failures import BadSample
from probemb.data.image_loader import ImageBatches, Images, image_digest
from probemb.errors import UserError
from probemb.files import replace_file
from probemb.models import DualEncoder, create_transforms
from probemb.models.encoder import Encoder, FeatureLayout
from probemb.models.weights import tensors_sha256
from probemb.progress import progress

Batches = Iterable[tuple[Sequence[int], Tensor]]  # numbers of rows, and their inputs


@dataclass(kw_only=True)
class CachedImages(Images):
    """Images whose features stand in for their pixels: rows of (width,) float16, of the images and then of `crops`."""

    rows: np.ndarray
    crops: dict[Crop, int]  # and their rows

    def open(self, index: int) -> Tensor:
        return self.part(index, None)

    def part(self, index: int, box) -> Tensor:
        """The features of an image, or of a crop of it. Raises BadSample."""
        row = torch.from_numpy(np.array(self.rows[index if box is None else self.crops[Crop(index, box)]]))
        if row.isnan().any():
            raise BadSample("could not be read when its features were computed")
        return row


class CachedTexts(dict):
    """Takes the place of a tokenizer: B texts -> their features, (B, width) float16. Of each text its row's number."""

    rows: np.ndarray

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return torch.from_numpy(np.array(self.rows[[self[text] for text in texts]]))


def cache_features(
    networks: Sequence[DualEncoder], images: Images, folder: str | Path, resize: str = "pil", device="cpu",
    batch_size: int = 64, workers: int = 0, failure_share: float = 0.05, crops: Sequence[Crop] = (),
) -> CachedImages:  # fmt: skip
    """The same images, and crops of them, with features instead of pixels; collective. Raises UserError: as `_rows`,
    too many unreadable images.
    """
    tower = networks[0].image_tower
    if not hasattr(tower, "image_size"):
        raise UserError(
            "The image tower reads precomputed regions, which need no cache.", "Leave data.cache_features out."
        )
    height, width = tower.image_size
    sample = torch.linspace(-1, 1, 6 * height * width).view(2, 3, height, width)

    def batches() -> Iterator[tuple[Sequence[int], Tensor]]:
        transform = create_transforms(networks[0], resize=resize).evaluate
        for first, some in ((0, images), (len(images), cropped)):
            read, done = ImageBatches(some, transform, batch_size, workers, failure_share, "data.failure_share"), 0
            for pixels in read:
                yield [first + row for row in read.kept[done:]], pixels
                done = len(read.kept)

    config, cropped = networks[0].config, crop_images(images, crops)
    about = config["architecture"]["vision_cfg"], config["preprocess"], images.source, images.exif, resize
    named = [f"|{place.name}|{image_digest(place)}" for place in images.places] + [str(tuple(crop)) for crop in crops]
    rows = _rows([network.image_tower for network in networks], sample, about, named, batches(), folder, device)
    of_crop = {crop: row for row, crop in enumerate(crops, len(images))}
    return CachedImages(places=images.places, source=images.source, bad=images.bad, rows=rows, crops=of_crop)


def cache_texts(
    networks: Sequence[DualEncoder], texts: Iterable[str], tokenizer, folder: str | Path, device="cpu",
    batch_size: int = 64,
) -> CachedTexts:  # fmt: skip
    """Features of texts; collective. Raises UserError: as `_rows`."""
    networks[0].text_tower.feature_layout = None  # else `cut_padding` takes the tokens for features
    cached = CachedTexts((text, row) for row, text in enumerate(dict.fromkeys(texts)))
    tokens = networks[0].cut_padding(tokenizer(list(cached)))
    order = (tokens != 0).sum(1).argsort(stable=True).split(batch_size)
    batches = ((part.tolist(), networks[0].cut_padding(tokens[part])) for part in order)
    towers, about = [network.text_tower for network in networks], networks[0].config["architecture"]["text_cfg"]
    cached.rows = _rows(towers, tokens[:2], about, list(map(str, tokens.tolist())), batches, folder, device)
    return cached


def _rows(
    towers: Sequence[Encoder], sample: Tensor, about, named: Sequence[str], batches: Batches, folder: str | Path, device
) -> np.ndarray:  # fmt: skip
    """Features of `named` inputs, which the first process computes, if they are not kept, while the others wait.

    `towers` have equal, frozen trunks, and read features from now on. Raises UserError, on all processes: more than
    their heads trains, a folder that cannot be written, towers with different trunks.
    """
    for tower in towers:
        tower.to(device).feature_layout = None
    layout = towers[0].layout(sample.to(device))
    key, *others = (cache_key(tower, layout, about, named) for tower in towers)
    if any(other != key for other in others):
        raise UserError(
            "The method's networks have different image or text towers, so their features cannot be shared.",
            "Start them from pretrained weights (model.pretrained), or leave data.cache_features out.",
        )
    place = Path(folder) / f"{key}.npy"

    def compute() -> None:
        kept = np.memmap(place, np.uint8, "r") if place.is_file() and place.stat().st_size else b""
        if crc32(kept[:-4]).to_bytes(4) != bytes(kept[-4:]):  # missing or damaged
            replace_file(place, partial(_write, towers[0], layout, len(named), batches, device))

    gigabytes = len(named) * sum(layout.sizes) * 2 / 1e9
    remedy = f"The features take {gigabytes:.2f} GB: make room, or name another folder with data.cache_features."
    distributed.on_main(compute, place, remedy)
    for tower in towers:
        tower.feature_layout = layout
    return np.load(place, mmap_mode="r")


def cache_key(tower: Encoder, layout: FeatureLayout, about, named: Iterable[str]) -> str:
    """A digest of everything that the features depend on."""
    trunk = {name: tensor for name, tensor in tower.state_dict().items() if tower.place(name).part == "trunk"}
    digest = hashlib.sha256(tensors_sha256(trunk, json.dumps([about, layout], sort_keys=True, default=str)).encode())
    for name in named:
        digest.update(f"|{name}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


@torch.no_grad()
def _write(tower: Encoder, layout: FeatureLayout, n: int, batches: Batches, device, file: Path) -> None:
    rows, training = np.lib.format.open_memmap(file, "w+", np.float16, (n, sum(layout.sizes))), tower.training
    rows[:] = np.nan
    tower.eval()
    with progress("features", n) as advance:
        for numbers, inputs in batches:
            rows[numbers] = layout.pack(*tower.features(inputs.to(device))).half().cpu().numpy()
            advance(len(numbers))
    rows.flush()
    with file.open("ab") as end:
        end.write(crc32(np.memmap(file, np.uint8, "r")).to_bytes(4))
    tower.train(training)
