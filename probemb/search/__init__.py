"""Search under CSD: indexes in memory (`index.py`) and in folders (`folder.py`), and a suitable type (`choice.py`)."""

from probemb.search.choice import Choice, choose_factory, refuse_small_gallery
from probemb.search.folder import load_index
from probemb.search.index import CANDIDATES, Index, build_index, is_exact, rerank, search, search_weighted, set_effort

__all__ = [
    "CANDIDATES",
    "Choice",
    "Index",
    "build_index",
    "choose_factory",
    "is_exact",
    "load_index",
    "refuse_small_gallery",
    "rerank",
    "search",
    "search_weighted",
    "set_effort",
]
