"""Smaller analyses of means and variances; each prints a table and writes results.json and report.html.

    python -m zeroshot.analyses union --model runs/x --data data/visual_genome
    python -m zeroshot.analyses set-algebra --model runs/pcme --data data/flickr8k --split test
    python -m zeroshot.analyses ellipses --model runs/pcme-cub --data data/cub --generic "this bird has unk unk unk"
    python -m zeroshot.analyses continuity --model runs/jwae --data data/flickr8k --split test
    python -m zeroshot.analyses hierarchy --model runs/prolip --data hierarcaps_test.csv --images data/coco/val2014

Sources: union: Probabilistic VSE++ and VSRN, Fig. 2, Table 4; set-algebra: PCME Figures 7, 8; ellipses: PCME Fig. 5;
continuity: jWAE Fig. 2; hierarchy: HierarCaps (ECCV 2024), ProLIP §4.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from jsonargparse.typing import restricted_number_type

from probemb.cli.command import run_command
from probemb.cli.ranges import Count, Share
from probemb.errors import UserError, nearest
from zeroshot.command import CaptionConfig, EvaluationConfig, evaluation

Groups = restricted_number_type("Groups", int, [(">=", 2), ("<=", 9)])  # as many as there are colours


@dataclass(frozen=True)
class UnionConfig(EvaluationConfig):
    """`python -m zeroshot.analyses union`.

    Args:
        data: Visual Genome (a folder with region_descriptions.json), or the synthetic world's visual_genome.
        images: folder of the images; by default searched beside the data.
        sample: so many of the images, chosen by their ids; --no-sample: all.
        areas: largest area of crops A and B, as shares of the image; a figure has all of them.
        rankings: csd, mean, ..., separated by commas; by default the one of the training, and the means alone.
    """

    images: str | None = None
    sample: Count | None = 2000
    areas: tuple[Share, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    rankings: str | None = None
    batch_size: Count = 128


@dataclass(frozen=True)
class AlgebraConfig(CaptionConfig):
    """`python -m zeroshot.analyses set-algebra`.

    Args:
        inputs: images, and captions, to mix and to erase parts of; at least 4.
    """

    inputs: Count = 200


@dataclass(frozen=True)
class EllipsesConfig(CaptionConfig):
    """`python -m zeroshot.analyses ellipses`.

    Args:
        groups: classes to draw, or single images where the data has no classes; at most 9.
        per_group: images of a class.
        generic: a caption that says nothing, such as "this bird has unk unk"; drawn with a region of 99 %.
    """

    groups: Groups = 9
    per_group: Count = 6
    generic: str | None = None


@dataclass(frozen=True)
class ContinuityConfig(CaptionConfig):
    """`python -m zeroshot.analyses continuity`.

    Args:
        neighbours: of every image.
        walks: from one image to another, that are measured.
        shown: walks, and images with their neighbours, shown.
    """

    neighbours: Count = 5
    walks: Count = 100
    shown: Count = 6


ANALYSES: dict[str, tuple[type[EvaluationConfig], str]] = {
    "union": (UnionConfig, "Uncertainty of crops and of their union, and selection among them."),
    "set-algebra": (AlgebraConfig, "Mixed and erased inputs as set operations on embeddings."),
    "ellipses": (EllipsesConfig, "Images and captions of some classes as ellipses."),
    "continuity": (ContinuityConfig, "Similarity of neighbours, and walks between codes."),
    "hierarchy": (CaptionConfig, "Order and retrieval of captions from general to specific."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the analysis that the first word names; wrong options are refused before the model is loaded."""
    name, *words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: python -m zeroshot.analyses NAME --model MODEL --data PATH [--KEY VALUE ...]\n")
        print("\n".join(f"  {one:12} {about}" for one, (_, about) in ANALYSES.items()))
        return 0
    if name not in ANALYSES:
        raise UserError(f"There is no analysis '{name}'.{nearest(name, ANALYSES)}", f"Choose {', '.join(ANALYSES)}.")
    return evaluation(f"analyses {name}", *ANALYSES[name])(words)


if __name__ == "__main__":
    run_command(main)
