"""What is more general or more specific than a query: tools.search by inclusion, its command and its page."""

import json
from dataclasses import replace

import pytest

from probemb import Gaussian
from probemb.distances import inclusion
from probemb.errors import UserError
from tests.searching import N, gallery, searcher  # noqa: F401 - fixtures
from tests.searchpage import CARDS, SETTLED, STATUS, browser, open_page, page, port, post, search_for  # noqa: F401
from tests.world import run_folder  # noqa: F401 - fixtures
from tools.build_index import main as build
from tools.search.command import main, open_searcher, parse
from tools.search.query import NEAR
from tools.search.web.about import describe
from tools.search.wish import Wish

QUERY = "a red circle"


def truth(gallery, searcher, sign):  # noqa: F811
    """Rows that include the query (+1) or lie in it (-1), the most so first; the gallery has one variance an item."""
    query = searcher.encoder.embed([QUERY], [])[0]
    log_var = (query.uncertainty().double() / searcher.index.dim).log().expand(1, searcher.index.dim)
    items = Gaussian(gallery.embedded.mean.double(), gallery.embedded.log_var.double())
    values = sign * inclusion(Gaussian(query.mean[None].double(), log_var), items)[0]
    return [i for i in values.argsort(descending=True).tolist() if values[i] > 0], sign * values


@pytest.mark.parametrize(("more", "sign"), [("general", 1), ("specific", -1)])
def test_ranks_by_inclusion(gallery, searcher, more, sign):  # noqa: F811
    want, values = truth(gallery, searcher, sign)
    answer = searcher.answer(Wish([QUERY], more=more, top=N))
    assert [one["row"] for one in answer["results"]] == want
    assert (answer["more"], answer["looked_at"], N) == (more, N, min(N, NEAR))
    u = answer["query"]["uncertainty"]
    closest = {one["row"]: one for one in searcher.answer(Wish([QUERY], top=N))["results"]}
    for one in answer["results"]:
        assert one["inclusion"] == pytest.approx(float(values[one["row"]]), rel=1e-3, abs=1e-3)
        assert (one["uncertainty"] > u) == (more == "general")
        assert one["distance"] == pytest.approx(closest[one["row"]]["distance"], abs=1e-4)
        assert one["match"] == pytest.approx(closest[one["row"]]["match"], rel=1e-3)
    both = [len(searcher.answer(Wish([QUERY], more=one, top=N))["results"]) for one in ("general", "specific")]
    assert sum(both) == N


def test_of_an_index_of_means_and_an_approximate_one(gallery, searcher, tmp_path):  # noqa: F811
    want, _ = truth(gallery, searcher, -1)
    for name, options in {"mean": ["--form", "mean"], "graph": ["--factory", "HNSW8"]}.items():
        build(["--embeddings", str(gallery.images.parent / "embedded"), "--out", str(tmp_path / name), *options])
        other = open_searcher(parse(["x", "--index", str(tmp_path / name), "--device", "cpu"]))
        answer = other.answer(Wish([QUERY], more="specific", top=N))
        assert [one["row"] for one in answer["results"]] == want, name


def test_limits_and_what_does_not_go_together(searcher):  # noqa: F811
    wish = {"texts": [QUERY], "more": "specific", "top": N}
    every = searcher.answer(Wish(**wish))["results"]
    most = sorted(one["uncertainty"] for one in every)[len(every) // 2]
    some = searcher.answer(Wish(**wish, max_item_uncertainty=most))["results"]
    assert [one["row"] for one in some] == [one["row"] for one in every if one["uncertainty"] <= most]
    with pytest.raises(UserError, match="ranked by inclusion, not by the weight"):
        searcher.answer(Wish(**wish, fits=False))
    with pytest.raises(UserError, match="not of what is more specific"):
        searcher.answer(Wish(**wish, min_precision=0.5))


def test_a_model_of_points_knows_nothing_of_it(searcher, monkeypatch):  # noqa: F811
    points = replace(searcher.encoder.match_model, probabilistic=False)
    monkeypatch.setattr(searcher.encoder, "match_model", points)
    with pytest.raises(UserError, match="predicts no variances"):
        searcher.answer(Wish([QUERY], more="general"))


def test_the_page_knows_of_a_model_without_match_probability(searcher, monkeypatch):  # noqa: F811
    assert describe(searcher)["matches"]
    without = replace(searcher.encoder.match_model, form="none")
    monkeypatch.setattr(searcher.encoder, "match_model", without)
    assert not describe(searcher)["matches"]
    assert all(one["match"] is None for one in searcher.answer(Wish([QUERY]))["results"])


def test_command(gallery, capsys):  # noqa: F811
    assert main([QUERY, "--index", str(gallery.images), "--more", "general", "--top", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["results"]) == 3
    assert main([QUERY, "--index", str(gallery.images), "--more", "general", "--top", "3"]) == 0
    table = capsys.readouterr().out
    assert f"more general than the query, by inclusion, among the {N} closest" in table
    assert "inclusion" in table.replace("by inclusion", "")
    assert f"{answer['results'][0]['inclusion']:.4g}" in table


def test_form(port):  # noqa: F811
    status, answer = post(port, [("text", QUERY), ("more", "general")])
    assert (status, answer["more"]) == (200, "general")
    status, answer = post(port, [("text", QUERY), ("more", "vague")])
    assert (status, answer["error"]) == (400, "more is 'vague', neither general nor specific.")


def test_page(page, port, gallery, searcher, tmp_path):  # noqa: F811
    search_for(page, QUERY)
    shown = f"{CARDS}.map(c => c.querySelector('.key').textContent)"

    def wait_for(wish):
        want = [one["key"] for one in searcher.answer(wish)["results"]]
        page.wait(f"{SETTLED} && JSON.stringify({shown}) === {json.dumps(json.dumps(want, separators=(',', ':')))}")
        return want

    for more, key in (("general", "ArrowRight"), ("specific", "ArrowRight"), (None, "ArrowRight")):
        page.run("document.querySelector('#more-than input:checked').focus()")
        page.press(key)
        wait_for(Wish([QUERY], top=24, more=more))
        assert page.run("location.hash.includes('more=')") == (more is not None)
    row = searcher.answer(Wish([QUERY], top=24))["results"][1]["row"]
    like = [searcher.stored_image(row)]
    for place, more in ((2, "general"), (3, "specific")):
        page.open("about:blank")
        open_page(page, f"http://127.0.0.1:{port}/#text=a+red+circle")
        page.wait(f"{SETTLED} && {CARDS}.length === 24")
        page.click(f".card:nth-child(2) .last button:nth-child({place})")
        found = wait_for(Wish(images=like, top=24, more=more))
        assert page.run("document.querySelector('#more-than input:checked').value") == more
        if found:
            assert page.run(f"{CARDS}.every(c => /inclusion/.test(c.querySelector('.numbers').textContent))")
            assert "Inclusion is" in page.run("document.querySelector('#legend').textContent")
        else:
            assert f"Nothing is more {more} than the query" in page.run(f"{STATUS}.textContent")
        page.screenshot(tmp_path / f"{more}.png")
        address = page.run("location.href")
        page.open("about:blank")
        open_page(page, address)
        wait_for(Wish(images=like, top=24, more=more))
