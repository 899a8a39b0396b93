"""Cache of frozen towers' features, so that heads and other towers train without them.

FOLDER/KEY.npy has a row of float16 per image, NaN for an unreadable one, or per distinct text, and ends with its
CRC-32. KEY is a digest of the trunk's weights, its preprocessing, the resize backend, and the images or texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from probemb import distributed
from probemb.data.captions.find import CaptionDataset
from probemb.data.failures import BadSample
from probemb.data.image_loader import ImageBatches, Images, image_digest
from probemb.errors import UserError
from probemb.files import replace_file
from probemb.models import DualEncoder, create_transforms
from probemb.models.encoder import Encoder, FeatureLayout
from probemb.progress import progress

Batches = Iterable[tuple[Sequence[int], Tensor]]  # numbers of rows, and their inputs


@dataclass(kw_only=True)
class CachedImages(Images):
    """Images whose features stand in for their pixels: `open` gives a row, (width,) float16."""

    rows: np.ndarray

    def open(self, index: int) -> Tensor:
        """The features of one image. Raises BadSample."""
        row = torch.from_numpy(np.array(self.rows[index]))
        if row.isnan().any():
            raise BadSample("could not be read when its features were computed")
        return row


class CachedTexts(dict):
    """Takes the place of a tokenizer: B texts -> their features, (B, width) float16. Of each text its row's number."""

    rows: np.ndarray

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return torch.from_numpy(np.array(self.rows[[self[text] for text in texts]]))


def unchanged(row: Tensor) -> Tensor:
    """The transform of cached images."""
    return row


def cache_features(
    networks: Sequence[DualEncoder], dataset: CaptionDataset, folder: str | Path, resize: str = "pil", device="cpu",
    batch_size: int = 64, workers: int = 0, failure_share: float = 0.05,
) -> CaptionDataset:  # fmt: skip
    """The same images and captions with features instead of pixels; collective. Raises UserError: as `_rows`, too many
    unreadable images.
    """
    tower, images = networks[0].image_tower, dataset.images
    if not hasattr(tower, "image_size"):
        raise UserError(
            "The image tower reads precomputed regions, which need no cache.", "Leave data.cache_features out."
        )
    height, width = tower.image_size
    sample = torch.linspace(-1, 1, 6 * height * width).view(2, 3, height, width)

    def batches() -> Iterator[tuple[Sequence[int], Tensor]]:
        transform, done = create_transforms(networks[0], resize=resize).evaluate, 0
        read = ImageBatches(images, transform, batch_size, workers, failure_share, "data.failure_share")
        for pixels in read:
            yield read.kept[done:], pixels
            done = len(read.kept)

    config = networks[0].config
    about = config["architecture"]["vision_cfg"], config["preprocess"], images.source, images.exif, resize
    named = [f"|{place.name}|{image_digest(place)}" for place in images.places]
    rows = _rows([network.image_tower for network in networks], sample, about, named, batches(), folder, device)
    return replace(dataset, located=CachedImages(places=images.places, source=images.source, bad=images.bad, rows=rows))


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
    digest = hashlib.sha256(json.dumps([about, layout], sort_keys=True, default=str).encode())
    for name, tensor in sorted(tower.state_dict().items()):
        if tower.place(name).part == "trunk":
            digest.update(f"|{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
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
