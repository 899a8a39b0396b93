"""Options of `zeroshot.composed`; without heavy imports, for --help."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jsonargparse.typing import ClosedUnitInterval

from probemb.cli.ranges import Count, Folder, Seed, Workers

GENERATOR = "probemb composed"  # marks this command's files, so that it replaces no others


@dataclass(frozen=True)
class ComposedConfig:
    """`python -m zeroshot.composed`.

    Args:
        model: a run folder, a model folder, a .safetensors file, or a published hub name; with a composer.
        data: shards with categories (make_scenes --compositions), COCO's instances_*.json or a folder with it, or
            Fashion200k.
        split: train, val or test.
        images: folder, zip or tar of the images; by default searched beside the data.
        lists: folder of MPC's published lists; by default as in the model's training, or else beside the data.
        sizes: one of COCO's JSON files with the sizes of the original images, for shards whose boxes are theirs.
        k: parts of a query, separated by commas, such as 2,3,4; by default as many as in the model's training.
        setup: seen (the combinations of the training, and pairs beside them) or unseen (the training had 100 pairs, the
            test has others); auto: as in the model's training.
        seed: of drawn splits, combinations and queries; by default as in the model's training.
        queries: of each set, at most ten for a combination; published queries are all asked.
        rankings: cosine (of the means), density (expected log-density under the composition), separated by commas.
        out: folder for results.json and report.html; by default composed/ in the run folder.
        batch_size: images in a batch.
        text_batch_size: texts in a batch.
        workers: processes that decode images; by default as the machine allows.
        device: auto, cpu, cuda, cuda:1.
        precision: auto, fp32, bf16, fp16.
        max_bad: largest share of images that may be unreadable.
    """

    COMMON: ClassVar = (
        *("model", "data", "split", "images", "lists", "k", "setup", "queries", "rankings", "out"),
        *("batch_size", "workers", "device", "precision"),
    )

    model: str = ""
    data: str = ""
    split: str = "test"
    images: str | None = None
    lists: str | None = None
    sizes: str | None = None
    k: str | None = None
    setup: Literal["auto", "seen", "unseen"] = "auto"
    seed: Seed | None = None
    queries: Count = 10_000
    rankings: str = "cosine"
    out: Folder | None = None
    batch_size: Count = 128
    text_batch_size: Count = 256
    workers: Workers | None = None
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    max_bad: ClosedUnitInterval = 0.05
