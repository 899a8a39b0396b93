"""Facts about an index for the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.reports.text import printable
from tools.search.scoring import SCORES

if TYPE_CHECKING:
    from tools.search.query import Searcher

SAMPLED = 64  # gallery items whose uncertainties set the ends of the sliders


def describe(searcher: Searcher) -> dict:
    """Facts for the page: the index, ends of the sliders for queries and items, and calibration curves."""
    index = searcher.index
    rows = sorted({i * len(index) // SAMPLED for i in range(SAMPLED)})
    items = sorted(float(index.uncertainty[row]) for row in rows)
    curves, calibrated = {}, None
    if calibration := searcher.calibration:
        calibrated = {name: getattr(calibration, name) for name in ("kind", "gallery", "within")}
        title, meaning = SCORES[calibration.score]
        calibrated |= {"score": calibration.score, "title": title, "meaning": meaning, "doubts": {}}
        for parts, curve in calibration.curves.items():
            if doubt := calibration.doubt(parts):
                calibrated["doubts"][str(parts)] = printable(f"{doubt}, so nothing is promised.")
            else:
                curves[str(parts)] = {
                    "limits": curve.threshold,
                    "coverage": curve.coverage,
                    "precision": curve.at_least,
                }
    return {
        "model": printable(model_name(searcher.encoder.name)),
        "identity": searcher.identity,
        "count": len(index),
        "kind": index.kind,
        "items": [items[0], items[-1]],
        "queries": query_range(searcher, rows),
        "curves": curves,
        "calibrated": calibrated,
        "fits": fits(searcher),
        "general": searcher.encoder.match_model.probabilistic,
        "weighs": searcher.composer.weighs,
        "matches": searcher.encoder.match_model.matches and not searcher.composer.trained,
    }


def model_name(name: str) -> str:
    """A model as the page names it: without the path of this machine."""
    return Path(name).resolve().name if Path(name).exists() else name


def fits(searcher: Searcher) -> dict | None:
    """The weight for all that fits, and whether the index ranks by it; None if there is no choice.

    The weight 0 is none for that: it ranks by the means alone.
    """
    weight = searcher.tolerance
    if weight is None or weight >= 1 or weight == 0 or not (searcher.can_rank_by(weight) and searcher.can_rank_by(1.0)):
        return None
    return {"weight": weight, "own": weight == searcher.own_weight}


def query_range(searcher: Searcher, rows: Sequence[int]) -> list[float]:
    """Expected uncertainties of queries of one part, which are mostly texts: the range over captions of sampled items,
    or over the items where they have none; images may have quite others than texts.
    """
    captions = [caption for row in rows for caption in list(searcher.index.item(row).get("captions") or [])[:1]]
    texts = [caption[:200] for caption in captions if caption.strip()]
    u = [] if texts else [float(searcher.index.uncertainty[row]) for row in rows]
    for start in range(0, len(texts), 8):
        u += searcher.encoder.embed(texts[start : start + 8], []).uncertainty().tolist()
    return [min(u), max(u)]
