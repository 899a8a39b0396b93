"""Calibrations of an index: scores, thresholds, refusals, and files that do not fit."""

import dataclasses
import json

import pytest
import torch

from probemb.distances import csd
from probemb.errors import UserError
from probemb.evaluation.predictors import query_scores
from probemb.gaussian import Gaussian
from probemb.metrics import PrecisionCurve
from probemb.search import load_index
from tests.searching import N, gallery, searcher  # noqa: F401 - fixtures
from tests.world import captioned, run_folder  # noqa: F401 - fixtures
from tools.search.calibrating import assess_scores, calibrate, caption_groups, choose_score
from tools.search.calibration import BETTER, CHANCE, WORSE, Calibration, load_calibration
from tools.search.command import main
from tools.search.query import Searcher
from tools.search.scoring import SCORES
from tools.search.tables import print_answer
from tools.search.wish import QueryImage, Wish


@pytest.fixture
def calibrated(gallery, tmp_path):  # noqa: F811
    """A copy of the index with a calibration."""
    import shutil

    index = tmp_path / "index"
    shutil.copytree(gallery.images, index)
    assert main(["--calibrate", str(gallery.tar), "--index", str(index)]) == 0
    return index


def test_calibration_agrees_with_the_retrieval_stage(gallery, calibrated, tmp_path, capsys):  # noqa: F811
    from zeroshot.retrieval import main as retrieval

    options = ["--rankings", "csd", "--erased", "0", "--out", str(tmp_path / "r")]
    retrieval(["--model", str(gallery.model), "--data", str(gallery.tar), *options])
    truth = json.loads((tmp_path / "r" / "results.json").read_text())["rows"][0]
    calibration = load_calibration(calibrated, load_index(calibrated).weights)
    curve = calibration.curves[1]
    assert truth["ranking"] == "csd"
    assert curve.precision[-1] == pytest.approx(truth["t2i"]["r@1"])
    assert curve.queries == 3 * N
    assert [calibration.curves[parts].queries for parts in (2, 3)] == [N, N]
    assert main(["--calibrate", str(gallery.tar), "--index", str(calibrated), "--within", "5"]) == 0
    within = load_calibration(calibrated, calibration.weights)
    assert within.curves[1].precision[-1] == pytest.approx(truth["t2i"]["r@5"])
    # The index holds the validation images themselves: none of them is a rival of its own copy.
    assert main(["--calibrate", str(gallery.tar), "--index", str(calibrated), "--rivals", "index"]) == 0
    assert load_calibration(calibrated, calibration.weights).curves[1].precision == curve.precision
    told = " ".join(capsys.readouterr().out.split())
    assert told.count(f"(replaces one with {3 * N} queries of") == 2


def test_rivals_in_the_index_count(gallery, searcher, captioned):  # noqa: F811
    from tests.shards import iterate_samples

    curve = calibrate(searcher, str(captioned), "index").curves[1]
    samples = list(iterate_samples(captioned))
    images = searcher.encoder.embed([], [QueryImage("x", sample.image) for sample in samples[:8]])
    images = Gaussian.cat([images, *(searcher.encoder.embed([], [QueryImage("x", s.image)]) for s in samples[8:])])
    right = []
    for i, sample in enumerate(samples):
        for caption in sample.captions:
            query = searcher.encoder.embed([caption], [])
            own = csd(query, images)[0]
            right.append(own.argmin() == i and csd(query, gallery.embedded).min() >= own[i] - 2e-3)
    assert curve.precision[-1] == pytest.approx(sum(right) / len(right))
    assert curve.precision[-1] < calibrate(searcher, str(captioned)).curves[1].precision[-1]


def test_captions_are_grouped_by_image():
    owner = [0, 0, 0, 1, 2, 2]
    assert caption_groups(owner, 1) == [[0], [1], [2], [3], [4], [5]]
    pairs = caption_groups(owner, 2)
    assert len(pairs) == 2
    assert all(owner[a] == owner[b] and a != b for a, b in pairs)
    assert [sorted(group) for group in caption_groups(owner, 3)] == [[0, 1, 2]]


