"""Answers to queries: ranking against brute force, composition, match probabilities, images, pictures."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from probemb.compose import as_query, compose
from probemb.distances import csd
from probemb.errors import UserError
from probemb.evaluation.rankings import tolerance_scores
from probemb.models import LoadedModel, create_model, create_tokenizer, create_transforms, load_model
from probemb.models.towers.words import WordTokenizer
from tests.searching import N, open_searcher
from tools.build_index import main as build
from tools.search.query import QueryEncoder, QueryImage, Searcher, SearchRequest, read_image, read_picture

TEXTS = ["a red circle", "a blue square"]


def rows(answer):
    return [result["row"] for result in answer["results"]]


def picture(data):
    return QueryImage("q.jpg", lambda: data)


def brute_force(gallery, query):
    """Gallery rows, closest first, and their CSD."""
    distance, order = csd(query[None], gallery.embedded)[0].sort()
    return order.tolist(), distance


@pytest.fixture(scope="module")
def indexes(gallery, tmp_path_factory):
    """The images in indexes of other forms and factories."""
    folder = tmp_path_factory.mktemp("indexes")
    for name, options in {
        "mean": ["--form", "mean"], "fits": ["--tolerance", "-2"], "graph": ["--factory", "HNSW8"],
        "ivf": ["--factory", "IVF1,Flat"],
    }.items():  # fmt: skip
        build(["--embeddings", str(gallery.images.parent / "embedded"), "--out", str(folder / name), *options])
    return folder


def test_a_text_is_ranked_by_csd(gallery, searcher):
    answer = searcher.answer(SearchRequest([" a red circle "], top=N))
    model, tokenizer, _ = load_model(gallery.model)
    with torch.inference_mode():
        query = model.encode_text(tokenizer(["a red circle"]))[0]
    order, distance = brute_force(gallery, query)
    assert rows(answer) == order
    assert [one["distance"] for one in answer["results"]] == pytest.approx(distance.tolist(), abs=1e-4)
    assert [one["captions"] for one in answer["results"]] == [gallery.captions[row] for row in order]
    assert [one["rank"] for one in answer["results"]] == list(range(1, N + 1))


@pytest.mark.parametrize("weights", [None, [1.0, -0.5, 2.0]])
def test_parts_are_one_query(weights, gallery, searcher):
    image = picture(gallery.jpegs[3])
    answer = searcher.answer(SearchRequest(TEXTS, [image], weights, top=N))
    product = compose(searcher.encoder.embed(TEXTS, [image]), weights=weights)
    query = as_query(product.gaussian)
    assert rows(answer) == brute_force(gallery, query)[0]
    assert [(part["kind"], part["weight"]) for part in answer["query"]["parts"]] == list(
        zip(("text", "text", "image"), weights or [1, 1, 1])
    )
    assert answer["query"]["log_normaliser"] == pytest.approx(float(product.log_normaliser), rel=1e-5)
    assert answer["query"]["uncertainty"] == pytest.approx(float(query.uncertainty()))
    with pytest.raises(UserError, match="Taking away part 2 of the query leaves no density"):
        searcher.answer(SearchRequest(TEXTS, weights=[1, -3]))


def test_a_trained_composer_composes(searcher):
    torch.manual_seed(3)
    model = create_model("ViT-Micro-32", composer="tirg", probabilistic=False).eval()
    encoder = QueryEncoder(LoadedModel(model, create_tokenizer(model), create_transforms(model)), "x")
    parts = encoder.embed(TEXTS)
    composed = encoder.compose(parts, [1, 1]).gaussian
    truth = model.composer(type(parts)(parts.mean[None], parts.log_var[None])).gaussian.mean[0]
    torch.testing.assert_close(composed.mean, torch.nn.functional.normalize(truth, dim=0))
    answer = Searcher(searcher.index, encoder).answer(SearchRequest(TEXTS))
    assert (answer["query"]["composer"], encoder.weighs) == ("tirg", False)
    assert answer["query"]["uncertainty"] < 1e-9  # points
    assert {one["match"] for one in answer["results"]} == {None}


def test_every_index_ranks_by_the_weight(gallery, searcher, indexes):
    query = searcher.encoder.embed(TEXTS[:1])
    order = {w: tolerance_scores(query, gallery.embedded, w, 1.0)(slice(0, 1))[0].argsort(descending=True).tolist()
             for w in (1, -2)}  # fmt: skip
    for folder, options, weight in (
        (gallery.images, ["--tolerance", "-2"], -2), (indexes / "mean", [], 1), (indexes / "fits", [], -2),
        (indexes / "mean", ["--tolerance", "-2"], -2), (indexes / "fits", ["--tolerance", "1"], 1),
        (indexes / "graph", ["--effort", "40"], 1), (indexes / "ivf", [], 1),
    ):  # fmt: skip
        answer = open_searcher(folder, *options).answer(SearchRequest(TEXTS[:1]))
        assert (rows(answer), answer["weight"]) == (order[weight][:10], weight), (folder, options)


@pytest.mark.parametrize("name", ["Flat", "ivf", "mean", "fits"])
def test_a_match_is_the_models_probability_among_the_whole_gallery(name, gallery, searcher, indexes):
    found = searcher if name == "Flat" else open_searcher(indexes / name)
    query = found.encoder.embed(TEXTS[:1])
    truth = found.encoder.loaded.model.match_probability(gallery.embedded, query, among="images")[:, 0]
    assert float(truth.sum()) == pytest.approx(1)
    for top in (N, 3):
        results = found.answer(SearchRequest(TEXTS[:1], top=top))["results"]
        matches = torch.tensor([one["match"] for one in results])
        torch.testing.assert_close(matches, truth[[one["row"] for one in results]], atol=1e-4, rtol=1e-3)


def test_where_a_match_is_estimated_or_unknown(gallery, searcher, monkeypatch):
    truth = {one["row"]: one["match"] for one in searcher.answer(SearchRequest(TEXTS[:1], top=N))["results"]}
    places = torch.arange(0, N, 4)
    few = replace(searcher.index, sample=(places, gallery.embedded.mean[places]))  # for the 37 that are not returned
    best = Searcher(few, searcher.encoder).answer(SearchRequest(TEXTS[:1], top=3))["results"][0]
    assert best["match"] == pytest.approx(truth[best["row"]], rel=0.5)
    for images in ([picture(gallery.jpegs[3])], [searcher.stored_image(3)]):  # of the gallery's kind
        assert {one["match"] for one in searcher.answer(SearchRequest(["a"], images))["results"]} == {None}
    monkeypatch.setattr(searcher.encoder, "match_model", replace(searcher.encoder.match_model, form="none"))
    assert {one["match"] for one in searcher.answer(SearchRequest(["a"]))["results"]} == {None}


def test_uncertain_results_are_left_out_and_ambiguous_queries_refused(gallery, searcher):
    u = gallery.embedded.uncertainty()
    limit = float(u.sort().values[4]) + 1e-6
    order = [row for row in brute_force(gallery, searcher.encoder.embed(TEXTS[:1])[0])[0] if u[row] <= limit]
    answer = searcher.answer(SearchRequest(TEXTS[:1], top=3, max_item_uncertainty=limit))
    assert rows(answer) == order[:3]  # 5 of 40 are certain enough: more than 3 had to be looked at
    assert answer["looked_at"] > 3
    assert rows(searcher.answer(SearchRequest(TEXTS[:1], top=9, max_item_uncertainty=limit))) == order
    u = answer["query"]["uncertainty"]
    assert searcher.answer(SearchRequest(TEXTS[:1], max_uncertainty=u + 1e-4))["results"]
    refused = searcher.answer(SearchRequest(TEXTS[:1], max_uncertainty=u - 1e-4))
    assert (refused["refused"], refused["results"], refused["limit"]) == (True, [], u - 1e-4)


def test_words_that_the_model_does_not_know_are_named(searcher, monkeypatch):
    request = SearchRequest(["a red zebra", "[b]quagga"])
    assert searcher.answer(request)["query"]["unknown_words"] == []  # parts of words
    words = searcher.encoder.loaded._replace(tokenizer=WordTokenizer(["a", "red", "b"], 8))
    monkeypatch.setattr(searcher.encoder, "loaded", words)
    assert searcher.answer(request)["query"]["unknown_words"] == ["zebra", "quagga"]


# ------------------------------------------------------------------------------------------------ images


def test_an_image_without_an_end(monkeypatch):
    """Of a pipe or a device no more is read than an image may have."""
    monkeypatch.setattr("tools.search.query.MAX_IMAGE_BYTES", 1000)
    out, into = os.pipe()
    os.write(into, bytes(5000))
    os.close(into)
    try:
        with pytest.raises(UserError, match="has more than"):
            read_image(Path(f"/dev/fd/{out}"))
    finally:
        os.close(out)


def test_a_picture_is_read_from_its_place(gallery, searcher, tmp_path):
    assert [searcher.picture(row) for row in range(N)] == gallery.jpegs
    size = gallery.tar.stat().st_size
    places = (tmp_path, 0, 10), (tmp_path / "gone.tar", 0, 10)
    for shard, *place in (*places, (gallery.tar, size - 10, 100), ("s3://bucket/a.tar", 0, 10), ("pipe:id", 0, 10)):
        with pytest.raises(LookupError):
            read_picture(str(shard), *place)
