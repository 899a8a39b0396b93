"""Search under CSD: indexes in memory, and the type that suits a gallery (`index.py`); index folders (`folder.py`)."""

from probemb.search.folder import load_index
from probemb.search.index import (
    CANDIDATES,
    Choice,
    Index,
    build_index,
    choose_factory,
    is_exact,
    refuse_small_gallery,
    rerank,
    search,
    search_weighted,
    set_effort,
)

__all__ = ["CANDIDATES", "Choice", "Index", "build_index", "choose_factory", "is_exact", "load_index"]
__all__ += ["refuse_small_gallery", "rerank", "search", "search_weighted", "set_effort"]
