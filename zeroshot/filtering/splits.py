"""The images to choose a filter's setting on, and those that the choice may score.

N evaluated images, M images to choose on, G classifiers, C classes, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from probemb.evaluation.classification import true_ranks
from zeroshot.filtering.filters import Selection, stratified_folds
from zeroshot.filtering.rows import SelectionData


@dataclass(frozen=True)
class Chosen:
    """Images to choose on, and those that the choice may score.

    Attributes:
        mean, labels, names: of M images to choose on.
        scored: (N,) bool, the evaluated images that this choice scores.
        rows: (N,) bool, which of the evaluated images those to choose on are; None: all, or other images.
        elsewhere: they are no evaluated images.
    """

    mean: Tensor
    labels: Tensor
    names: Sequence[str]
    scored: Tensor
    rows: Tensor | None
    elsewhere: bool = False

    def ranks(self, stack: Tensor, own: Tensor) -> Tensor:
        """(M, G) ranks under G classifiers (G, C, D), given those of the evaluated images (N, G)."""
        if self.elsewhere:
            return true_ranks(self.mean, stack, self.labels).cpu()
        return own if self.rows is None else own[self.rows]


def make_splits(
    images: Chosen, selection: Selection, select_data: SelectionData | None, groups: Sequence[int] | None
) -> list[Chosen]:
    """Images to choose on besides the scored ones: other images, the other folds of each fold, or nothing."""
    if selection.on == "train":
        labels = select_data.labels.cpu()
        return [Chosen(select_data.mean, labels, select_data.names, images.scored, None, elsewhere=True)]
    if not selection.folds:
        return []
    folds = stratified_folds(images.labels.tolist(), images.names, selection.folds, groups)
    splits = []
    for fold in range(selection.folds):
        others = folds != fold
        names = [name for name, used in zip(images.names, others.tolist()) if used]
        mean = images.mean[others.to(images.mean.device)]
        splits.append(Chosen(mean, images.labels[others], names, ~others, others))
    return splits
