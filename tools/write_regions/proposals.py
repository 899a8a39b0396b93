"""Features of the proposals of images, for `zeroshot.localisation --regions`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator

import numpy as np

from probemb.cli.device import choose_device
from probemb.cli.progress import progress
from probemb.data.boxes import PhraseDataset, find_phrases
from probemb.data.boxes.geometry import Box
from probemb.data.boxes.proposals import Proposals, grid_proposals, read_proposals
from probemb.data.failures import BadSample
from probemb.evaluation.analyses.localisation import crop
from probemb.files import replace_file
from tools.write_regions import arrays
from tools.write_regions.command import refuse_unreadable
from zeroshot.crops import GridOptions


def write_proposals(options: Namespace) -> int:
    """Write features and boxes of the proposals of every split. An image with fewer than another has zeros behind."""
    endings = (arrays.REGIONS, arrays.BOXES, arrays.IDS)
    arrays.refuse_existing(arrays.file_of(options.out, split, end) for split in options.split for end in endings)
    found = {split: find_phrases(options.data, split, options.images) for split in options.split}
    of_split = {split: find_proposals(options, data) for split, data in found.items()}
    embed, width = _embedder(options)
    for split, data in found.items():
        boxes = of_split[split].boxes
        shape = max(map(len, boxes)), width
        arrays.refuse_full_disk(options.out, len(data), shape, options.dtype)
        file = arrays.file_of(options.out, split, arrays.REGIONS)
        with progress(split, len(data)) as advance:
            rows = arrays.write_array(file, shape, options.dtype, _rows(data, boxes, shape, embed, advance))
        placed = np.zeros((len(data), shape[0], 4), np.float32)
        for row, some in zip(placed, boxes):
            row[: len(some)] = some
        replace_file(arrays.file_of(options.out, split, arrays.BOXES), lambda aside, x=placed: _save(aside, x))
        arrays.write_ids(options.out, split, data.image_ids)
        print(f"wrote {file}: {rows:,} x {shape[0]} x {shape[1]}, and the boxes")
    return 0


def find_proposals(options: Namespace, data: PhraseDataset) -> Proposals:
    """Those of the file or the grid that --proposals names, the first --top of them."""
    if options.proposals == "grid":
        grid = GridOptions()
        return grid_proposals(data, grid.scales, grid.ratios, grid.step)
    return read_proposals(options.proposals, data, options.top)


def _embedder(options: Namespace) -> tuple[Callable[..., np.ndarray], int]:
    """(image, boxes) -> (P, width), and the width."""
    if options.model == "crops":
        from tools.scene_forms.regions import FEATURES, region_features

        return region_features, FEATURES
    import torch

    from tools.write_regions.backbone import load_backbone

    device = choose_device(options.device, "fp32").name
    backbone = load_backbone(options.model, options.weights, options.image_size, device)

    def embed(image, boxes: list[Box]) -> np.ndarray:
        crops = [backbone.transform(crop(image, box)) for box in boxes]
        parts = (torch.stack(crops[i : i + options.batch_size]) for i in range(0, len(crops), options.batch_size))
        return torch.cat([backbone.grid(part.to(device), 1)[:, 0].cpu() for part in parts]).numpy()

    return embed, backbone.width


def _rows(data: PhraseDataset, boxes, shape: tuple[int, int], embed, advance) -> Iterator[np.ndarray]:
    """(1, P, width) of each image, zeros behind its own proposals. Raises UserError: it cannot be read."""
    for i, some in enumerate(boxes):
        row = np.zeros((1, *shape), np.float32)
        try:
            image = data.images.open(i)
            if image.size != tuple(data.sizes[i]):
                raise BadSample(f"is {image.size[0]} x {image.size[1]}, not {data.sizes[i][0]} x {data.sizes[i][1]}")
        except BadSample as error:
            refuse_unreadable([(data.image_ids[i], str(error))])
        row[0, : len(some)] = embed(image, some)
        yield row
        advance(1)


def _save(file, array: np.ndarray) -> None:
    with open(file, "wb") as opened:
        np.save(opened, array)
