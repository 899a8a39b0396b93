"""Pages: everything is escaped, figures stand in the page and beside it, nothing of another origin is replaced."""

import pytest
import torch
from PIL import Image

from probemb.cli.results import claim_files
from probemb.errors import UserError
from probemb.reports.figures import Chart
from probemb.reports.pages import Card, Cell, Figure, Page, Picture, Table, print_blocks, thumbnail, write_page

HOSTILE = "\"'><script>alert(1)</script>&\x00\u202e\ud800"


def figure(name: str, note: str = "") -> Figure:
    return Figure(Chart(name, x_label="x", y_label="y").line([0, 1], [0, 1], notes=[note, "b"]), note, note)


def page(*figures: Figure, text: str = "") -> Page:
    return Page(text, text, [(text, [text, list(figures)])], [(text, text, text)])


def test_text_of_unknown_origin_is_escaped(tmp_path, capsys):
    table = Table([HOSTILE], [[HOSTILE], [], [Cell(HOSTILE, "oracle")]], HOSTILE)
    card = Card(HOSTILE, [Picture("", HOSTILE), Picture("data:image/jpeg;base64,", HOSTILE)], [Cell(HOSTILE)])
    one = page(figure("a", HOSTILE), text=HOSTILE)
    one = one._replace(sections=[*one.sections, ("more", [table, [card], []]), ("nothing", ["", []])])
    write_page(tmp_path / "report.html", one, "the command")
    text = (tmp_path / "report.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)") == 21
    assert not {"\x00", "\u202e", "\ud800"} & set(text)
    assert 'class="new"' in text
    assert "nothing" not in text
    assert 'name="generator" content="the command"' in text[:400]
    print_blocks([HOSTILE, table, [card]])
    assert not {"\x00", "\u202e", "\ud800"} & set(capsys.readouterr().out)


def test_figures_lie_beside_the_page_and_those_of_an_earlier_page_go(tmp_path):
    file, folder = tmp_path / "report.html", tmp_path / "figures"
    write_page(file, page(figure("a"), figure("b")), "g")
    (folder / "mine.pdf").write_text("")
    assert {file.name for file in folder.iterdir()} == {"a.pdf", "a.png", "b.pdf", "b.png", "mine.pdf"}
    assert file.read_text().count("<svg") == 2
    assert 'href="figures/b.pdf"' in file.read_text()
    write_page(file, page(figure("c")), "g")
    assert {file.name for file in folder.iterdir()} == {"c.pdf", "c.png", "mine.pdf"}
    write_page(tmp_path / "toy.html", page(figure("a")), "g")
    assert (tmp_path / "toy-figures" / "a.png").exists()
    with pytest.raises(ValueError, match="named a"):
        write_page(tmp_path / "twice.html", page(figure("a"), figure("a")), "g")


def test_somebody_elses_figures_are_not_mixed_with_ours(tmp_path):
    (tmp_path / "figures").mkdir()
    claim_files(tmp_path, ["report.html"], "the command")
    (tmp_path / "figures" / "x.pdf").write_text("")
    with pytest.raises(UserError, match="figures holds files of another origin"):
        claim_files(tmp_path, ["report.html"], "the command")
    claim_files(tmp_path, ["results.json"], "the command")
    write_page(tmp_path / "report.html", page(), "the command")
    claim_files(tmp_path, ["report.html"], "the command")


def test_thumbnails_are_small():
    picture = Image.new("RGB", (4000, 1000), "red")
    assert thumbnail(picture).startswith("data:image/jpeg;base64,")
    assert picture.size == (208, 52)
    assert thumbnail(torch.zeros(6, 5)) == ""
