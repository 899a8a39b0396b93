"""One result of each command: each runs once on one small world and one small model, and its tests look at that."""

import io
import json
from contextlib import redirect_stdout
from html.parser import HTMLParser

import pytest

from probemb.errors import UserError
from probemb.models import create_model, save_model


class Page(HTMLParser):
    """A report: checks that its elements are closed in order and that nothing runs; collects what it links to."""

    def __init__(self, text):
        super().__init__()
        self.text, self.open, self.elsewhere, self.count = text, [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag != "script"
        self.count[tag] = self.count.get(tag, 0) + 1
        for name, value in attributes:
            assert not name.startswith("on")
            if name in ("src", "href") and not value.startswith(("data:image/jpeg;base64,", "#")):
                self.elsewhere.append(value)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


class Result:
    """Files and output of a command."""

    def __init__(self, out, told=""):
        self.out, self.told = out, told
        self.json = json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)
        self.page = Page((out / "report.html").read_text())
        figures = {f"figures/{file.name}" for file in out.glob("figures/*")}
        assert figures == set(self.page.elsewhere)  # a page needs nothing else


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """run(main, model, data, *options) -> Result; a command that is refused writes nothing."""

    def call(main, model, data, *options):
        out, told = tmp_path_factory.mktemp("result") / "out", io.StringIO()
        words = [word for pair in (("--model", model), ("--data", data)) for word in map(str, pair) if pair[1]]
        try:
            with redirect_stdout(told):
                assert main([*words, "--out", str(out), *map(str, options)]) == 0
        except UserError:
            assert not out.exists()
            raise
        return Result(out, told.getvalue())

    return call


@pytest.fixture(scope="session")
def point_model(tmp_path_factory):
    """A model without variances, which ranks by its means."""
    folder = tmp_path_factory.mktemp("point") / "model"
    save_model(create_model("ViT-Micro-32", probabilistic=False, objective="clip"), folder)
    return folder
