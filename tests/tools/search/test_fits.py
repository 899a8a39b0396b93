"""All that fits instead of the closest: a weight of the variances in tools.search, its page and its calibration."""

import json

import pytest

from probemb.errors import UserError
from probemb.evaluation.scores import tolerance_scores
from tests.searching import N, gallery, searcher  # noqa: F401 - fixtures
from tests.world import captioned, run_folder  # noqa: F401 - fixtures
from tools.build_index import main as build
from tools.search.calibrating import calibrate
from tools.search.calibration import load_calibration, save_calibration
from tools.search.command import main, open_searcher, parse
from tools.search.web.page import make_app
from tools.search.wish import Wish


def ask(capsys, index, *argv):
    """The command's JSON."""
    capsys.readouterr()
    assert main(["a red circle", *map(str, argv), "--index", str(index), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def by_weight(gallery, searcher, weight):  # noqa: F811
    """Rows in their order under a weight of the gallery's variances."""
    scores = tolerance_scores(searcher.encoder.embed(["a red circle"], []), gallery.embedded, weight, 1.0)(slice(0, 1))
    return scores[0].argsort(descending=True).tolist()


@pytest.fixture(scope="module")
def indexes(gallery, tmp_path_factory):  # noqa: F811
    """One of each form, and an approximate one."""
    folder = tmp_path_factory.mktemp("indexes")
    for name, options in {
        "mean": ["--form", "mean"], "fits": ["--tolerance", "-2"], "graph": ["--factory", "HNSW8"],
        "graph-fits": ["--factory", "HNSW8", "--tolerance", "-2"],
    }.items():  # fmt: skip
        build(["--embeddings", str(gallery.images.parent / "embedded"), "--out", str(folder / name), *options])
    return folder


def test_every_index_ranks_by_the_weight(gallery, searcher, indexes, capsys):  # noqa: F811
    closest, fits = by_weight(gallery, searcher, 1.0), by_weight(gallery, searcher, -2.0)
    assert closest[:10] != fits[:10]
    for index, options, weight, want in (
        (gallery.images, (), 1, closest),
        (gallery.images, ("--no-fits",), 1, closest),
        (gallery.images, ("--fits", "--tolerance", -2), -2, fits),
        (indexes / "mean", (), 1, closest),
        (indexes / "mean", ("--fits", "--tolerance", -2), -2, fits),
        (indexes / "fits", (), -2, fits),
        (indexes / "fits", ("--fits",), -2, fits),
        (indexes / "fits", ("--no-fits",), 1, closest),
        (indexes / "graph-fits", ("--effort", 40), -2, fits),
    ):
        answer = ask(capsys, index, "--top", 10, *options)
        assert answer["weight"] == weight
        assert [one["row"] for one in answer["results"]] == want[:10], (index, options)
    assert main(["a red circle", "--fits", "--tolerance", "-2", "--index", str(gallery.images)]) == 0
    assert "ranked with the variances of the items times -2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("index", "options", "message"),
    [
        ("images", ["--fits"], "It is not known which weight"),
        ("images", ["--tolerance", "-1"], "--tolerance has no effect without --fits"),
        ("images", ["--fits", "--tolerance", "nan"], "--tolerance is nan"),
        ("graph", ["--fits", "--tolerance", "-1"], "and cannot with -1"),
        ("graph-fits", ["--no-fits"], "ranks with the variances times -2, and cannot with 1"),
    ],
)
def test_refusals(index, options, message, gallery, indexes):  # noqa: F811
    folder = gallery.images if index == "images" else indexes / index
    with pytest.raises(UserError, match=message):
        main(["a red circle", *options, "--index", str(folder)])


def test_a_calibration_chooses_the_weight_where_all_matches_are_known(gallery, indexes, captioned, capsys):  # noqa: F811
    index = indexes / "mean"
    found = calibrate(open_searcher(parse(["x", "--index", str(index)])), str(captioned))
    assert found.tolerance is not None
    save_calibration(index, found)
    assert load_calibration(index, found.weights) == found
    assert ask(capsys, index, "--fits")["weight"] == found.tolerance
    assert ask(capsys, index, "--fits", "--tolerance", -3)["weight"] == -3
    least = min(found.curves[1].at_least)
    with pytest.raises(UserError, match="of its own ranking, not of this one"):
        ask(capsys, index, "--fits", "--tolerance", -3, "--min-precision", max(least, 1e-9))
    plain = calibrate(open_searcher(parse(["x", "--index", str(gallery.images)])), str(gallery.tar))
    assert plain.tolerance is None  # its captions are not all of the scenes


def test_the_page_has_the_choice_where_there_is_one(gallery, searcher, indexes):  # noqa: F811
    def page(folder, *options):
        found = open_searcher(parse(["--serve", "--index", str(folder), "--device", "cpu", *options]))
        return make_app({"x": found}).test_client()

    def post(client, **form):
        return client.post("/search", data={"text": "a red circle", "top": "5", **form}, base_url="http://localhost")

    def choice(client):
        return client.get("/about", base_url="http://localhost").get_json()["indexes"][0]["fits"]

    client = page(gallery.images, "--tolerance", "-2")
    assert choice(client) == {"weight": -2.0, "own": False}
    for form, weight in (({}, 1.0), ({"fits": "no"}, 1.0), ({"fits": "yes"}, -2.0)):
        answer = post(client, **form).get_json()
        assert (answer["weight"], len(answer["results"])) == (weight, 5)
        assert [one["row"] for one in answer["results"]] == by_weight(gallery, searcher, weight)[:5]
    assert "neither yes nor no" in post(client, fits="maybe").get_json()["error"]
    assert choice(page(indexes / "fits")) == {"weight": -2.0, "own": True}
    for other in (page(gallery.images), page(indexes / "graph", "--tolerance", "-2"), page(indexes / "graph-fits")):
        assert choice(other) is None
    assert searcher.answer(Wish(["a red circle"], top=N))["weight"] == 1
