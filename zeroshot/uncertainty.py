"""Measure what an uncertainty is worth: wrong answers, OOD images, ambiguity, prediction sets; beside baselines.

    python -m zeroshot.uncertainty --model runs/adapted --data data/flickr8k --judgements judgements.tsv.gz
    python -m zeroshot.uncertainty --model runs/adapted --data data/scenes/val --classes data/scenes/classes --ood x

Every score is measured on the same items, with 95 % intervals. docs/adapt.md says how to read them.
"""

from dataclasses import dataclass

from jsonargparse.typing import NonNegativeInt, OpenUnitInterval

from probemb.cli.command import run_command
from probemb.cli.ranges import Count
from zeroshot.command import CaptionConfig, evaluation


@dataclass(frozen=True)
class UncertaintyConfig(CaptionConfig):
    """`python -m zeroshot.uncertainty`.

    Args:
        judgements: a file of human judgements of pairs: judgements.tsv, or Flickr8k's CrowdFlowerAnnotations.txt.
        classes: labelled images, in a form of docs/data.md.
        class_names: a class-name file for `classes`, or "imagenet"; by default the data's own.
        templates: a file, with {} in each line, or JSON {class name: [prompts]}; by default the data's, or CLIP's 80.
        ood: images of nothing that the classes name: a folder, or shards.
        alpha: share of the prediction sets that may miss the truth.
        class_conditional: guarantee alpha within every class; those of fewer than 3 / alpha images are in all sets.
        splits: random halves into calibration and test, for the prediction sets.
        levels: equal groups of queries, by uncertainty, to compare R@1 over.
        vilu: training steps of the failure predictor; it sees half of the labels. 0 leaves it out.
        probes: images, and captions, to crop and erase; to see their uncertainty grow. 0 skips that.
    """

    judgements: str | None = None
    classes: str | None = None
    class_names: str | None = None
    templates: str | None = None
    ood: str | None = None
    alpha: OpenUnitInterval = 0.1
    class_conditional: bool = False
    splits: Count = 20
    levels: Count = 10
    vilu: NonNegativeInt = 200
    probes: NonNegativeInt = 200


main = evaluation("uncertainty", UncertaintyConfig, __doc__)

if __name__ == "__main__":
    run_command(main)
