"""Options of the commands that embed crops of images, or queries of them; without heavy imports, for --help."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jsonargparse.typing import ClosedUnitInterval, PositiveFloat

from probemb.cli.ranges import Count, Folder, Resize, Seed, Share, Workers

# Marks in each command's files, so that it replaces no others.
LOCALISATION_GENERATOR = "probemb localisation"
UNION_GENERATOR = "probemb union"
COMPOSED_GENERATOR = "probemb composed"


@dataclass(frozen=True)
class CropConfig:
    """Options that all of them take.

    Args:
        model: a run folder, a model folder, a .safetensors file, or a published hub name.
        data: what the command reads.
        images: folder of the images; by default searched beside the data.
        out: folder for results.json and report.html; by default a folder of the command's name in the run folder.
        resize: backend for resizing: pil, as open_clip and CLIP_benchmark, or tensor (torch: faster, and within a
            rounding of PIL's pixels).
        batch_size: images or crops in a batch.
        text_batch_size: texts in a batch.
        workers: processes that decode images; by default as the machine allows.
        device: auto, cpu, cuda, cuda:1.
        precision: auto, fp32, bf16, fp16.
        max_bad: largest share of images that may be unreadable.
    """

    SHARED: ClassVar = ("model", "data", "images", "out", "batch_size", "workers", "device", "precision")

    model: str = ""
    data: str = ""
    images: str | None = None
    out: Folder | None = None
    resize: Resize = "pil"
    batch_size: Count = 128
    text_batch_size: Count = 256
    workers: Workers | None = None
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    max_bad: ClosedUnitInterval = 0.05


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
class LocalisationConfig(CropConfig):
    """`python -m zeroshot.localisation`.

    Args:
        data: Flickr30k Entities (a folder with Annotations and Sentences) or Visual Genome (region_descriptions.json).
        split: train, val or test; auto: test where the data has several splits, else all of it; --no-split: all of it.
        sample: so many of the images, chosen by their names; by default all.
        proposals: a JSON file, {image id: [[left, top, right, bottom], ...]}, best ones first; by default a grid.
        regions: for models that read regions: NAME_ims.npy with the proposals' features, with NAME_boxes.npy and
            NAME_ids.txt beside it (`tools.write_regions --proposals`).
        top: so many of the file's proposals for each image; by default all.
        grid: sliding windows, used without a file.
        several: what is right for a phrase with several boxes: merged (the smallest box around them) or any (each).
        rankings: csd, mean, wasserstein2, match-probability, attention, ..., separated by commas; by default the one
            that the model was trained for, and the means alone.
        samples: samples of each item for match-probability.
    """

    COMMON: ClassVar = (
        *CropConfig.SHARED,
        *("split", "sample", "proposals", "regions", "top", "grid", "several", "rankings"),
    )

    data: str = ""
    split: str | None = "auto"
    sample: Count | None = None
    proposals: str | None = None
    regions: str | None = None
    top: Count | None = None
    grid: GridOptions = field(default_factory=GridOptions)
    several: Literal["merged", "any"] = "merged"
    rankings: str | None = None
    samples: Count = 8


@dataclass(frozen=True)
class UnionConfig(CropConfig):
    """`python -m zeroshot.union`.

    Args:
        data: Visual Genome (a folder with region_descriptions.json), or the synthetic world's visual_genome.
        sample: so many of the images, chosen by their ids; --no-sample: all.
        areas: largest area of crops A and B, as shares of the image; a figure has all of them.
        rankings: csd, mean, wasserstein2, match-probability, kl, min-kl, ..., separated by commas; by default the one
            that the model was trained for, and the means alone.
        samples: samples of each item for match-probability.
    """

    COMMON: ClassVar = (*CropConfig.SHARED, "sample", "areas", "rankings")

    data: str = ""
    sample: Count | None = 2000
    areas: tuple[Share, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    rankings: str | None = None
    samples: Count = 8


@dataclass(frozen=True)
class ComposedConfig(CropConfig):
    """`python -m zeroshot.composed`.

    Args:
        data: shards with categories (make_scenes --compositions), COCO's instances_*.json or a folder with it, or
            Fashion200k.
        split: train, val or test.
        lists: folder of MPC's published lists; by default as in the model's training, or else beside the data.
        sizes: one of COCO's JSON files with the sizes of the original images, for shards whose boxes are theirs.
        k: parts of a query, separated by commas, such as 2,3,4; by default as many as in the model's training.
        setup: seen (the combinations of the training, and pairs beside them) or unseen (the training had 100 pairs, the
            test has others); auto: as in the model's training.
        seed: of drawn splits, combinations and queries; by default as in the model's training.
        queries: of each set, at most ten for a combination; published queries are all asked.
        rankings: cosine (of the means), density (expected log-density under the composition), separated by commas; by
            default the cosine, and the density if the composer was trained for it.
    """

    COMMON: ClassVar = (*CropConfig.SHARED, "split", "lists", "k", "setup", "queries", "rankings")

    data: str = ""
    split: str = "test"
    lists: str | None = None
    sizes: str | None = None
    k: str | None = None
    setup: Literal["auto", "seen", "unseen"] = "auto"
    seed: Seed | None = None
    queries: Count = 10_000
    rankings: str | None = None
