"""VSRN, which reasons over an image's regions, and probabilistic VSRN."""

from __future__ import annotations

from dataclasses import dataclass

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat

from finetune.methods.captions import Captioned, CaptionOptions
from finetune.methods.prob_vse import ProbVSEPlusPlus
from finetune.methods.vse import VSE


class VSRN(Captioned, VSE):
    """Graph reasoning over regions and a GRU, with VSE++'s hardest negatives and captions generated from regions."""

    @dataclass(frozen=True)
    class Options(CaptionOptions, VSE.Options):
        """Triplet loss, and captions generated from regions. Source: VSRN, joint matching and generation.

        Args:
            warmup_epochs: first epochs, with all negatives.
        """

        warmup_epochs: NonNegativeInt = 0


class ProbVSRN(Captioned, ProbVSEPlusPlus):
    """VSRN with normals in place of points."""

    @dataclass(frozen=True)
    class Options(CaptionOptions, ProbVSEPlusPlus.Options):
        """Triplet loss of a similarity of normals; the paper names no other.

        Args:
            margin: of the hinges, in units of the similarity.
            caption_weight: of the captions' negative log-likelihood (VSRN: 1); 0 for no decoder.
        """

        margin: PositiveFloat = 0.1
        caption_weight: NonNegativeFloat = 0.0
