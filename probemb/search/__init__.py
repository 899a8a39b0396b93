"""Search under CSD: indexes in memory (`index.py`) and in folders (`folder.py`), other weights of the variances
(`reranking.py`), and a suitable type of index (`choice.py`).
"""

from probemb.search.choice import Choice, choose_factory, refuse_small_gallery
from probemb.search.folder import load_index, require_model
from probemb.search.index import CANDIDATES, Index, build_index, search, set_effort
from probemb.search.items import Items
from probemb.search.penalty import FORMS
from probemb.search.reranking import is_exact, rerank, search_weighted

__all__ = [
    "CANDIDATES",
    "FORMS",
    "Choice",
    "Index",
    "Items",
    "build_index",
    "choose_factory",
    "is_exact",
    "load_index",
    "refuse_small_gallery",
    "require_model",
    "rerank",
    "search",
    "search_weighted",
    "set_effort",
]
