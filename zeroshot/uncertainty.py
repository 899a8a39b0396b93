"""The worth of an uncertainty: errors, strangers, refusing, ambiguity and guarantees, beside scores that need nothing.

    python -m zeroshot.uncertainty --model runs/adapted --data data/flickr8k --split test
    python -m zeroshot.uncertainty --model runs/adapted --data data/scenes/val --classes data/scenes/classes --ood photos

Every score stands beside the others on the same items, with 95 % intervals. Sources: docs/concepts.md.
"""

from dataclasses import dataclass

from jsonargparse.typing import NonNegativeInt

from probemb.cli.command import run_command
from probemb.cli.ranges import BelowOne, Count
from zeroshot.command import CaptionConfig, evaluation


@dataclass(frozen=True)
class UncertaintyConfig(CaptionConfig):
    """`python -m zeroshot.uncertainty`.

    Args:
        classes: labelled images, in a form that zeroshot.imagenet reads.
        class_names: a class-name file for them, or "imagenet"; by default the data's own.
        templates: a file of prompt templates; by default the data's, or CLIP's 80.
        ood: images of nothing that the classes name: a folder, or shards.
        alpha: share of the prediction sets that may miss the truth.
        splits: random halves into calibration and test for the prediction sets, and for the temperature.
        levels: equal groups of queries, from certain to uncertain, that R@1 is compared over.
        crops: images for the crop test; 0 skips it.
    """

    classes: str | None = None
    class_names: str | None = None
    templates: str | None = None
    ood: str | None = None
    alpha: BelowOne = 0.1
    splits: Count = 20
    levels: Count = 10
    crops: NonNegativeInt = 200


main = evaluation("uncertainty", UncertaintyConfig, __doc__)

if __name__ == "__main__":
    run_command(main)
