"""Queries of several parts: the trained composer, weights, parts to leave out, and how feasible a combination is."""

import json

import pytest
import torch
from torch.distributions import Normal

from probemb.compose import as_query, compose
from probemb.distances import csd
from probemb.errors import UserError
from probemb.gaussian import Gaussian
from probemb.models import LoadedModel, create_model, create_tokenizer, create_transforms
from probemb.models.composers import ALIASES, COMPOSERS
from tests.searching import N, gallery, searcher  # noqa: F401 - fixtures
from tests.world import run_folder  # noqa: F401 - a fixture
from tools.search.command import main
from tools.search.composing import QueryComposer
from tools.search.encoding import QueryEncoder
from tools.search.feasibility import COMBINATIONS, ITEMS, combine
from tools.search.options import parse, signed_weights
from tools.search.query import Searcher
from tools.search.wish import QueryImage, Wish

TEXTS = ["a red circle", "a blue square", "a green star"]


def rows(answer):
    return [result["row"] for result in answer["results"]]


def with_composer(name, index, **more):
    """A searcher of a random model that has this composer."""
    torch.manual_seed(3)
    model = create_model("ViT-Micro-32", composer=name, **more).eval()
    return Searcher(index, QueryEncoder(LoadedModel(model, create_tokenizer(model), create_transforms(model)), "x"))


@pytest.mark.parametrize("name", [*COMPOSERS, *ALIASES])
def test_a_trained_composer_composes(name):
    torch.manual_seed(0)
    model = create_model("ViT-Micro-32", composer=name).eval()
    composer, dim = QueryComposer(model), model.embed_dim
    given = Gaussian(torch.randn(4, 3, dim), torch.randn(4, 3, dim))  # 4 queries of 3 parts
    truth = model.composer(given).gaussian
    product = composer(Gaussian(given.mean.transpose(0, 1), given.log_var.transpose(0, 1)))
    torch.testing.assert_close(product.gaussian.mean, truth.mean)
    torch.testing.assert_close(composer(given[2]).gaussian.mean, truth.mean[2], atol=1e-5, rtol=1e-4)
    assert composer.name == name
    product_of_densities = ALIASES.get(name, name) == "product"
    assert composer.weighs == product_of_densities
    assert (composer.measure == "log_normaliser") == product_of_densities
    if model.composer.probabilistic:
        torch.testing.assert_close(product.gaussian.log_var, truth.log_var)
    else:
        assert composer.measure is None
        assert float(product.gaussian.uncertainty().max()) < 1e-9  # points
    if composer.weighs:
        weighed = composer(given[2], [1, 2, -0.01])
        truth = compose(given[2], weights=[1, 2, -0.01])
        torch.testing.assert_close(weighed.gaussian.mean, truth.gaussian.mean)
        torch.testing.assert_close(weighed.log_normaliser, truth.log_normaliser)
    else:
        with pytest.raises(UserError, match=r"no weights and no parts to take away.*--method mpc"):
            composer(given[2], [1, 1, -1])


def test_weights_and_parts_to_leave_out(gallery, searcher):  # noqa: F811
    image = QueryImage("x", gallery.jpegs[3])
    weights = [1.0, -0.5, 2.0]
    answer = searcher.answer(Wish(TEXTS[:2], [image], top=N, weights=weights))
    product = compose(searcher.encoder.embed(TEXTS[:2], [image]), weights=weights)
    query = as_query(product.gaussian)
    assert rows(answer) == csd(query[None], gallery.embedded)[0].argsort().tolist()
    assert [part["weight"] for part in answer["query"]["parts"]] == weights
    assert answer["query"]["log_normaliser"] == pytest.approx(float(product.log_normaliser), rel=1e-5)
    assert answer["query"]["uncertainty"] == pytest.approx(float(query.uncertainty()))
    assert answer["query"]["composer"] == "product"
    assert rows(answer) != rows(searcher.answer(Wish(TEXTS[:2], [image], top=N)))
    plain = searcher.answer(Wish(TEXTS[:2], weights=[1, 1]))
    assert plain["results"] == searcher.answer(Wish(TEXTS[:2]))["results"]


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ([1, -3], "Taking away part 2 of the query leaves no density"),
        ([1, -1, 1], "2 parts and 3 weights"),
        ([-1, -1], "only what to leave out"),
        ([1, 0], "weight of a part is 0"),
        ([1, 1e-44], "weight of a part is 1e-44"),
        ([1, float("nan")], "is nan"),
        ([1, -11], "is -11"),
        ([1, float("inf")], "is inf"),
    ],
)
def test_weights_that_are_refused(searcher, weights, what):  # noqa: F811
    with pytest.raises(UserError, match=what):
        searcher.answer(Wish(["a red circle", " ", "a blue square"], weights=weights))


def test_a_composer_without_weights(searcher):  # noqa: F811
    rival = with_composer("tirg", searcher.index, probabilistic=False)
    answer = rival.answer(Wish(TEXTS[:2]))
    assert answer["query"]["composer"] == "tirg"
    assert answer["query"]["uncertainty"] < 1e-9
    assert answer["feasibility"]["share"] is None
    assert "no variances" in answer["feasibility"]["says"]
    assert {one["match"] for one in answer["results"]} == {None}
    for weights in ([1, -1], [2, 1]):
        with pytest.raises(UserError, match="no weights"):
            rival.answer(Wish(TEXTS[:2], weights=weights))


def test_a_calibration_is_of_plain_queries(searcher):  # noqa: F811
    with pytest.raises(UserError, match="without weights"):
        searcher.answer(Wish(TEXTS[:2], weights=[1, 0.5], min_precision=0.5))


# ------------------------------------------------------------------------------------------------ feasibility


