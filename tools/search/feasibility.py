"""Feasibility of a combination: the share of random combinations of the index's own items that go together less well.

A query of texts and images is compared with combinations of as many captions and pictures, with the same weights, each
of another item of the index. The items are evenly spread over the index, and embedded when the first query needs them.
Parts that are taken away do not count. K parts, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

from probemb.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.gaussian import Gaussian
    from tools.search.composing import QueryComposer
    from tools.search.encoding import QueryEncoder
    from tools.search.query import Searcher

ITEMS = 32  # whose captions and pictures are embedded
COMBINATIONS = 500
REMEMBERED = 64  # kinds of queries whose random combinations are not composed again
FEWEST = 12  # items that make a comparison; more than a query has parts
CAPTION = 200  # characters of a caption that are read


class Feasibility:
    """Compares queries with combinations of the items of a searcher's index; thread-safe."""

    def __init__(self, searcher: Searcher):
        self.searcher = searcher
        self._pools: dict[str, Pool] = {}
        self._reading, self._composing = Lock(), Lock()  # one at a time: memory and cores stay free for searches
        self._random = lru_cache(REMEMBERED)(self._compose_random)

    def __call__(self, parts: Gaussian, kinds: Sequence[str], weights: Sequence[float]) -> dict | None:
        """Feasibility of the parts (K, D) together, as plain JSON types; None for fewer than two that are wanted.

        Returns:
            "share": of random combinations that go together less well, 0 to 1, or None if it is not known; "by": the
            measure; "combinations": how many; "says": a sentence.
        """
        wanted = [i for i, weight in enumerate(weights) if weight > 0]
        if len(wanted) < 2:
            return None
        composer = self.searcher.composer
        if composer.measure is None:
            return unknown("This model has no variances that say how well the parts of a query go together.")
        kinds, weights = [kinds[i] for i in wanted], [weights[i] for i in wanted]
        random = self._random(tuple(kinds), tuple(weights))
        if random is None:
            names = " and ".join({"text": "captions", "image": "pictures"}[kind] for kind in sorted(set(kinds)))
            return unknown(f"Too few {names} of the index can be read to say how feasible this combination is.")
        own = agreement(composer, parts[wanted][:, None], weights)
        share = float((random < own).double().mean() + 0.5 * (random == own).double().mean())
        return {"share": share, "by": composer.measure, "combinations": COMBINATIONS, "says": sentence(share)}

    def _compose_random(self, kinds: tuple[str, ...], weights: tuple[float, ...]) -> Tensor | None:
        """The measure of random combinations, (COMBINATIONS,); None if too few items can be read."""
        pools = {kind: self.pool(kind) for kind in set(kinds)}
        usable = sorted(set.intersection(*(set(pool.place) for pool in pools.values())))
        if len(usable) < FEWEST:
            return None
        with self._composing:
            return agreement(self.searcher.composer, combine(pools, usable, kinds), weights)

    def pool(self, kind: str) -> Pool:
        """Embedded captions ("text") or pictures ("image") of the sampled items."""
        with self._reading:
            if kind not in self._pools:
                index = self.searcher.index
                rows = sorted({i * len(index) // ITEMS for i in range(ITEMS)})
                read = read_captions if kind == "text" else read_pictures
                self._pools[kind] = read(self.searcher, rows)
            return self._pools[kind]


class Pool:
    """Embedded parts of items: `place` says which one of `parts` (P, D) an item has, by its row."""

    def __init__(self, parts: Gaussian | None, rows: Sequence[int]):
        self.parts, self.place = parts, {row: place for place, row in enumerate(rows)}


def read_captions(searcher: Searcher, rows: Sequence[int]) -> Pool:
    """The first captions of items, embedded."""
    found = {}
    for row in rows:
        captions = list(searcher.index.item(row).get("captions") or [])
        if captions and captions[0].strip():
            found[row] = captions[0].strip()[:CAPTION]
    return Pool(searcher.encoder.embed_texts(list(found.values())) if found else None, list(found))


def read_pictures(searcher: Searcher, rows: Sequence[int]) -> Pool:
    """The pictures of items that lie on this machine and can be decoded, embedded."""
    import torch

    from probemb.data.remote.sources import is_remote
    from tools.search.wish import QueryImage, decode_query

    encoder: QueryEncoder = searcher.encoder
    found = {}
    for row in rows:
        if is_remote(searcher.index.item(row).get("shard") or ""):
            continue
        try:
            image = decode_query(QueryImage(str(row), searcher.picture(row)))
        except (LookupError, UserError):
            continue
        found[row] = encoder.loaded.transforms.evaluate(image)
    return Pool(encoder.embed_pixels(torch.stack(list(found.values()))) if found else None, list(found))


def combine(pools: dict[str, Pool], rows: Sequence[int], kinds: Sequence[str]) -> Gaussian:
    """Random combinations of parts of these kinds, each of another one of the items: (K, COMBINATIONS, D)."""
    import torch

    from probemb.gaussian import Gaussian

    draw = torch.Generator().manual_seed(0)
    drawn = torch.rand(COMBINATIONS, len(rows), generator=draw).argsort(1)[:, : len(kinds)].T.tolist()
    several = []
    for kind, chosen in zip(kinds, drawn):
        pool = pools[kind]
        several.append(pool.parts[torch.tensor([pool.place[rows[one]] for one in chosen])])
    return Gaussian.stack(several)


def agreement(composer: QueryComposer, parts: Gaussian, weights: Sequence[float]) -> Tensor:
    """The composer's measure of parts (K, N, D), (N,)."""
    plain = all(weight == 1 for weight in weights)
    return composer.agreement(composer(parts, None if plain else weights))


def sentence(share: float) -> str:
    """A share for people."""
    percent = min(99, max(1, round(100 * share)))
    if share < 0.005 or share > 0.995:
        compared = "worse than nearly all" if share < 0.5 else "better than nearly all"
    else:
        compared = f"better than {percent} % of"
    return f"The parts go together {compared} random combinations of what the index holds."


def unknown(why: str) -> dict:
    """The answer where nothing can be said."""
    return {"share": None, "by": None, "combinations": 0, "says": why}
