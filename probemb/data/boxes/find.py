"""Finds phrases with boxes by the content of a folder.

find_phrases("data/flickr30k_entities", split="test")     Annotations and Sentences of Flickr30k Entities
find_phrases("data/visual_genome", sample=2000)           region_descriptions.json of Visual Genome
"""

from __future__ import annotations

from pathlib import Path

from probemb.data.boxes.entities import find_entities, read_entities
from probemb.data.boxes.phrases import PhraseDataset
from probemb.data.boxes.visual_genome import REGIONS, find_regions, read_visual_genome
from probemb.data.captions.dataset import AUTO
from probemb.errors import UserError


def find_phrases(
    data: str | Path, split: str | None = None, images: str | Path | None = None, sample: int | None = None
) -> PhraseDataset:
    """List images and phrases without decoding any image.

    Args:
        split: "train", "val", "test" of Flickr30k Entities; None: all images; "auto": "test" of data with several
            splits. Visual Genome has none.
        images: folder of the images; by default searched beside the annotations.
        sample: so many of the images, chosen by their names alone; None: all.

    Raises UserError: nothing of the kind is there; malformed data; missing images; names that lead out of the folder.
    """
    path = Path(data)
    if not str(data).strip() or "\0" in str(data) or not path.exists():
        raise UserError(f"The data path {str(data)!r} does not exist.", "Check the spelling.")
    if images is not None and not Path(images).is_dir():
        raise UserError(f"The image folder {images} does not exist.", "Name the folder that holds the images.")
    folder = None if images is None else Path(images)
    entities, regions = find_entities(path), find_regions(path)
    if entities is not None and regions is not None:
        raise UserError(
            f"{path} holds Flickr30k Entities and Visual Genome.", f"Name {entities} or {regions.parent} itself."
        )
    if entities is not None:
        return read_entities(entities, split, folder, sample)
    if regions is None:
        raise UserError(
            f"{path} holds no phrases with boxes: neither Annotations and Sentences, nor {REGIONS}.",
            "Name the folder of Flickr30k Entities or Visual Genome, or make the synthetic data with "
            "`python -m tools.make_scenes data/scenes --boxes`.",
        )
    if split not in (None, AUTO):
        raise UserError(f"{regions} has no splits.", "Leave the split out; --sample takes some of the images.")
    return read_visual_genome(regions, folder, sample)
