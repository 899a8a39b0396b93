"""Pages: everything is escaped, figures stand in the page and beside it, nothing of another origin is replaced."""

import pytest

from probemb.reports.figures import Chart
from probemb.reports.pages import Card, Cell, Figure, Page, Picture, Table, print_page, write_page
from probemb.reports.text import web_link

HOSTILE = "\"'><script>alert(1)</script>&\x00\u202e\ud800"


def figure(name: str, note: str = "") -> Figure:
    return Figure(Chart(name, x_label="x", y_label="y").line([0, 1], [0, 1], notes=[note, "b"]), note, note)


def page(*figures: Figure, text: str = "") -> Page:
    return Page(text, text, [(text, [text, list(figures)])])


def test_text_of_unknown_origin_is_escaped(tmp_path, capsys):
    table = Table([HOSTILE], [[HOSTILE], [], [Cell(HOSTILE, "oracle")]], HOSTILE)
    card = Card(HOSTILE, [Picture("", HOSTILE), Picture("data:image/jpeg;base64,", HOSTILE)], [Cell(HOSTILE)])
    one = page(figure("a", HOSTILE), text=HOSTILE)
    one = one._replace(sections=[*one.sections, ("more", [table, [card], []]), ("nothing", ["", []])])
    write_page(tmp_path / "report.html", one, "the command")
    text = (tmp_path / "report.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)") == 18
    assert not {"\x00", "\u202e", "\ud800"} & set(text)
    assert 'class="new"' in text
    assert "nothing" not in text
    assert 'name="generator" content="the command"' in text[:400]
    print_page(one)
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


@pytest.mark.parametrize(
    ("address", "fine"),
    [
        ("https://photos.example/a.jpg?b=1&c=2#d", True), ("HTTP://photos.example:8080/ä.jpg", True),
        ("javascript:alert(1)", False), ("data:text/html,x", False), ("//x.example/x", False), ("file:///etc", False),
        ("https://bank.example@evil.example/", False), ("https://bank.example\\@evil.example/", False),
        ("https://x.example/\u202egnp.exe", False), ("https://x.example/a b", False), ("https://", False), (7, False),
        ("https://x.example/\"><script>", False), ("https://[::1", False), ("https://x:99999/", False), (None, False),
        ("https://x.example/" + "a" * 2_000, False), ("https://x.example/\n", False),
    ],
)  # fmt: skip
def test_addresses_that_may_become_links(address, fine):
    assert web_link(address) == (address if fine else None)
