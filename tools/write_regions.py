"""Write regions in SCAN's and VSRN's form: features of a timm backbone's map, or of the proposals of images.

    python -m tools.write_regions --data data/flickr8k --out data/flickr8k-regions --model resnet50 --grid 6
    python -m tools.write_regions --data data/scenes/entities --split test --proposals boxes.json --out data/boxes

Images with captions give OUT/NAME_ims.npy (images, grid x grid, width), NAME_caps.txt and NAME_ids.txt for each split,
with the places of the feature map, averaged to a grid, as regions. Images with phrases (Flickr30k Entities, Visual
Genome) give the features of proposals for `zeroshot.localisation --regions`: NAME_ims.npy (images, proposals, width),
NAME_boxes.npy and NAME_ids.txt; --model crops writes the 437 numbers of the synthetic scenes' regions instead.
A file is written beside its name and renamed; existing files are refused.
"""

import math
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from probemb import models
from probemb.cli.command import Parser, run_command
from probemb.cli.ranges import Count, Workers
from probemb.data.boxes import Box, PhraseDataset, Proposals, find_phrases, grid_proposals, read_proposals
from probemb.data.captions.dataset import CaptionDataset
from probemb.data.captions.find import PER_IMAGE, find_captions
from probemb.data.failures import BadSample
from probemb.data.image_loader import ImageBatches
from probemb.data.regions import RegionImages
from probemb.errors import UserError
from probemb.evaluation.localisation import crop
from probemb.files import replace_file, replace_text, writing
from probemb.machine import choose_device, loader_workers
from probemb.models.options import ModelOptions
from probemb.progress import progress
from tools.make_scenes.forms import FEATURES, SPLITS, region_features
from zeroshot.localisation import GridOptions

