"""Phrase localisation: find the region that a phrase refers to among the proposals of its image.

    python -m zeroshot.localisation --model runs/x --data data/flickr30k_entities --proposals edge_boxes.json --top 200
    python -m zeroshot.localisation --model runs/x --data data/visual_genome --sample 1000
    python -m zeroshot.localisation --model runs/scenes --data data/scenes/entities               # synthetic data
    python -m zeroshot.localisation --model runs/scan --data data/flickr30k_entities --regions boxes/test_ims.npy

Every proposal is cropped and embedded, or for a model that reads regions its features are taken from a file. Recall is
for an IoU of at least 0.5. Source: jWAE §5.2, Table 7.
"""

from dataclasses import dataclass, field
from typing import Literal

from jsonargparse.typing import PositiveFloat

from probemb.cli.command import run_command
from probemb.cli.ranges import Count, Share
from zeroshot.command import EvaluationConfig, evaluation


@dataclass(frozen=True)
class GridOptions:
    """Sliding windows that are the proposals where no file has any.

    Args:
        scales: of the windows: the square root of their area over that of the image.
        ratios: width over height, of an image taken for square.
        step: between neighbouring windows, as a share of their side.
    """

    scales: tuple[Share, ...] = (0.25, 0.35, 0.5, 0.7, 1.0)
    ratios: tuple[PositiveFloat, ...] = (0.5, 1.0, 2.0)
    step: Share = 0.5


@dataclass(frozen=True)
class LocalisationConfig(EvaluationConfig):
    """`python -m zeroshot.localisation`.

    Args:
        data: Flickr30k Entities (a folder with Annotations and Sentences) or Visual Genome (region_descriptions.json).
        images: folder of the images; by default searched beside the data.
        split: train, val or test; auto: test where the data has several splits, else all of it; --no-split: all of it.
        sample: so many of the images, chosen by their names; by default all.
        proposals: a JSON file, {image id: [[left, top, right, bottom], ...]}, best ones first; by default a grid.
        regions: for models that read regions: NAME_ims.npy with the proposals' features, with NAME_boxes.npy and
            NAME_ids.txt beside it (`tools.write_regions --proposals`).
        top: so many of the file's proposals for each image; by default all.
        grid: sliding windows, used without a file.
        several: correct for a phrase with several boxes: merged (the smallest box around them) or any (each).
        rankings: csd, mean, ..., separated by commas; by default the one of the training, and the means alone.
    """

    images: str | None = None
    split: str | None = "auto"
    sample: Count | None = None
    proposals: str | None = None
    regions: str | None = None
    top: Count | None = None
    grid: GridOptions = field(default_factory=GridOptions)
    several: Literal["merged", "any"] = "merged"
    rankings: str | None = None
    batch_size: Count = 128


main = evaluation("localisation", LocalisationConfig, __doc__)

if __name__ == "__main__":
    run_command(main)
