"""The links of the documentation lead somewhere, and the reference is what the dataclasses say."""

import re
from pathlib import Path

import pytest

from tools import reference

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def without_code(page):
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The names that a Markdown page's headings get where repositories are read."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), flags=re.MULTILINE)
    words = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", one).replace(" ", "-") for one in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)) if "://" not in link]
    lost = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []
    assert links or page.name not in ("README.md", "results.md")


def test_the_reference_is_what_the_dataclasses_say():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run `python -m tools.reference`"
