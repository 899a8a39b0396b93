"""Image-text retrieval: every ranking against every kind of positives, and the value of uncertainty.

    python -m zeroshot.retrieval --model runs/x --data data/flickr8k --split test
    python -m zeroshot.retrieval --model runs/x --data dataset_coco.json --images data/coco     # with COCO's benchmarks
    python -m zeroshot.retrieval --model runs/scenes --data data/scenes --split val             # synthetic data
    python -m zeroshot.retrieval --model runs/x --data data/flickr8k --split test --judgements judgements.tsv.gz
    python -m zeroshot.retrieval --model runs/x --data data/flickr8k --split test --select-data data/flickr8k

All captions of an image are its positives; data with known truth have exact ones, and COCO's test split has CxC, ECCV
Caption and plausible matches. Source: PCME++ §4.1, §C.5.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jsonargparse.typing import NonNegativeInt

from probemb.cli.command import run_command
from probemb.cli.ranges import Count
from zeroshot.command import CaptionConfig, evaluation


@dataclass(frozen=True)
class ToleranceWeights:
    """Weights of the variances in the ranking `tolerance`: 1 is CSD, 0 the means, below 0 a tolerance.

    Args:
        i2t: of the captions, searched with an image; with t2i, instead of weights that are chosen.
        t2i: of the images, searched with a caption.
    """

    i2t: float | None = None
    t2i: float | None = None


@dataclass(frozen=True)
class RetrievalConfig(CaptionConfig):
    """`python -m zeroshot.retrieval`.

    Args:
        second: another model, whose similarities are averaged with the first's; auto: the second
            network of the run that --model names, if it trained two; --no-second for none.
        benchmarks: coco, cxc, eccv, pmrp, separated by commas; by default all that the data allows.
        instances: COCO's instances_val2014.json, or a file of its form, for pmrp; which objects the images show.
        rankings: {probemb.evaluation.rankings.RANKINGS}, separated by commas; by default the first eight, and the one
            it was trained for.
        tolerance: weights of the variances in the ranking tolerance; without them they are chosen on --select-data, or
            on these images, an oracle.
        select_data: other images with captions, to choose the weights of tolerance on.
        select_split: their split; --no-select-split: all of them.
        factory: FAISS index of the faiss rankings; such as Flat, HNSW32 or IVF256,Flat.
        candidates: neighbours of the means that faiss-rerank re-ranks.
        samples: samples of each item for match-probability.
        judgements: a file of human judgements of pairs: judgements.tsv, or Flickr8k's CrowdFlowerAnnotations.txt.
        uncertainty: sum (of variances), log-det (of the covariance) or geometric-mean (of standard deviations).
        erased: images, and captions, to erase in part; to see their uncertainty grow. 0 skips that.
    """

    COMMON: ClassVar = (
        *("model", "data", "split", "images", "out", "benchmarks", "rankings", "tolerance"),
        *("select_data", "select_split", "judgements"),
    )

    second: str | None = "auto"
    benchmarks: str | None = None
    instances: str | None = None
    rankings: str | None = None
    tolerance: ToleranceWeights = field(default_factory=ToleranceWeights)
    select_data: str | None = None
    select_split: str | None = "val"
    factory: str = "Flat"
    candidates: Count = 100
    samples: Count = 8
    judgements: str | None = None
    uncertainty: Literal["sum", "log-det", "geometric-mean"] = "sum"
    erased: NonNegativeInt = 200


main = evaluation("retrieval", RetrievalConfig, __doc__)

if __name__ == "__main__":
    run_command(main)
