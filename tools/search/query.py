"""Answer queries: compose texts and images into one normal, find the closest items, refuse uncertain queries."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from probemb.errors import UserError
from tools.search.feasibility import Feasibility
from tools.search.limits import find_limits, is_above
from tools.search.scoring import SCORES, candidate_count, query_scores, stored_means
from tools.search.wish import QueryImage, StoredImage, Wish, check_wish, part_weights

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.compose import Product
    from probemb.gaussian import Gaussian
    from probemb.search import Index
    from tools.search.calibration import Calibration
    from tools.search.composing import QueryComposer
    from tools.search.encoding import QueryEncoder

NEAR = 100  # closest items that are ranked by inclusion, or 5 times the results
MAX_NEIGHBOURS = 2_048  # among which certain enough items are searched; FAISS' limit on a GPU
SAMPLE = 2_048  # items that stand for all which a search does not return, in the match


class Found(NamedTuple):
    """A result: row in the gallery, CSD with the weighted variance, uncertainty, and the inclusion of the query in it.

    The inclusion is None unless results are ranked by it.
    """

    row: int
    distance: float
    uncertainty: float
    inclusion: float | None = None


class Searcher:
    """An index and the model that made it; thread-safe.

    Args:
        candidates: least number that is re-ranked with an index of means; by default 10 times the results.
        tolerance: weight of the gallery's variances for all that fits; by default the index' own or the calibrated one.
    """

    def __init__(
        self,
        index: Index,
        encoder: QueryEncoder,
        calibration: Calibration | None = None,
        candidates: int | None = None,
        tolerance: float | None = None,
    ):
        self.index, self.encoder, self.calibration = index, encoder, calibration
        self.identity = index.identity or uuid4().hex[:16]  # of pictures' addresses
        self.candidates = candidates
        if tolerance is None:
            tolerance = index.weight if index.form == "tolerance" else calibration and calibration.tolerance
        self.tolerance = tolerance
        self.feasibility = Feasibility(self)
        self._sample = _even_sample(index)
        on_gpu = any("Gpu" in type(part).__name__ for part in index.parts)
        self._one_search = Lock() if on_gpu else contextlib.nullcontext()  # FAISS' GPU resources serve one thread

    def answer(self, wish: Wish) -> dict:
        """The answer as plain JSON types (docs/search.md); its captions and keys are untrusted text.

        Raises:
            UserError: as `QueryEncoder.embed`, or numbers out of range.
        """
        from probemb.models.inputs import unknown_words

        started = time.perf_counter()
        check_wish(wish)
        weights = part_weights(wish)
        weight = self.weight(wish.fits)
        if wish.more is not None:
            weight = self.check_more(wish)
        if wish.min_precision is not None and weight != self.own_weight:
            raise UserError(
                "The calibration of this index is of its own ranking, not of this one.",
                "Use --max-uncertainty instead.",
            )
        if wish.min_precision is not None and any(one != 1 for one in weights):
            raise UserError(
                "The calibration of this index is of queries without weights and without parts to leave out.",
                "Use --max-uncertainty instead.",
            )
        parts = self.encoder.embed(wish.texts, wish.images)
        kinds = ["text"] * (len(parts) - len(wish.images)) + ["image"] * len(wish.images)
        name = self.calibration.score if self.calibration else "u"
        limits = find_limits(self.calibration, name, kinds, wish)
        query, log_normaliser = self.compose(parts, weights)
        u = float(query.uncertainty())
        values = {"u": u}
        refused = is_above(values, limits)
        if name != "u" and not refused:  # needs a search
            scores = self.scores(query[None])
            if name not in scores:
                raise UserError(
                    f"The calibration of this index is by {name}, which it cannot compute.", "Calibrate it again."
                )
            values[name] = float(scores[name])
            refused = is_above(values, limits)
        found, looked_at = [], {}
        if wish.more is not None and not refused:
            found, looked_at = self.more(query[None], wish)
        elif not refused:
            found, looked_at = self.closest(query[None], wish.top, wish.max_item_uncertainty, weight)
        return {
            "query": {
                "texts": [text.strip() for text in wish.texts if text.strip()],
                "images": len(wish.images),
                "uncertainty": u,
                "parts": [
                    {"kind": kind, "uncertainty": part, "weight": one}
                    for kind, part, one in zip(kinds, parts.uncertainty().tolist(), weights)
                ],
                "composer": self.composer.name,
                "log_normaliser": float(log_normaliser),
                "unknown_words": unknown_words(self.encoder.loaded.tokenizer, wish.texts),
            },
            "feasibility": self.feasibility(parts, kinds, weights),
            "weight": weight,
            "more": wish.more,
            "limit": limits.get("u"),
            "score": {"name": name, "title": SCORES[name][0], "value": values.get(name), "limit": limits.get(name)},
            "refused": refused,
            "results": self.describe(found, self.matches(query, looked_at, kinds)),
            "looked_at": len(looked_at),
            "gallery": len(self.index),
            "seconds": round(time.perf_counter() - started, 4),
        }

    @property
    def composer(self) -> QueryComposer:
        """The composer that makes one query of several parts."""
        return self.encoder.composer

    def compose(self, parts: Gaussian, weights: Sequence[float] | None = None) -> Product:
        """Parts (K, ..., D) as one query with its mean at unit length, as the gallery's. Raises UserError."""
        from probemb.compose import Product, as_query

        plain = weights is None or all(weight == 1 for weight in weights)
        if plain and len(parts) == 1:
            return Product(parts[0], parts.mean.new_zeros(parts.shape[1:-1]))
        product = self.composer(parts, None if plain else weights)
        return Product(as_query(product.gaussian), product.log_normaliser)

    @property
    def own_weight(self) -> float:
        """The weight of the gallery's variances in the index' own ranking; 1 is CSD."""
        return 1.0 if self.index.form == "mean" else self.index.weight

    def weight(self, fits: bool | None) -> float:
        """The weight for a wish. Raises UserError: it is not known, or the index cannot rank by it."""
        weight = self.own_weight if fits is None else self.tolerance if fits else 1.0
        if weight is None:
            raise UserError(
                "It is not known which weight of the variances finds all that fits.",
                "Give one with --tolerance, such as -1, or calibrate on data whose true matches are all known.",
            )
        if not self.can_rank_by(weight):
            raise UserError(
                f"This index ranks with the variances times {self.own_weight:g}, and cannot with {weight:g}.",
                f"Build another one with `python -m tools.build_index --tolerance {weight:g}`.",
            )
        return weight

    def can_rank_by(self, weight: float) -> bool:
        """True if the index can rank by a weight of the variances."""
        from probemb.search import is_exact

        return weight == self.own_weight or self.index.form == "mean" or is_exact(self.index)

    def scores(self, query: Gaussian) -> dict[str, Tensor]:
        """Every score of queries (Q, D) in `tools.search.scoring`, (Q,) each, as queries and calibrations use them."""
        k = candidate_count(self.index)
        with self._one_search:
            distances, rows = self.look(query, k, self.own_weight)
        return query_scores(self.index, query, distances, rows, self.encoder.match_model)

    def look(self, query: Gaussian, k: int, weight: float) -> tuple[Tensor, Tensor]:
        """Distances with a weight of the items' variances, CSD for 1, and rows of the k closest items."""
        from probemb.search import rerank, search_weighted
        from probemb.search.index import CANDIDATES

        if self.index.form != "mean":
            return search_weighted(self.index, query, k, weight)
        candidates = max(k, self.candidates or min(CANDIDATES * k, MAX_NEIGHBOURS))
        return rerank(self.index, query, k, candidates, weight)

    def closest(
        self, query: Gaussian, top: int, max_uncertainty: float | None, weight: float
    ) -> tuple[list[Found], dict[int, float]]:
        """At most `top` items, and the CSD of all that were looked at, by row; the query is (1, D)."""
        k = min(top, len(self.index))
        while True:
            with self._one_search:
                distances, rows = self.look(query, k, weight)
            rows = rows[0].tolist()
            u = [float(self.index.uncertainty[row]) if row >= 0 else 0.0 for row in rows]
            found = [
                Found(row, distance, u_row)
                for row, distance, u_row in zip(rows, distances[0].tolist(), u)
                if row >= 0 and (max_uncertainty is None or u_row <= max_uncertainty)
            ]
            if max_uncertainty is None or len(found) >= top or k >= min(len(self.index), MAX_NEIGHBOURS):
                looked = zip(rows, distances[0].tolist(), u)
                return found[:top], {
                    row: distance + (1 - weight) * u_row for row, distance, u_row in looked if row >= 0
                }
            k = min(4 * k, len(self.index), MAX_NEIGHBOURS)

    def check_more(self, wish: Wish) -> float:
        """The weight of the variances in the distances of results that are more general or more specific: CSD's.

        Raises:
            UserError: the model has no variances, or the wish is for another ranking at once.
        """
        if not self.encoder.match_model.probabilistic:
            raise UserError(
                "The model of this index predicts no variances, so nothing is more general than something else.",
                "Search with an index of a probabilistic model.",
            )
        if wish.fits is not None:
            raise UserError(
                f"What is more {wish.more} is ranked by inclusion, not by the weight of --fits or --no-fits.",
                "Ask for one of them.",
            )
        if wish.min_precision is not None:
            raise UserError(
                f"The calibration of this index is of its own ranking, not of what is more {wish.more}.",
                "Use --max-uncertainty instead.",
            )
        return 1.0

    def more(self, query: Gaussian, wish: Wish) -> tuple[list[Found], dict[int, float]]:
        """The items that include the query (1, D), or lie in it, and the CSD of the closest, looked at, by row.

        Inclusion compares widths more than places, so it ranks the NEAR closest items only, by their means where the
        index can.
        """
        from probemb.search.generality import inclusion_of_spheres

        k = min(max(NEAR, 5 * wish.top), MAX_NEIGHBOURS, len(self.index))
        weight = 0.0 if self.can_rank_by(0.0) else self.own_weight
        with self._one_search:
            distances, rows = self.look(query, k, weight)
        distances, rows = (x[0][rows[0] >= 0] for x in (distances, rows))
        u, u_query = self.index.uncertainty[rows].double(), query.uncertainty().double().cpu()
        apart = (distances.double() - weight * u - u_query).clamp_min(0)
        inclusion = inclusion_of_spheres(apart, u_query, u, self.index.dim)
        sign = 1 if wish.more == "general" else -1
        order = (sign * inclusion).argsort(descending=True, stable=True)
        most = float("inf") if wish.max_item_uncertainty is None else wish.max_item_uncertainty
        kept = [i for i in order.tolist() if sign * inclusion[i] > 0 and u[i] <= most][: wish.top]
        csd = apart + u_query + u
        found = [Found(int(rows[i]), float(csd[i]), float(u[i]), float(inclusion[i])) for i in kept]
        return found, dict(zip(rows.tolist(), csd.tolist()))

    def matches(self, query: Gaussian, csd: dict[int, float], kinds: Sequence[str]) -> dict[int, float]:
        """The probability that an item matches the query (D,) if exactly one item of the gallery does, by row.

        Empty where it is unknown. The model knows the odds of an image and a caption: not if a part of the query is of
        the gallery's kind, nor if it learned to compose. And all other items have to be known: those that a search does
        not return are estimated by an even sample of the index, if it gives vectors back.

        Args:
            csd: of items that were looked at, by row.
        """
        import torch

        model = self.encoder.match_model
        if not csd or not model.matches or self._sample is None or self.index.kind in kinds or self.composer.trained:
            return {}

        def log_odds(csd: Tensor, rows: Tensor) -> Tensor:
            u = query.uncertainty().double().cpu() + self.index.uncertainty[rows].double()
            return model.log_odds_at(csd.double(), u, self.index.dim)

        rows, (others, means) = torch.tensor(list(csd)), self._sample
        seen = log_odds(torch.tensor(list(csd.values())), rows)
        total, unseen = seen.logsumexp(0), ~torch.isin(others, rows)
        if unseen.any():
            others, apart = others[unseen], (means[unseen] - query.mean.cpu()).square().sum(1)
            rest = log_odds(apart + query.uncertainty().cpu() + self.index.uncertainty[others], others)
            total = total.logaddexp(rest.logsumexp(0) + math.log((len(self.index) - len(rows)) / len(others)))
        return dict(zip(csd, (seen - total).exp().tolist()))

    def describe(self, found: Sequence[Found], matches: dict[int, float]) -> list[dict]:
        """Results with the metadata of their items, and with their `matches`, None where these are unknown."""
        several = []
        for place, one in enumerate(found):
            item = self.index.item(one.row)
            result = {"rank": place + 1, "match": matches.get(one.row), **one._asdict(), "key": item["key"]}
            result |= {"captions": list(item.get("captions") or []), "shard": item.get("shard"), "url": item.get("url")}
            several.append(result)
        return several

    def stored_image(self, row: int) -> StoredImage:
        """The picture of an item as a part of a query. Raises UserError: there is no such item."""
        if row >= len(self.index):
            raise UserError(f"The index has {len(self.index):,} items, and no item {row}.", "Search again.")

        def read() -> QueryImage:
            try:
                return QueryImage(self.index.item(row)["key"], self.picture(row))
            except LookupError as error:
                remedy = "Put the shards back where they were indexed."
                raise UserError(f"The picture to search with is not there: {error}.", remedy) from None

        return StoredImage(read)

    def picture(self, row: int) -> bytes:
        """The encoded image of an item from its shard. Raises LookupError: it is not available."""
        from tools.search.pictures import read_picture

        item = self.index.item(row)
        if not item.get("shard") or item.get("offset") is None:
            raise LookupError("the index has no picture of this item")
        return read_picture(item["shard"], int(item["offset"]), int(item["size"]))

    def fetched_picture(self, row: int) -> bytes | None:
        """`picture` of an item in a remote shard, else None. Raises LookupError."""
        from probemb.data.remote.sources import is_remote

        return self.picture(row) if is_remote(self.index.item(row).get("shard") or "") else None


def _even_sample(index: Index) -> tuple[Tensor, Tensor] | None:
    """Rows of at most SAMPLE items, evenly spaced, and their means (S, D); None if the index gives no vectors back."""
    import torch

    rows = torch.linspace(0, len(index) - 1, min(len(index), SAMPLE), dtype=torch.float64).round().long()
    means = stored_means(index, rows[None])
    return None if means is None else (rows, means[0])
