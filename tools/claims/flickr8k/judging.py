"""People's judgements of test pairs, against the scores of trainings. P judged pairs, S seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from probemb.data.captions.find import CaptionDataset
from probemb.data.captions.judgements import read_judgements
from probemb.evaluation.calibration import caption_acceptance
from probemb.evaluation.embed_pairs import EmbeddedPairs
from probemb.evaluation.judgements import (
    compare_judged,
    cross_fitted,
    judged_metrics,
    judged_pairs,
    judged_scores,
)
from probemb.evaluation.rankings import RankingOptions
from probemb.gaussian import Gaussian
from tools.claims.embeddings import read_embeddings

RIVAL, RESAMPLES = "infonce", 1000
OTHERS = ("inclusion", "log-likelihood")  # rankings that are not compared with the rival's


class Judge:
    """Judged pairs of the test split that are not the caption's own image; see `probemb.evaluation.judgements`."""

    def __init__(self, path: Path, test: CaptionDataset, n_resamples: int = RESAMPLES):
        self.owner = torch.tensor(test.owner())
        judgements = read_judgements(path, test)
        self.pairs, self.once = (judged_pairs(judgements, n) for n in (n_resamples, 1))

    def measure(self, images: Gaussian, texts: Gaussian, probabilistic: bool) -> dict:
        """Numbers of one training: ranking -> "average_precision", "roc_auc" and the same as means of both halves.

        Cross-fitted scores ("tolerance") have those of the halves alone. A probabilistic model has OTHERS, too, and
        "u", the caption's alone. "acceptance": Spearman of a caption's u with the share of its judged images that
        people accept.
        """
        scores, chosen = self.scores(images, texts, probabilistic)
        if probabilistic:
            pairs = self._embedded(images, texts)
            scores |= {name: judged_scores(pairs, self.once, name, RankingOptions()) for name in OTHERS}
            scores["u"] = texts.uncertainty()[self.once.caption]
        found: dict = {}
        for name, each in scores.items():
            values = {key: float(x[0]) for key, x in judged_metrics(each, self.once).items()}
            found[name] = {k: x for k, x in values.items() if name != "tolerance" or k.endswith("_halves")}
        if probabilistic:
            acceptance = caption_acceptance(self._embedded(images, texts), self.once)
            found |= {"chosen": chosen, "acceptance": acceptance and acceptance["spearman"]["value"]}
        return found

    def scores(self, images: Gaussian, texts: Gaussian, probabilistic: bool) -> tuple[dict[str, Tensor], list | None]:
        """(P,) of the rankings "mean", and of a probabilistic model "csd" and "tolerance", whose weights come along."""
        pairs, options = self._embedded(images, texts), RankingOptions()
        names = ("mean", "csd") if probabilistic else ("mean",)
        found = {name: judged_scores(pairs, self.once, name, options) for name in names}
        if not probabilistic:
            return found, None
        tolerant, about = cross_fitted(pairs, self.once)
        return found | {"tolerance": tolerant}, about["chosen"]

    def compare(self, found, archive, variants: Sequence[str]) -> dict[str, dict]:
        """Average precision of every variant and ranking less InfoNCE's, by the paired bootstrap over images and
        captions.

        Metrics of the seeds are averaged; both sides take the mean of both halves, as cross-fitted scores need it.

        Returns:
            variant -> ranking -> {"value", "low", "high"}.
        """

        def of(variant: str) -> dict[str, Tensor]:
            seeds = [
                self.scores(*read_embeddings(archive.embeddings(name))["test"], variant != RIVAL)[0]
                for name in found.names(variant)
            ]
            return {ranking: torch.stack([one[ranking] for one in seeds]) for ranking in seeds[0]}

        rival = of(RIVAL)["mean"]
        return {
            variant: {
                ranking: compare_judged(scores, rival, self.pairs)["average_precision_halves"]
                for ranking, scores in of(variant).items()
            }
            for variant in variants
        }

    def _embedded(self, images: Gaussian, texts: Gaussian) -> EmbeddedPairs:
        return EmbeddedPairs(images, texts, self.owner, list(range(len(images))), [])
