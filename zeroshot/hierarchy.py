"""Captions of an image from general to specific: does a model order them, and does a walk to a root find them?

    python -m zeroshot.hierarchy --model runs/prolip --data hierarcaps_test.csv --images data/coco/val2014

Takes HierarCaps' table, or other data with the same number of captions for every image, in this order. Prints a
table and writes results.json and report.html. Source: HierarCaps (ECCV 2024), ProLIP §4.
"""

from collections.abc import Sequence

from probemb.cli.command import run_command
from zeroshot.command import CaptionConfig, read_options

DESCRIPTION = "Captions from general to specific: how well a model orders and finds them."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; wrong data is refused before the model is loaded."""
    config = read_options(CaptionConfig, "hierarchy", DESCRIPTION, argv, "captions from general to specific")
    from zeroshot.evaluations.analyses import hierarchy

    hierarchy(config)
    return 0


if __name__ == "__main__":
    run_command(main)
