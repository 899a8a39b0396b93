"""Pages: everything is escaped, figures stand in the page and beside it, nothing of another origin is replaced."""

import pytest
import torch
from PIL import Image

from probemb.cli.results import claim_files
from probemb.errors import UserError
from probemb.reports.figures import Chart
from probemb.reports.pages import thumbnail, write_page

HOSTILE = "\"'><script>alert(1)</script>&\x00\u202e\ud800"
TEMPLATE = """
{% extends "base.html" %}
{% import "parts.html" as parts %}
{% block title %}{{ name }}{% endblock %}
{% block content %}
<h1>{{ name }}</h1><p title="{{ name }}">{{ 0.1234 | percent }} {{ -0.5 | signed }} {{ 1e-5 | number }}</p>
{{ parts.tiles([(name, name, name)]) }}
{{ parts.picture({"src": "data:image/jpeg;base64,", "note": name, "kind": "right"}) }}
{% for chart in charts %}{{ figure(chart) }}{% endfor %}
{% endblock %}
"""


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "templates" / "page.html"
    path.parent.mkdir()
    path.write_text(TEMPLATE)
    return path


def chart(name: str) -> Chart:
    return Chart(name, x_label="x", y_label="y").line([0, 1], [0, 1], notes=[HOSTILE, "b"])


def test_text_of_unknown_origin_is_escaped(tmp_path, template):
    write_page(tmp_path / "report.html", template, "the command", name=HOSTILE, charts=[chart("a")])
    text = (tmp_path / "report.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)") == 9
    assert not {"\x00", "\u202e", "\ud800"} & set(text)
    assert "12.34 \N{MINUS SIGN}0.50 1.0e-05" in text
    assert 'name="generator" content="the command"' in text[:400]


def test_figures_lie_beside_the_page_and_those_of_an_earlier_page_go(tmp_path, template):
    page, folder = tmp_path / "report.html", tmp_path / "figures"
    write_page(page, template, "g", name="", charts=[chart("a"), chart("b")])
    (folder / "mine.pdf").write_text("")
    assert {file.name for file in folder.iterdir()} == {"a.pdf", "a.png", "b.pdf", "b.png", "mine.pdf"}
    assert page.read_text().count("<svg") == 2
    assert 'href="figures/b.pdf"' in page.read_text()
    write_page(page, template, "g", name="", charts=[chart("c")])
    assert {file.name for file in folder.iterdir()} == {"c.pdf", "c.png", "mine.pdf"}
    write_page(tmp_path / "toy.html", template, "g", name="", charts=[chart("a")])
    assert (tmp_path / "toy-figures" / "a.png").exists()


def test_somebody_elses_figures_are_not_mixed_with_ours(tmp_path, template):
    (tmp_path / "figures").mkdir()
    claim_files(tmp_path, ["report.html"], "the command")
    (tmp_path / "figures" / "x.pdf").write_text("")
    with pytest.raises(UserError, match="figures holds files of another origin"):
        claim_files(tmp_path, ["report.html"], "the command")
    claim_files(tmp_path, ["results.json"], "the command")
    write_page(tmp_path / "report.html", template, "the command", name="", charts=[])
    claim_files(tmp_path, ["report.html"], "the command")


def test_thumbnails_are_small(tmp_path):
    picture = Image.new("RGB", (4000, 1000), "red")
    assert thumbnail(picture).startswith("data:image/jpeg;base64,")
    assert picture.size == (208, 52)
    assert thumbnail(torch.zeros(6, 5)) == ""
