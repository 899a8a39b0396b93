"""Give a trained CLIP, SigLIP or any other dual encoder an uncertainty, from its embeddings, in minutes on a CPU.

    python -m tools.embed --model runs/clip --data data/train --out embeddings/clip     # once
    python -m finetune.adapt --embeddings embeddings/clip --method gaussian --out runs/adapted
    python -m zeroshot.retrieval --model runs/adapted --data data/val

The towers stay as they are. Recall on pairs that the adapter did not see is printed before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config
from probemb.cli.ranges import BelowOne, Count, Folder, Seed
from probemb.errors import UserError

PROG = "python -m finetune.adapt"


@dataclass(frozen=True)
class AdaptConfig:
    """Options of an adapter.

    Args:
        embeddings: a folder that tools.embed wrote, images and captions; with --inputs for method laplace.
        method: gaussian (a mean and variances by PCME++'s or ProLIP's loss), laplace (BayesVLM: no training),
            loss-order (Pretrained Visual Uncertainties), asymvlm (texts alone), probvlm.
        out: folder of the new model.
        loss: of gaussian: pcmepp or prolip; of probvlm: exact (the paper's density) or code (the public code's).
        form: of asymvlm: power-spherical or von-mises-fisher.
        clip: weight of the CLIP loss beside pcmepp or prolip.
        vib: weight of PCME++'s or ProLIP's bottleneck.
        cross: weight of probvlm's other modality.
        hidden: width of the adapter's layers; by default the method's own.
        epochs: passes over the images, each with one of its captions.
        batch_size: pairs; of laplace, those that an item is compared with.
        lr: peak learning rate of AdamW, cosine after a tenth of the steps.
        weight_decay: of AdamW.
        validation: share of the images that are held out, for the recall before and after (5,000 at most).
        pseudo_data: of laplace: how many times the pairs count.
        damped: of laplace: the published factored precision in place of the exact one.
        seed: of weights, order and captions.
    """

    embeddings: str = ""
    method: Literal["gaussian", "laplace", "loss-order", "asymvlm", "probvlm"] = "gaussian"
    out: Folder | None = None
    loss: Literal["pcmepp", "prolip", "exact", "code"] | None = None
    form: Literal["power-spherical", "von-mises-fisher"] = "power-spherical"
    clip: NonNegativeFloat = 1.0
    vib: NonNegativeFloat = 1e-4
    cross: NonNegativeFloat = 1e-4
    hidden: PositiveInt | None = None
    epochs: NonNegativeInt = 10
    batch_size: Count = 1024
    lr: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 1e-4
    validation: BelowOne = 0.05
    pseudo_data: PositiveFloat = 10.0
    damped: bool = False
    seed: Seed = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Read the options, adapt and save; returns 0."""
    about = "Give a trained dual encoder an uncertainty, from its embeddings."
    config = parse_config(AdaptConfig, PROG, about, argv)
    if not (config.embeddings and config.out):
        raise UserError(
            "--embeddings or --out is missing.", f"Name both: {PROG} --embeddings embeddings/x --out runs/y."
        )
    from finetune.adapters import adapt

    adapt(config)
    return 0


if __name__ == "__main__":
    run_command(main)