def log_z(first, second):
    """The log-integral of the product of two normals."""
    scale = (first.log_var.exp() + second.log_var.exp()).sqrt()
    return Normal(first.mean, scale).log_prob(second.mean).sum(-1)


def test_feasibility_is_a_share_of_random_combinations(gallery, searcher):  # noqa: F811
    image = QueryImage("x", gallery.jpegs[9])
    for texts, images in ((TEXTS[:2], []), (TEXTS[:1], [image])):
        told = searcher.answer(Wish(texts, images))["feasibility"]
        parts = searcher.encoder.embed(texts, images)
        kinds = ["text", "image" if images else "text"]
        pools = {kind: searcher.feasibility.pool(kind) for kind in kinds}
        random = combine(pools, sorted(pools["text"].place), kinds)
        own, theirs = log_z(parts[0], parts[1]), log_z(random[0], random[1])
        assert told["share"] == pytest.approx(float((theirs < own).double().mean()), abs=2e-3)
        assert (told["by"], told["combinations"]) == ("log_normaliser", COMBINATIONS)
        again = Searcher(searcher.index, searcher.encoder).answer(Wish(texts, images))["feasibility"]
        assert told == again


def test_random_combinations_are_of_different_items(gallery, searcher):  # noqa: F811
    pool = searcher.feasibility.pool("image")
    assert len(pool.place) == ITEMS
    first = min(pool.place)
    torch.testing.assert_close(pool.parts[pool.place[first]].mean, gallery.embedded.mean[first], atol=1e-3, rtol=0)
    random = combine({"image": pool}, sorted(pool.place), ["image"] * 3)
    assert random.shape == (3, COMBINATIONS, searcher.index.dim)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert float((random.mean[one] - random.mean[other]).norm(dim=-1).min()) > 0
    assert len(random.mean[0].unique(dim=0)) == ITEMS


def test_alike_parts_are_feasible_and_parts_to_leave_out_do_not_count(searcher):  # noqa: F811
    assert searcher.answer(Wish(["a red circle"] * 2))["feasibility"]["share"] > 0.9
    two = searcher.answer(Wish(TEXTS[:2], weights=[2, 0.5]))["feasibility"]
    assert searcher.answer(Wish(TEXTS, weights=[2, 0.5, -0.2]))["feasibility"] == two
    assert searcher.answer(Wish(TEXTS[:2], weights=[1, -0.5]))["feasibility"] is None
    assert searcher.answer(Wish(TEXTS[:1]))["feasibility"] is None


def test_a_composer_without_normaliser_goes_by_uncertainty(searcher):  # noqa: F811
    found = with_composer("addition", searcher.index)
    told = found.answer(Wish(TEXTS[:2]))["feasibility"]
    pool = found.feasibility.pool("text")
    random = combine({"text": pool}, sorted(pool.place), ["text"] * 2)
    own = found.encoder.embed(TEXTS[:2], []).uncertainty().sum()
    assert told["by"] == "uncertainty"
    assert told["share"] == pytest.approx(float((random.uncertainty().sum(0) > own).double().mean()), abs=2e-3)


def test_pictures_that_are_gone(gallery, searcher, monkeypatch):  # noqa: F811
    found = Searcher(searcher.index, searcher.encoder)

    def gone(row):
        raise LookupError("gone")

    monkeypatch.setattr(found, "picture", gone)
    answer = found.answer(Wish(TEXTS[:1], [QueryImage("x", gallery.jpegs[0])]))
    assert answer["results"]
    assert answer["feasibility"]["share"] is None
    assert "Too few pictures and captions" in answer["feasibility"]["says"]


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_takes_weights_and_parts_to_leave_out(gallery, searcher, tmp_path, capsys):  # noqa: F811
    paths = [tmp_path / "x.jpg", tmp_path / "y.jpg"]
    for path, data in zip(paths, gallery.jpegs):
        path.write_bytes(data)
    argv = ["a red circle", "--without", "a blue square", "--image", paths[0], "--without-image", paths[1]]
    words = [*map(str, argv), "--weights", "1,0.3,2,0.2", "--index", str(gallery.images)]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    images = [QueryImage(path.name, path.read_bytes()) for path in paths]
    truth = searcher.answer(Wish(TEXTS[:2], images, weights=[1, -0.3, 2, -0.2]))
    assert answer["query"] == truth["query"]
    assert rows(answer) == rows(truth)
    assert answer["feasibility"] == truth["feasibility"]
    assert main(words) == 0
    assert truth["feasibility"]["says"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "weights"),
    [
        (["a", "b"], None),
        (["a", "--without", "b"], [1, -0.5]),
        (["a", "--weights", "2"], [2]),
        (["--without-image", "p", "--without", "b", "a", "--image", "q", "--weights", "1,2,3,4"], [1, -2, 3, -4]),
    ],
)
def test_weights_in_order(argv, weights):
    assert signed_weights(parse([*argv, "--index", "x"])) == weights


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["a", "b", "--weights", "1"], "1 numbers for 2 parts"),
        (["a", "--weights", "x"], "--weights is 'x'"),
        (["a", "--weights=-1"], "--weights is -1"),
        (["a", "--weights", "nan"], "--weights is nan"),
        (["a", "--weights", "11"], "weight of a part is 11"),
        (["--without", "a"], "only what to leave out"),
        (["a", "--without", " "], "One of the texts is empty"),
        (["--serve", "--weights", "1"], "--weights does not belong to --serve"),
        (["--serve", "--without", "a"], "exclude each other"),
        (["a", "--without-image", "nowhere.jpg"], "cannot be read"),
        (["a", *["--without", "b"] * 8], "9 parts"),
    ],
)
def test_bad_weights(gallery, argv, what):  # noqa: F811
    with pytest.raises(UserError, match=what):
        main([*argv, "--index", str(gallery.images)])
