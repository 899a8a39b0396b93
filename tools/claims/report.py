"""The page of `tools.claims`: a table, plots and verdicts for every claim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from probemb.reports.pages import write_page
from tools.claims.study import Study
from tools.claims.verdicts import Found


def report(path: Path, study: Study, claims: Sequence[dict], found: Found, told: str, generator: str) -> None:
    """Write the page; `told` says what was trained."""
    about = {"title": study.title, "reading": study.reading, "told": told}
    claims_with_charts = list(zip(claims, study.charts(found, claims), strict=True))
    write_page(path, Path(__file__).with_name("report.html"), generator, claims=claims_with_charts, **about)
