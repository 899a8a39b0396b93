"""Zero-shot classification with uncertainty-based prompt filtering.

    python -m zeroshot.imagenet --filter best-topk --model runs/x --data data/imagenet/val
    python -m zeroshot.imagenet --filter every --model runs/scenes --data data/scenes/classes     # synthetic data
    python -m zeroshot.imagenet --model runs/x --data imagenet=imagenet/val imagenet-r wds_cifar10  # one table

Every class gets 80 prompts; a filter chooses among them. Source: PCME++ §3.5, Table 5 and §C.6.
"""

from dataclasses import dataclass
from typing import ClassVar

from jsonargparse.typing import NonNegativeFloat, PositiveFloat

from probemb.cli.command import run_command
from probemb.cli.ranges import Count, Share
from zeroshot.command import EvaluationConfig, evaluation


@dataclass(frozen=True)
class ImagenetConfig(EvaluationConfig):
    """`python -m zeroshot.imagenet`.

    Args:
        data: labelled images, in a form of docs/data.md; several of them for one table: --data a b c, or NAME=PATH for
            a name of its own.
        out: folder for results.json and report.html; by default zeroshot/ in the run folder. With one of each data set.
        exif: apply EXIF orientation; open_clip does not.
        filter: {zeroshot.evaluations.filters.FILTERS}, several of them separated by commas, or every.
        classes: a class-name file, or "imagenet"; by default classes.json or classes.txt beside the data.
        templates: a file, with {} in each line, or JSON {class name: [prompts]}; by default the data's, or CLIP's 80.
        labels: a file of "NAME LABEL" lines, for images without class folders.
        k: prompts that topk keeps; by default the best number on these images, an oracle.
        temperature: of weighted; in standard deviations of a class's uncertainties.
        deviations: c of class-deviation; it keeps prompts below a class's mean uncertainty + c standard deviations.
        threshold: largest uncertainty of a prompt, of threshold.
        quantile: share of all prompts that quantile keeps; the most certain.
        shots: labelled images of each class for reweighted.
        unlabelled: images, without their labels, for reweighted-unlabelled.
        prior: pseudo-images of each class, for both; evenly over its prompts, 0 for maximum likelihood.
        select_on: where settings are chosen: oracle (the scored images), or also train (select_data) or folds:5.
        select_data: labelled images to choose on, for --select-on train; of several data sets, one for each.
    """

    COMMON: ClassVar = ("model", "data", "out", "filter", "classes", "templates", "k", "select_on", "select_data")

    model: str = "SanghyukChun/PCMEPP-ViT-B-16-CC3M-12M-RedCaps"
    data: list[str] | str = "data/imagenet/val"
    exif: bool = False
    filter: str = "best-topk"
    classes: str | None = None
    templates: str | None = None
    labels: str | None = None
    k: Count | None = None
    temperature: PositiveFloat = 1.0
    deviations: float | None = None
    threshold: PositiveFloat | None = None
    quantile: Share | None = None
    shots: Count = 16
    unlabelled: Count = 2000
    prior: NonNegativeFloat = 10.0
    select_on: str = "oracle"
    select_data: list[str] | str | None = None


main = evaluation("imagenet", ImagenetConfig, __doc__)

if __name__ == "__main__":
    run_command(main)
