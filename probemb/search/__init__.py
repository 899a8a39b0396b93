"""Search under CSD: indexes in memory (`index.py`) and in folders (`folder.py`), and a suitable type (`choice.py`)."""

from probemb.search.choice import Choice, choose_factory
from probemb.search.folder import load_index, require_model
from probemb.search.index import CANDIDATES, FORMS, Index, build_index, rerank, search, set_effort
from probemb.search.items import Items

__all__ = [
    "CANDIDATES",
    "FORMS",
    "Choice",
    "Index",
    "Items",
    "build_index",
    "choose_factory",
    "load_index",
    "require_model",
    "rerank",
    "search",
    "set_effort",
]
