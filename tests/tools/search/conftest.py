"""Fixtures of the tests of search: a gallery, its searcher, its page."""

from tests.searching import gallery, searcher  # noqa: F401
from tests.searchpage import browser, page, port  # noqa: F401
