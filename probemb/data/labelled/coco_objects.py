"""Objects in images, from COCO's annotations: the labels for plausible matches (PMRP)."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from probemb.data.captions.dataset import read_text
from probemb.errors import UserError


def read_objects(file: str | Path, image_ids: Sequence[int | str]) -> Tensor:
    """Multi-hot object categories of each image, (N, L) uint8; all zero for an image without annotations.

    Args:
        file: instances_val2014.json, or another JSON with "categories" and "annotations" of that form.
        image_ids: COCO's id of each image.

    Raises UserError: the file is missing, too large or malformed; none of the images occurs in it.
    """
    path = Path(file)
    remedy = "Give COCO's instances_val2014.json, from annotations_trainval2014.zip."
    try:
        content = json.loads(read_text(path).decode("utf-8-sig"))
        categories = {int(category["id"]): place for place, category in enumerate(content["categories"])}
        pairs = {(int(one["image_id"]), categories[int(one["category_id"])]) for one in content["annotations"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(f"{path} holds no object annotations in COCO's form.", remedy) from error
    rows = {name: row for row, name in enumerate(image_ids)}
    labels = torch.zeros(len(image_ids), len(categories), dtype=torch.uint8)
    found = [(rows[image], place) for image, place in pairs if image in rows]
    if not found:
        raise UserError(f"None of the {len(image_ids):,} images is annotated in {path}.", remedy)
    row, place = torch.tensor(found).T
    labels[row, place] = 1
    return labels
