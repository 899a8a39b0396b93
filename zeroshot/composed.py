"""Composed retrieval: find the images that have everything a query of several images and texts asks for.

    python -m zeroshot.composed --model runs/mpc --data data/scenes/compositions            # make_scenes --compositions
    python -m zeroshot.composed --model runs/mpc --data data/scenes/compositions --k 2,3,4 --rankings density
    python -m zeroshot.composed --model runs/coco --data annotations/instances_train2017.json --lists data/coco_text/mpc
    python -m zeroshot.composed --model runs/tirg --data data/fashion200k

The model was trained with `finetune --method mpc` or another composer. Source: MPC §4, Tables 1 to 3, Fig. 5.
"""

from dataclasses import dataclass
from typing import Literal

from probemb.cli.command import run_command
from probemb.cli.ranges import Count, Seed
from zeroshot.command import EvaluationConfig, evaluation


@dataclass(frozen=True)
class ComposedConfig(EvaluationConfig):
    """`python -m zeroshot.composed`.

    Args:
        data: shards with categories (make_scenes --compositions), COCO's instances_*.json or a folder with it, or
            Fashion200k.
        images: folder of the images; by default searched beside the data.
        split: train, val or test.
        lists: folder of MPC's published lists; by default as in the model's training, or else beside the data.
        k: parts of a query, separated by commas, such as 2,3,4; by default as many as in the model's training.
        setup: seen (the combinations of the training) or unseen (others); auto: as in the model's training.
        seed: of drawn splits, combinations and queries; by default as in the model's training.
        queries: of each set, at most ten for a combination; published queries are all asked.
        rankings: cosine (of means), density (under the composition); by default as in the model's training.
    """

    images: str | None = None
    split: str = "test"
    lists: str | None = None
    k: str | None = None
    setup: Literal["auto", "seen", "unseen"] = "auto"
    seed: Seed | None = None
    queries: Count = 10_000
    rankings: str | None = None
    batch_size: Count = 128


main = evaluation("composed", ComposedConfig, __doc__)

if __name__ == "__main__":
    run_command(main)