def test_calibration_of_an_index_of_captions(gallery, tmp_path, capsys):  # noqa: F811
    import shutil

    index = tmp_path / "texts"
    shutil.copytree(gallery.texts, index)
    assert main(["--calibrate", str(gallery.tar), "--index", str(index)]) == 0
    calibration = load_calibration(index, load_index(index).weights)
    assert (calibration.kind, list(calibration.curves), calibration.gallery) == ("image", [1], 3 * N)
    with pytest.raises(UserError, match="queries of 1 image, and this one has 1 text"):
        main(["a text", "--min-precision", "0.01", "--index", str(index)])
    capsys.readouterr()


def test_min_precision_refuses_by_the_curve(gallery, calibrated, searcher, capsys):  # noqa: F811
    calibration = load_calibration(calibrated, searcher.index.weights)
    u = float(searcher.encoder.embed(["a red circle"], []).uncertainty())
    for threshold, refused in ((u - 1e-4, True), (u + 1e-4, False)):
        curve = dataclasses.replace(calibration.curves[1], threshold=[threshold], coverage=[1.0], at_least=[0.8])
        changed = dataclasses.replace(calibration, curves={1: curve}, score="u", tests=None)  # as of format 1
        one = Searcher(searcher.index, searcher.encoder, changed)
        answer = one.answer(Wish(["a red circle"], min_precision=0.8))
        assert (answer["refused"], answer["limit"]) == (refused, threshold)
        with pytest.raises(UserError, match="out of reach"):
            one.answer(Wish(["a red circle"], min_precision=0.81))
        with pytest.raises(UserError, match="queries of 1 text, and this one has 2 texts"):
            one.answer(Wish(["a red circle", "another"], min_precision=0.5))
    with pytest.raises(UserError, match=r"no score tells better than chance.* no precision is promised\. .*finetune"):
        main(["a red circle", "--min-precision", "0.01", "--index", str(calibrated)])  # an untrained model
    with pytest.raises(UserError, match="no calibration"):
        main(["a red circle", "--min-precision", "0.5", "--index", str(gallery.images)])


def test_scores_are_those_of_the_evaluation_and_the_same_for_one_query_and_many(gallery, searcher):  # noqa: F811
    texts = ["a red circle", "two squares", "something", "a large blue triangle below a circle"]
    queries = searcher.encoder.embed(texts, [])
    found, truth = searcher.scores(queries), query_scores(queries, gallery.embedded, searcher.encoder.match_model)
    assert list(found) == list(SCORES) == list(truth)  # 40 items are all candidates, and Flat gives its vectors back
    for name in SCORES:
        torch.testing.assert_close(found[name], truth[name].float(), rtol=2e-3, atol=2e-4)
        calibration = Calibration("text", {1: CURVE}, "", "data", N, "validation", 1, name, {1: {name: PASSED}})
        one = Searcher(searcher.index, searcher.encoder, calibration)
        for text, value in zip(texts, found[name].tolist()):
            score = one.answer(Wish([text], top=1))["score"]
            assert score == {"name": name, "title": SCORES[name][0], "value": pytest.approx(value, abs=1e-4),
                             "limit": None}  # fmt: skip


def test_scores_do_not_depend_on_the_weight_of_the_ranking(gallery, searcher):  # noqa: F811
    from probemb.search import build_index

    queries = searcher.encoder.embed(["a red circle", "something"], [])
    truth = query_scores(queries, gallery.embedded, searcher.encoder.match_model)
    index = build_index(gallery.embedded, "Flat", "tolerance", -0.5)
    found = Searcher(index, searcher.encoder).scores(queries)
    for name in SCORES.keys() - {"spread"}:  # whose neighbours are those of the ranking
        torch.testing.assert_close(found[name], truth[name].float(), rtol=2e-3, atol=2e-4)


CURVE = PrecisionCurve([1.0], [1.0], [0.9], [0.8], 100)
PASSED = {"gain": 0.3, "se": 0.02, "verdict": "better than chance"}


