"""From which uncertainty on a query is refused: measured on a validation set, kept beside the index.

Every caption of the validation set is a query (in an index of captions: every image), and right if the closest item of
the validation set is its own, or in the embedded world one that it is true of. Queries of two and three texts are
captions of one image, composed. For each number of parts the file has a curve: thresholds, the share of queries
that they answer, the share of those that is right, and its lower bound.
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
    from probemb.data.captioned import Captioned
    from probemb.gaussian import Gaussian
    from probemb.metrics import PrecisionCurve
    from tools.search_query import Searcher

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
        data, gallery, rivals: the validation set, its size, and what the right item had to be closer than.
    """

    kind: str
    curves: dict[int, PrecisionCurve]
    weights: str
    data: str
    gallery: int
    rivals: str

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


def calibrate(searcher: Searcher, data: str, rivals: str = "validation", weights: str = "", show=None) -> Calibration:
    """Measure on images with captions.

    Args:
        data: as `find_captioned` takes it. rivals: "index" counts a query as wrong, too, if an item of the index is
            closer than the whole validation set.
        show: as `probemb.progress.progress`.

    Raises:
        UserError: the data cannot be read, or another kind of rivals.
    """
    from probemb.data.captioned import find_captioned
    from probemb.errors import nearest
    from probemb.pairs import embed_pairs
    from probemb.progress import silent

    if rivals not in RIVALS:
        raise UserError(f"There are no rivals '{rivals}'.{nearest(rivals, RIVALS)}", f"Say {' or '.join(RIVALS)}.")
    captions = find_captioned(data)
    model, tokenizer, transforms = searcher.loaded
    embedded = embed_pairs(
        model, tokenizer, transforms.evaluate, captions, placement=searcher.placement, workers=None,
        show=show or silent,
    )  # fmt: skip
    if searcher.index.kind == "text":
        owner = embedded.owner.tolist()
        groups = [[row] for row in range(len(embedded.images))]
        own = lambda group, caption: owner[caption] == group[0]  # noqa: E731
        curves = {1: measure(searcher, embedded.images, embedded.texts, groups, own, rivals)}
        return Calibration("image", curves, weights, str(data), len(embedded.texts), rivals)
    right = right_images(captions, embedded)
    curves = {}
    for parts in range(1, MOST_TEXTS + 1):
        groups = caption_groups(embedded.owner.tolist(), parts)
        if groups:
            curves[parts] = measure(searcher, embedded.texts, embedded.images, groups, right, rivals)
    return Calibration("text", curves, weights, str(data), len(embedded.images), rivals)


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


def right_images(captions: Captioned, embedded):
    """Whether a found image fits all captions of the query: its own, or in the embedded world any true one."""
    if captions.scenes is not None:
        from probemb.pairs import exact_match

        match = exact_match(captions, embedded.kept)
        return lambda group, found: bool(match[found, group].all())
    owner = embedded.owner.tolist()
    return lambda group, found: owner[group[0]] == found


def measure(
    searcher: Searcher, queries: Gaussian, gallery: Gaussian, groups: list[list[int]], right, rivals: str
) -> PrecisionCurve:
    """The curve of queries that are compositions of groups of equal length."""
    import torch

    from probemb.compose import as_query, compose
    from probemb.gaussian import Gaussian
    from probemb.metrics import precision_curve
    from probemb.search import build_index, rerank, search

    own = build_index(gallery, "Flat")
    rows = torch.tensor(groups)  # (G, parts)
    uncertainty, correct = [], []
    for part in rows.split(SLICE):
        parts = Gaussian(queries.mean[part.T], queries.log_var[part.T])  # (parts, G, D)
        query = as_query(compose(parts).gaussian) if part.shape[1] > 1 else parts[0]
        distance, found = search(own, query, 1)
        good = torch.tensor([right(group, row) for group, row in zip(part.tolist(), found[:, 0].tolist())])
        if rivals == "index":
            look = search if searcher.index.form == "csd" else rerank
            good &= torch.as_tensor(look(searcher.index, query, 1)[0][:, 0]) >= distance[:, 0] - SAME
        uncertainty.append(query.uncertainty())
        correct.append(good)
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
        names = ("kind", "weights", "data", "gallery", "rivals")
        calibration = Calibration(curves=curves, **{name: content[name] for name in names})
        if not curves or not all(curve.threshold for curve in curves.values()):
            raise ValueError("empty")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is not a calibration.", again) from None
    if calibration.weights != weights:
        raise UserError(
            f"{path} was made with other weights ({calibration.weights[:12]}) than the index ({weights[:12]}).", again
        )
    return calibration
