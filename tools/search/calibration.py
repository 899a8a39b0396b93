"""From which uncertainty on a query is refused: measured on a validation set, kept beside the index.

Every caption of the validation set is a query (in an index of captions: every image), and right if the closest item of
the validation set (or one of the K closest) is its own: that it fits others, too, is what makes a query ambiguous.
Queries of two and three texts are captions of one image, composed. For each number of parts the file has a curve:
thresholds, the share of queries that they answer, the share of those that is right, and its lower bound.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.errors import UserError

if TYPE_CHECKING:
    from probemb.gaussian import Gaussian
    from probemb.metrics import PrecisionCurve
    from tools.search.query import Searcher

NAME = "calibration.json"
GENERATOR = "probemb tools.search --calibrate"
MOST_TEXTS = 3  # parts of a query
RIVALS = ("validation", "index")
SAME = 2e-3  # distances closer than this may be the same item, once with its mean in float16
SLICE = 4096  # queries at a time


@dataclass(frozen=True)
class Calibration:
    """What INDEX/calibration.json says.

    Attributes:
        kind: of the queries, "text" or "image".
        curves: number of parts -> PrecisionCurve.
        weights: digest of the model's weights.
        data, gallery: the validation set and its size.
        rivals, within: among what the right item had to be how close.
    """

    kind: str
    curves: dict[int, PrecisionCurve]
    weights: str
    data: str
    gallery: int
    rivals: str
    within: int = 1

    def curve(self, kinds: Sequence[str]) -> PrecisionCurve:
        """The curve for a query of these parts. Raises UserError: there were no such queries."""
        if set(kinds) != {self.kind} or len(kinds) not in self.curves:
            most = max(self.curves)
            asked = " and ".join(
                f"{kinds.count(kind)} {kind}{'' if kinds.count(kind) == 1 else 's'}" for kind in sorted(set(kinds))
            )
            raise UserError(
                f"The calibration of this index is for queries of 1{f' to {most}' if most > 1 else ''} {self.kind}"
                f"{'s' if most > 1 else ''}, and this one has {asked}.",
                "Say --max-uncertainty instead of a precision.",
            )
        return self.curves[len(kinds)]

    def threshold(self, kinds: Sequence[str], precision: float) -> float:
        """The uncertainty above which to refuse. Raises UserError: the precision is out of reach."""
        from probemb.metrics import highest_threshold

        curve = self.curve(kinds)
        threshold = highest_threshold(curve, precision)
        if threshold is None:
            raise UserError(
                f"A precision of {precision:g} is out of reach: the validation set promises at most "
                f"{max(curve.at_least):.3f}.",
                "Ask for less, or calibrate on more queries.",
            )
        return threshold


def calibrate(searcher: Searcher, data: str, rivals: str = "validation", within: int = 1, show=None) -> Calibration:
    """Measure on images with captions.

    Args:
        data: as `find_captioned` takes it.
        rivals: "validation", or "index": then the items of the index count, too, none of them as the right one.
        within: a query is right if its own item is among so many.
        show: as `probemb.progress.progress`.

    Raises:
        UserError: the data cannot be read or is smaller than `within`, or another kind of rivals.
    """
    from probemb.data.captioned import find_captioned
    from probemb.errors import nearest
    from probemb.pairs import embed_pairs
    from probemb.progress import silent

    if rivals not in RIVALS:
        raise UserError(f"There are no rivals '{rivals}'.{nearest(rivals, RIVALS)}", f"Say {' or '.join(RIVALS)}.")
    weights, captions = searcher.index.weights or "", find_captioned(data)
    if not 1 <= within <= len(captions):
        raise UserError(f"--within is {within}, and {data} has {len(captions):,} images.", "Give a number up to that.")
    model, tokenizer, transforms = searcher.loaded
    embedded = embed_pairs(
        model, tokenizer, transforms.evaluate, captions, placement=searcher.placement, workers=None,
        show=show or silent,
    )  # fmt: skip
    owner = embedded.owner.tolist()
    if searcher.index.kind == "text":
        groups = [[row] for row in range(len(embedded.images))]
        curves = {
            1: measure(searcher, embedded.images, embedded.texts, groups, range(len(groups)), owner, rivals, within)
        }
        return Calibration("image", curves, weights, str(data), len(embedded.texts), rivals, within)
    curves, places = {}, range(len(embedded.images))
    for parts in range(1, MOST_TEXTS + 1):
        groups = caption_groups(owner, parts)
        if groups:
            curves[parts] = measure(searcher, embedded.texts, embedded.images, groups, owner, places, rivals, within)
    return Calibration("text", curves, weights, str(data), len(embedded.images), rivals, within)


def caption_groups(owner: Sequence[int], parts: int, seed: int = 0) -> list[list[int]]:
    """Rows of captions in groups of `parts`, each of one image and no caption in two of them."""
    of_image: dict[int, list[int]] = {}
    for row, image in enumerate(owner):
        of_image.setdefault(image, []).append(row)
    draw = random.Random(seed)
    groups = []
    for rows in of_image.values():
        rows = rows if parts == 1 else draw.sample(rows, len(rows))
        groups += [rows[start : start + parts] for start in range(0, len(rows) - parts + 1, parts)]
    return groups


def measure(
    searcher: Searcher, queries: Gaussian, gallery: Gaussian, groups: list[list[int]], asked: Sequence[int],
    holds: Sequence[int], rivals: str, within: int,
) -> PrecisionCurve:  # fmt: skip
    """The curve of queries that are compositions of groups of equal length.

    Args:
        asked: image of each query part; holds: image of each gallery item.
    """
    import torch

    from probemb.compose import as_query, compose
    from probemb.gaussian import Gaussian
    from probemb.metrics import precision_curve
    from probemb.search import build_index, rerank, search

    own = build_index(gallery, "Flat")
    rows, wanted, images = torch.tensor(groups), torch.tensor(asked), torch.tensor(holds)  # rows: (G, parts)
    uncertainty, correct = [], []
    for part in rows.split(SLICE):
        parts = Gaussian(queries.mean[part.T], queries.log_var[part.T])  # (parts, G, D)
        query = as_query(compose(parts).gaussian) if part.shape[1] > 1 else parts[0]
        distance, found = search(own, query, min(within, len(own)))
        hit = images[found] == wanted[part[:, :1]]
        rank = torch.where(hit, torch.arange(hit.shape[1]), within).min(1).values
        if rivals == "index":
            look = search if searcher.index.form == "csd" else rerank
            closer = look(searcher.index, query, min(within, len(searcher.index)))[0]
            at = distance.gather(1, rank.clamp_max(hit.shape[1] - 1)[:, None])
            rank = rank + (closer < at - SAME).sum(1)
        correct.append(rank < within)
        uncertainty.append(query.uncertainty())
    return precision_curve(torch.cat(uncertainty), torch.cat(correct))


def save_calibration(folder: Path, calibration: Calibration) -> Path:
    """Write it beside the index. Raises UserError: the folder cannot be written."""
    from probemb.results import write_json

    content = {"format": 1, **asdict(calibration)}
    content["curves"] = {str(parts): asdict(curve) for parts, curve in calibration.curves.items()}
    try:
        write_json(folder / NAME, content, GENERATOR)
    except OSError as error:
        raise UserError(
            f"The calibration cannot be written into {folder} ({error.strerror}).", "Make the folder writable."
        ) from None
    return folder / NAME


def load_calibration(folder: Path, weights: str) -> Calibration | None:
    """The calibration of an index; None if there is none. Raises UserError: broken, or of another model."""
    from probemb.metrics import PrecisionCurve

    path = folder / NAME
    if not path.exists():
        return None
    again = f"Make it again with `python -m tools.search --index {folder} --calibrate DATA`."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != 1:
            raise ValueError("another format")
        curves = {int(parts): PrecisionCurve(**curve) for parts, curve in content["curves"].items()}
        names = ("kind", "weights", "data", "gallery", "rivals", "within")
        calibration = Calibration(curves=curves, **{name: content[name] for name in names})
        if not curves or not all(is_curve(curve) for curve in curves.values()):
            raise ValueError("no curves")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is not a calibration.", again) from None
    if calibration.weights != weights:
        raise UserError(
            f"{path} was made with other weights ({calibration.weights[:12]}) than the index ({weights[:12]}).", again
        )
    return calibration


def is_curve(curve: PrecisionCurve) -> bool:
    """Whether what was read has the shape of a curve."""
    lists = (curve.threshold, curve.coverage, curve.precision, curve.at_least)
    whole = all(isinstance(one, list) and len(one) == len(curve.threshold) > 0 for one in lists)
    return whole and all(type(x) in (int, float) for one in lists for x in one)
