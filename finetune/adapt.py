"""Make a trained CLIP, SigLIP or other dual encoder probabilistic, in minutes on a CPU.

    python -m tools.embed --model runs/clip --data data/train --out embeddings/clip     # once
    python -m finetune.adapt --embeddings embeddings/clip --method gaussian --out runs/adapted
    python -m zeroshot.retrieval --model runs/adapted --data data/val

The towers stay as they are. Recall on held-out pairs is printed before and after.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config
from probemb.cli.ranges import BelowOne, Count, Folder, Seed
from probemb.errors import UserError

PROG = "python -m finetune.adapt"

# The losses of a method, the default first, and the options that not all methods have, with those that do.
LOSSES = {
    "gaussian": ("pcmepp", "prolip"), "asymvlm": ("power-spherical", "von-mises-fisher"),
    "probvlm": ("density", "published"), "laplace": (), "loss-order": (),
}  # fmt: skip
TRAINED = tuple(method for method in LOSSES if method != "laplace")
OWN_OPTIONS = {
    "clip": ("gaussian",), "vib": ("gaussian",), "directions": ("asymvlm",), "cross": ("probvlm",),
    "pseudo_data": ("laplace",), "exact": ("laplace",),
    **dict.fromkeys(("hidden", "epochs", "lr", "weight_decay"), TRAINED),
}  # fmt: skip


@dataclass(frozen=True)
class AdaptConfig:
    """Options of an adapter.

    Args:
        embeddings: a folder that tools.embed wrote, images and captions; with --inputs for method laplace. Best of
            pairs that the model was not trained on: memorised ones show no failures to learn from.
        method: its name in docs/adapt.md; gaussian (means and variances by PCME++'s or ProLIP's loss), laplace
            (BayesVLM, trains nothing), loss-order (Pretrained Visual Uncertainties), asymvlm (texts alone), probvlm.
        out: folder of the new model.
        loss: of gaussian pcmepp or prolip, of asymvlm power-spherical or von-mises-fisher, of probvlm density (as in
            the paper) or published (as in its code).
        clip: of gaussian: weight of the CLIP loss.
        vib: of gaussian: weight of PCME++'s or ProLIP's bottleneck.
        directions: of asymvlm: take the learned means of texts too, as published; recall is lower.
        cross: of probvlm: weight of the other modality.
        hidden: width of the adapter's layers; by default the method's own.
        epochs: passes over the images, each with one of its captions.
        batch_size: pairs, 1,024 by default; of laplace, the items that each is compared with, by default 32,768.
        lr: peak learning rate of AdamW, cosine after a tenth of the steps.
        weight_decay: of AdamW.
        validation: share of the images that are held out, to report recall and to fit the adapter's softmax; 200 to
            5,000, or a fifth of few. The softmax is of cosines over T u^k, whose T and k they fit; of gaussian, half of
            them choose how much of the change of the means is kept.
        classes: labelled images, in a form of docs/data.md, whose zero-shot accuracy is reported too.
        pseudo_data: of laplace: how many times the pairs count.
        exact: of laplace: the factors' exact posterior, not the published one.
        seed: of everything random: weights, order, captions.
    """

    embeddings: str = ""
    method: Literal[tuple(LOSSES)] = "gaussian"
    out: Folder | None = None
    loss: Literal[tuple(loss for some in LOSSES.values() for loss in some)] | None = None
    clip: NonNegativeFloat = 1.0
    vib: NonNegativeFloat = 1e-4
    directions: bool = False
    cross: NonNegativeFloat = 1e-4
    hidden: PositiveInt | None = None
    epochs: NonNegativeInt = 10
    batch_size: Count | None = None
    lr: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 1e-4
    validation: BelowOne = 0.05
    classes: str | None = None
    pseudo_data: PositiveFloat = 10.0
    exact: bool = False
    seed: Seed = 0

    def check(self) -> None:
        """Raise UserError for missing options, and for those of another method."""
        if not (self.embeddings and self.out):
            remedy = f"Name both: {PROG} --embeddings embeddings/x --out runs/y."
            raise UserError("--embeddings or --out is missing.", remedy)
        losses = LOSSES[self.method]
        if self.loss is not None and self.loss not in losses:
            remedy = f"Choose {' or '.join(losses)}." if losses else "Leave --loss out."
            raise UserError(f"The loss {self.loss} is not one of method {self.method}.", remedy)
        for key, methods in OWN_OPTIONS.items():
            if self.method not in methods and getattr(self, key) != getattr(AdaptConfig, key):
                remedy = f"Leave --{key} out, or choose {' or '.join(methods)}."
                raise UserError(f"--{key} has no effect with method {self.method}.", remedy)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the options, adapt and save; returns 0."""
    about = "Give a trained dual encoder an uncertainty, from its embeddings."
    config = parse_config(AdaptConfig, PROG, about, argv)
    config.check()
    from finetune.adapters import adapt

    adapt(config)
    return 0


if __name__ == "__main__":
    run_command(main)