BOXES, IDS, CAPTIONS, REGIONS = "boxes.npy", "ids.txt", "caps.txt", "ims.npy"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.write_regions", description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="images with captions, or with phrases and boxes (docs/data.md)")
    parser.add_argument("--split", nargs="+", default=["train", "val", "test"], help="(default: train val test)")
    parser.add_argument("--images", help="the folder of the images, if it is not beside the data")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--model", default="resnet50", help="timm's name of a backbone; crops (default: resnet50)")
    parser.add_argument("--weights", default="timm", help="timm's default weights, another tag, or a file")
    parser.add_argument("--image-size", type=Count, default=224, help="pixels (default: 224)")
    parser.add_argument("--grid", type=Count, default=6, help="regions a side, 6 for 36 regions (default: 6)")
    parser.add_argument("--proposals", help="a JSON file with boxes of each image, or grid for sliding windows")
    parser.add_argument("--top", type=Count, help="so many of the file's proposals (default: all)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="(default: float16)")
    parser.add_argument("--batch-size", type=Count, default=64, help="images in a batch (default: 64)")
    parser.add_argument("--workers", type=Workers, help="processes that decode (default: as the machine allows)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    options = parser.parse_args(argv)
    if options.model == "crops" and options.proposals is None:
        raise UserError("--model crops is for proposals, and there are none.", "Name --proposals, or a timm backbone.")
    refuse_top(options)
    for split in options.split:
        for ending in (REGIONS, IDS, CAPTIONS if options.proposals is None else BOXES):
            if (file := file_of(options.out, split, ending)).exists():
                raise UserError(f"{file} exists.", "Remove it, or choose another --out.")
    (write_grids if options.proposals is None else write_proposals)(options)
    return 0


def refuse_top(options: Namespace) -> None:
    if options.top is not None and options.proposals in (None, "grid"):
        raise UserError("--top has no effect without a file of proposals.", "Leave it out.")


def file_of(out: Path, split: str, ending: str) -> Path:
    """OUT/NAME_ENDING. Raises UserError: the split's name cannot be part of a file's name."""
    name = SPLITS.get(split, split)
    if not (name.isascii() and name.isalnum()):
        raise UserError(f"The split '{split}' cannot be part of a file's name.", "Name train, val or test.")
    return out / f"{name}_{ending}"


def write_array(file: Path, shape: tuple[int, ...], dtype: str, blocks: Iterable[np.ndarray]) -> None:
    """Write blocks (B, *shape[1:]) one behind the other, so that memory holds one of them.

    Raises UserError: a number that the type cannot hold; the file cannot be written. There is no file then.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    free = shutil.disk_usage(next(p for p in file.absolute().parents if p.exists())).free
    if size > free:
        what = f"{file} takes {size / 1e9:.2f} GB, and the disk has {free / 1e9:.2f} GB left."
        raise UserError(what, "Make room, choose another --out, or write fewer regions with --grid.")

    def write(aside: Path) -> None:
        described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
        with open(aside, "wb") as opened:
            np.lib.format.write_array_header_1_0(opened, described)
            for block in blocks:
                with np.errstate(over="ignore"):
                    values = np.ascontiguousarray(block, dtype)
                if not np.isfinite(values).all():
                    remedy = "Write them with --dtype float32, or check the weights."
                    raise UserError(f"Features are not finite numbers in {dtype}.", remedy)
                opened.write(values.data)

    with writing(file):
        replace_file(file, write)
    print(f"wrote {file}: {' x '.join(f'{n:,}' for n in shape)}")


def write_lines(file: Path, lines: Iterable[object]) -> None:
    replace_text(file, "".join(f"{line}\n" for line in lines))


def refuse_unreadable(bad: Sequence[tuple[str, str]]) -> None:
    """Raise UserError: there is an image that cannot be read, which would move all rows behind it."""
    for name, why in bad:
        remedy = "Repair it, or remove it with its captions: every image needs its regions."
        raise UserError(f"The image {name} cannot be used: it {why}.", remedy)


# ----------------------------------------------------------------------------------------------------------- backbone


@dataclass(frozen=True)
class Backbone:
    """A frozen timm tower whose feature map has `side` x `side` places of `width` features; `transform` squeezes a PIL
    image to (3, H, W) uint8.
    """

    tower: torch.nn.Module
    transform: Callable[[Image.Image], Tensor]
    side: int
    width: int
    device: str

    @torch.inference_mode()
    def grid(self, pixels: Tensor, g: int) -> np.ndarray:
        """(B, 3, H, W) -> (B, g², width) float32, row by row; g of 1 is the average of the map."""
        map_BWss = feature_map(self.tower, pixels.to(self.device)).float()
        return F.adaptive_avg_pool2d(map_BWss, g).flatten(2).transpose(1, 2).cpu().numpy()


def feature_map(tower: torch.nn.Module, pixels: Tensor) -> Tensor:
    """(B, 3, H, W) -> (B, W, S, S), a trunk's tokens but for class tokens. Raises UserError: they are no square map."""
    tokens = tower.features(pixels)[0].tokens[:, tower.n_prefix :]
    side = math.isqrt(tokens.shape[1])
    if side * side != tokens.shape[1]:
        what = f"The backbone has {tokens.shape[1]} tokens, which are no square map of places."
        raise UserError(what, "Choose another one of timm, such as resnet50.")
    return tokens.transpose(1, 2).unflatten(2, (side, side))


def load_backbone(options: Namespace) -> Backbone:
    """The model that the options name. Raises UserError: no such model or weights, an image size that it does not take,
    or no square feature map.
    """
    from probemb.models.dual_encoder import channel_statistics  # models take seconds to import
    from probemb.models.towers.trunks import pretrained_trunk, timm_tower

    name, size, device = options.model, options.image_size, choose_device(options.device, "fp32").name
    trunk, wanted = pretrained_trunk({"timm_model_name": name}, options.weights)
    vision = {"tower": "timm", "timm_model_name": name, "image_size": size}
    head = ModelOptions(head="average", embed_dim=1, probabilistic=False)
    tower = timm_tower({"vision_cfg": vision}, "vision_cfg", head, 0, trunk).to(device).eval().requires_grad_(False)
    preprocess = {"size": size, "resize_mode": "squash", **wanted}
    tower.normalization = channel_statistics(preprocess)
    with torch.inference_mode():
        features = feature_map(tower, torch.zeros(1, 3, size, size, device=device))
    transform = models.create_transforms({"preprocess": preprocess}).evaluate
    return Backbone(tower, transform, features.shape[2], features.shape[1], device)


# -------------------------------------------------------------------------------------------------------------- grids


def write_grids(options: Namespace) -> None:
    """Regions of every split of images with captions."""
    splits = {split: find_captions(options.data, split, images=options.images) for split in options.split}
    if any(isinstance(data.images, RegionImages) for data in splits.values()):
        raise UserError(f"{options.data} has regions already.", "Name images with captions.")
    backbone, g = load_backbone(options), options.grid
    if g > (side := backbone.side):
        what = f"--grid {g} asks for {g} x {g} regions, and the feature map of images of {options.image_size} pixels"
        larger = math.ceil(options.image_size * g / side)
        raise UserError(f"{what} has {side} x {side} places.", f"Set --grid {side}, or --image-size to {larger}.")
    for split, data in splits.items():
        workers = loader_workers(options.workers, len(data), backbone.device)
        batches = ImageBatches(data.images, backbone.transform, options.batch_size, workers, max_bad=1.0)
        shape = len(data), g**2, backbone.width
        write_array(file_of(options.out, split, REGIONS), shape, options.dtype, _grids(batches, backbone, g))
        write_lines(file_of(options.out, split, IDS), data.image_ids)
        write_captions(file_of(options.out, split, CAPTIONS), data)


def _grids(batches: ImageBatches, backbone: Backbone, g: int) -> Iterator[np.ndarray]:
    with progress("images", len(batches.images)) as advance:
        for pixels in batches:
            refuse_unreadable(batches.bad)
            yield backbone.grid(pixels, g)
            advance(len(pixels))
    refuse_unreadable(batches.bad)


def write_captions(file: Path, data: CaptionDataset) -> None:
    """Five lines an image, fewer captions filled with empty lines."""
    lines = []
    for captions in data.captions:
        five = [" ".join(caption.split()) for caption in captions[:PER_IMAGE]]
        lines += five + [""] * (PER_IMAGE - len(five))
    write_lines(file, lines)
    if dropped := sum(max(0, len(captions) - PER_IMAGE) for captions in data.captions):
        print(f"{dropped:,} captions beyond five an image were left out")


# ---------------------------------------------------------------------------------------------------------- proposals


def write_proposals(options: Namespace) -> None:
    """Features and boxes of the proposals of every split. An image with fewer than another has zeros behind them."""
    splits = {split: find_phrases(options.data, split, options.images) for split in options.split}
    boxes_of = {split: find_proposals(options, data).boxes for split, data in splits.items()}
    backbone = None if options.model == "crops" else load_backbone(options)
    for split, data in splits.items():
        boxes = boxes_of[split]
        shape = len(data), max(map(len, boxes)), backbone.width if backbone else FEATURES
        blocks = _proposals(data, boxes, shape[1:], backbone, options.batch_size)
        write_array(file_of(options.out, split, REGIONS), shape, options.dtype, blocks)
        placed = np.zeros((*shape[:2], 4), np.float32)
        for row, corners in zip(placed, boxes):
            row[: len(corners)] = corners
        write_array(file_of(options.out, split, BOXES), placed.shape, "float32", [placed])
        write_lines(file_of(options.out, split, IDS), data.image_ids)


def find_proposals(options: Namespace, data: PhraseDataset) -> Proposals:
    """Those of the file or the grid that --proposals names, the first --top of them."""
    if options.proposals == "grid":
        grid = GridOptions()
        return grid_proposals(data, grid.scales, grid.ratios, grid.step)
    return read_proposals(options.proposals, data, options.top)


def _proposals(
    data: PhraseDataset, boxes: list[list[Box]], shape: tuple[int, int], backbone: Backbone | None, batch: int
) -> Iterator[np.ndarray]:
    """(1, P, width) of each image, zeros behind its own proposals. Raises UserError: it cannot be read."""
    with progress("images", len(data)) as advance:
        for i, own in enumerate(boxes):
            row = np.zeros((1, *shape), np.float32)
            try:
                image = data.images.open(i)
                if image.size != tuple(data.sizes[i]):
                    sizes = f"is {image.size[0]} x {image.size[1]}, not {data.sizes[i][0]} x {data.sizes[i][1]}"
                    raise BadSample(sizes)
            except BadSample as error:
                refuse_unreadable([(data.image_ids[i], str(error))])
            if backbone is None:
                row[0, : len(own)] = region_features(image, own)
            else:
                for first in range(0, len(own), batch):
                    crops = [backbone.transform(crop(image, box)) for box in own[first : first + batch]]
                    row[0, first : first + len(crops)] = backbone.grid(torch.stack(crops), 1)[:, 0]
            yield row
            advance(1)


if __name__ == "__main__":
    run_command(main)