@pytest.mark.parametrize("name", ["u", "entropy"])
def test_the_calibrated_score_refuses(gallery, searcher, name, capsys):  # noqa: F811
    value = float(searcher.scores(searcher.encoder.embed(["a red circle"], []))[name])
    for limit, refused in ((value - 1e-3, True), (value + 1e-3, False)):
        curve = dataclasses.replace(CURVE, threshold=[limit])
        calibration = Calibration("text", {1: curve}, "", "data", N, "validation", 1, name, {1: {name: PASSED}})
        one = Searcher(searcher.index, searcher.encoder, calibration)
        for wish in (Wish(["a red circle"], min_precision=0.8), Wish(["a red circle"], max_score=limit)):
            answer = one.answer(wish)
            assert answer["refused"] == refused
            assert bool(answer["results"]) != refused
            assert answer["score"]["limit"] == limit
            print_answer(answer)
            assert ("refused: that is above" in capsys.readouterr().out) == refused
        both = one.answer(Wish(["a red circle"], min_precision=0.8, max_uncertainty=1e-6))
        assert both["refused"]  # by u, the stricter one
        print_answer(both)
        assert "above 1e-06" in capsys.readouterr().out
    with pytest.raises(UserError, match="its score is unknown"):
        searcher.answer(Wish(["a red circle"], max_score=1.0))


def test_the_score_that_does_best_is_chosen_if_it_beats_chance():
    r = torch.Generator().manual_seed(0)
    good, noise = torch.rand(2, 2000, generator=r)
    correct, image = torch.rand(2000, generator=r) > good, torch.arange(2000) // 5
    tests = assess_scores({"u": 1 - good, "entropy": good + noise, "spread": good, "distance": noise}, correct, image)
    verdicts = {name: test["verdict"] for name, test in tests.items()}
    assert verdicts == {"u": WORSE, "entropy": BETTER, "spread": BETTER, "distance": CHANCE}
    assert choose_score(tests) == "spread"
    nothing = {name: tests[name] for name in ("u", "distance")}
    assert choose_score(nothing) == "u"
    refused = Calibration("text", {1: CURVE}, "", "data", 9, "validation", 1, "u", {1: nothing})
    with pytest.raises(UserError, match=r"worse than chance: uncertainty.*no precision is promised"):
        refused.threshold(["text"], 0.1)
    assert Calibration("text", {1: CURVE}, "", "data", 9, "validation", 1, "spread", {1: tests}).doubt(1) is None
    two = Calibration("text", {1: CURVE, 2: CURVE}, "", "data", 9, "validation", 1, "distance", {1: tests, 2: tests})
    assert "the calibration's score, distance of the closest, does not tell" in two.doubt(2)
    right = dataclasses.replace(refused, curves={1: dataclasses.replace(CURVE, precision=[1.0])})
    assert right.doubt(1) is None  # all answers are right: nothing needs to be refused


def test_a_calibration_of_format_1_refuses_by_u(calibrated):
    path = calibrated / "calibration.json"
    content = json.loads(path.read_text())
    weights = content["weights"]
    assert load_calibration(calibrated, weights).tests == {int(k): v for k, v in content["tests"].items()}
    old = {key: value for key, value in content.items() if key not in ("score", "tests")} | {"format": 1}
    path.write_text(json.dumps(old))
    read = load_calibration(calibrated, weights)
    assert (read.score, read.tests, read.doubt(1)) == ("u", None, None)
    for wrong in ({"score": "oracle"}, {"tests": {}}, {"tests": {"1": 3, "2": 3, "3": 3}}, {"tests": None}):
        path.write_text(json.dumps(content | wrong))
        with pytest.raises(UserError, match="is not a calibration"):
            load_calibration(calibrated, weights)


@pytest.mark.parametrize("spoil", ["other weights", "no json", "no curve", "other format", "texts"])
def test_a_calibration_that_does_not_fit(calibrated, spoil):
    path = calibrated / "calibration.json"
    content = json.loads(path.read_text())
    if spoil == "other weights":
        content["weights"] = "0" * 64
    if spoil == "no curve":
        content["curves"] = {}
    if spoil == "texts":
        content["curves"]["1"]["threshold"] = ["1"] * len(content["curves"]["1"]["threshold"])
    if spoil == "other format":
        content["format"] = 99
    path.write_text("{" if spoil == "no json" else json.dumps(content))
    with pytest.raises(UserError, match="other weights" if spoil == "other weights" else "is not a calibration"):
        main(["a red circle", "--index", str(calibrated)])
