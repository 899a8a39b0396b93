"""Images with phrases and the boxes that these mean: Flickr30k Entities and Visual Genome."""

from __future__ import annotations

from pathlib import Path

from probemb.data.boxes.entities import FOLDERS, read_entities
from probemb.data.boxes.geometry import grid_windows as grid_windows
from probemb.data.boxes.geometry import iou as iou
from probemb.data.boxes.phrases import Phrase as Phrase
from probemb.data.boxes.phrases import PhraseDataset
from probemb.data.boxes.visual_genome import REGIONS, read_visual_genome
from probemb.data.boxes.visual_genome import crop_triplets as crop_triplets
from probemb.data.reading import listed
from probemb.errors import UserError

FORMATS = {FOLDERS: read_entities, (REGIONS,): read_visual_genome}  # what a folder holds -> its reader


def find_phrases(
    data: str | Path, split: str | None = None, images: str | Path | None = None, sample: int | None = None
) -> PhraseDataset:
    """List images and phrases without decoding any image.

    Args:
        data: a folder of one of FORMATS, or a folder around one; or the file of Visual Genome.
        split: "train", "val", "test" of Flickr30k Entities; None: all images; "auto": "test" of data with several
            splits. Visual Genome has none.
        images: folder of the images; by default searched beside the annotations.
        sample: so many of the images, chosen by their names alone; None: all.

    Raises UserError: nothing of the kind is there; malformed data; missing images; names that lead out of the folder.
    """
    path = Path(data)
    folders = [path.parent] if path.name == REGIONS else [path, *sorted(path.glob("*/"))]
    found = {
        read: next((folder for folder in folders if all((folder / name).exists() for name in names)), None)
        for names, read in FORMATS.items()
    }
    if len(set(found.values()) - {None}) != 1:
        kinds = [listed(names) for names in FORMATS]
        raise UserError(
            f"{path} holds {'several kinds of' if any(found.values()) else 'no'} phrases with boxes.",
            f"Name one folder with {listed(kinds, 'or')}, or make the synthetic data with `python -m tools.make_scenes "
            "data/scenes --boxes`.",
        )
    read, folder = next((read, folder) for read, folder in found.items() if folder is not None)
    return read(folder, split, None if images is None else Path(images), sample)
