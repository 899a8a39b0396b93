"""Write regions in SCAN's and VSRN's form: features of a timm backbone's map, or of the proposals of images.

    python -m tools.write_regions --data data/flickr8k --out data/flickr8k-regions --model resnet50 --grid 6
    python -m tools.write_regions --data data/scenes/entities --split test --proposals boxes.json --out data/boxes

Images with captions give OUT/NAME_ims.npy (images, grid x grid, width), NAME_caps.txt and NAME_ids.txt for each split,
with the places of the feature map, averaged to a grid, as regions. Images with phrases (Flickr30k Entities, Visual
Genome) give the features of proposals for `zeroshot.localisation --regions`: NAME_ims.npy (images, proposals, width),
NAME_boxes.npy and NAME_ids.txt; --model crops writes the 437 numbers of the synthetic scenes' regions instead.
Images are read in batches, and the array is written as they come. A file is written beside its name and renamed;
existing files are refused. The command cannot resume: an interrupted split is written again from its start.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from probemb.cli.command import Parser
from probemb.cli.ranges import Count, Workers
from probemb.errors import UserError

PROG = "python -m tools.write_regions"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.proposals is not None:
        from tools.write_regions.proposals import write_proposals

        return write_proposals(options)
    return write_grids(options)


def parse(argv: Sequence[str] | None) -> Namespace:
    """The options, checked as far as that needs nothing loaded."""
    parser = Parser(prog=PROG, description=__doc__.splitlines()[0])
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
    if options.top is not None and options.proposals in (None, "grid"):
        raise UserError("--top has no effect without a file of proposals.", "Leave it out.")
    return options


def write_grids(options: Namespace) -> int:
    """Write every split's grid regions."""
    from probemb.cli.device import choose_device, loader_workers
    from probemb.cli.progress import progress
    from probemb.data.captions.find import find_captions
    from probemb.data.image_loader import ImageBatches
    from tools.write_regions import arrays
    from tools.write_regions.backbone import check_grid, load_backbone

    endings = (arrays.REGIONS, arrays.CAPTIONS, arrays.IDS)
    arrays.refuse_existing(arrays.file_of(options.out, split, end) for split in options.split for end in endings)
    found = {split: find_captions(options.data, split, images=options.images) for split in options.split}
    refuse_regions(options.data, found.values())
    device = choose_device(options.device, "fp32")
    backbone = load_backbone(options.model, options.weights, options.image_size, device.name)
    check_grid(backbone, options.grid, options.image_size)
    shape = options.grid**2, backbone.width
    arrays.refuse_full_disk(options.out, sum(map(len, found.values())), shape, options.dtype)
    for split, data in found.items():
        workers = loader_workers(options.workers, len(data), device.name)
        batches = ImageBatches(data.images, backbone.transform, options.batch_size, workers, max_bad=1.0)
        file = arrays.file_of(options.out, split, arrays.REGIONS)
        with progress(split, len(data)) as advance:
            rows = arrays.write_array(file, shape, options.dtype, _regions(batches, backbone, options.grid, advance))
        arrays.write_ids(options.out, split, [str(one) for one in data.image_ids])
        dropped = arrays.write_captions(options.out, split, data)
        more = f", {dropped:,} captions beyond five an image left out" if dropped else ""
        print(f"wrote {file}: {rows:,} x {shape[0]} x {shape[1]}{more}")
    return 0


def refuse_regions(data: str, found) -> None:
    """Raise UserError: the data has regions already, or images without captions' files."""
    from probemb.data.regions import RegionImages

    if any(isinstance(one.images, RegionImages) for one in found):
        raise UserError(f"{data} has regions already.", "Name images with captions.")


def _regions(batches, backbone, grid: int, advance):
    """Blocks of regions. Raises UserError: an image that cannot be read, which would move all rows behind it."""
    for pixels in batches:
        yield backbone.grid(pixels.to(next(backbone.tower.parameters()).device), grid).cpu().numpy()
        advance(len(pixels))
        refuse_unreadable(batches.bad)
    refuse_unreadable(batches.bad)


def refuse_unreadable(bad: Sequence[tuple[str, str]]) -> None:
    """Raise UserError: there is an image that cannot be read."""
    if bad:
        name, why = bad[0]
        raise UserError(
            f"The image {name} cannot be used: it {why}.",
            "Repair it, or remove it with its captions: every image needs its regions.",
        )
