"""Retrieval: the command, and the parts of the library that it alone uses."""

import copy
import gzip
import json
import re
import subprocess
import sys
from itertools import chain

import pytest
import torch

from probemb import Gaussian, metrics
from probemb.data.captions.find import CaptionDataset, find_captions
from probemb.data.labelled.coco_objects import read_objects
from probemb.distances import csd
from probemb.errors import UserError
from probemb.evaluation.benchmarks import choose_benchmarks, evaluate_rankings, refuse_too_many_exact_pairs
from probemb.evaluation.embed_pairs import EmbeddedPairs, exact_match
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.predictors import warning
from probemb.evaluation.rankings import RankingOptions, evaluate_retrieval, make_ranker, own_captions, rank_all
from probemb.evaluation.tolerance import GRID
from probemb.evaluation.uncertainty import (
    MEASURES,
    erase_pixels,
    erase_regions,
    erase_words,
    evenly,
    extremes,
    prefix,
    projection,
    quality,
)
from probemb.metrics.coco import coco_test_ids, package_metrics
from probemb.models import create_model, load_model, save_model
from probemb.models.word_tokenizer import WordTokenizer
from tests.truth import matches
from tests.world import jpeg, write_tar
from zeroshot.reports.predictors import print_predictors
from zeroshot.reports.retrieval import describe_unknown
from zeroshot.retrieval import main, unknown_captions


def gaussians(n, dim=8, seed=0):
    r = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(n, dim, generator=r), dim=1)
    return Gaussian(mean, torch.randn(n, dim, generator=r) - 3)


def command(run_folder, data, out, *options):
    return main(["--model", str(run_folder), "--data", str(data), "--no-split", "--out", str(out), *options])


@pytest.fixture(scope="module")
def measured(run_folder, captioned, tmp_path_factory):
    """The folder and results of one whole evaluation of the synthetic data."""
    out = tmp_path_factory.mktemp("measured")
    assert command(run_folder, captioned, out, "--erased", "4", "--samples", "2", "--candidates", "12") == 0
    return out, json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)


def test_every_ranking_under_both_kinds_of_positives(measured):
    _, results = measured
    rows = {(row["positives"], row["ranking"]): row for row in results["rows"]}
    assert len(rows) == 2 * 8
    for positives in ("own captions", "all true captions"):
        exact, searched = rows[positives, "csd"], rows[positives, "faiss-csd"]
        for way in ("i2t", "t2i"):
            assert searched[way] == pytest.approx(exact[way], abs=0.03)  # float32 may swap two that nearly tie
        assert rows[positives, "faiss-mean"]["rsum"] == pytest.approx(rows[positives, "mean"]["rsum"], abs=5)
        assert all(row["ms_per_query"] > 0 for row in rows.values())
    assert rows["own captions", "match-probability"]["how"] == "sampled, 2 x 2 samples a pair"
    assert (results["images"], results["captions"]) == (24, 72)


def test_the_numbers_are_those_of_the_whole_matrix(measured, run_folder, captioned):
    _, results = measured
    model, tokenizer, transforms = load_model(run_folder)
    data = find_captions(captioned)
    validation = evaluate_retrieval(Embedder(model, tokenizer, transforms.evaluate), data)
    row = next(row for row in results["rows"] if row["ranking"] == "csd" and row["positives"] == "own captions")
    assert validation["rsum"] == pytest.approx(row["rsum"])
    assert validation["ranking"] == "csd"
    with torch.no_grad():
        pixels = torch.stack([transforms.evaluate(data.images.open(i)) for i in range(24)])
        scores = -csd(model.encode_image(pixels), model.encode_text(tokenizer(data.flat())))
    match = torch.tensor(data.owner()) == torch.arange(24)[:, None]
    for way, s, m in (("i2t", scores, match), ("t2i", scores.T, match.T)):
        assert validation[way] == pytest.approx(metrics.retrieval_metrics(s, m), abs=0.03)


def test_validation_by_tolerance_takes_the_best_weights(run_folder, captioned):
    model, tokenizer, transforms = load_model(run_folder)
    data = find_captions(captioned)
    found = evaluate_retrieval(Embedder(model, tokenizer, transforms.evaluate), data, "tolerance")
    with torch.no_grad():
        pixels = torch.stack([transforms.evaluate(data.images.open(i)) for i in range(24)])
        images, texts = model.encode_image(pixels), model.encode_text(tokenizer(data.flat()))
    match = torch.tensor(data.owner()) == torch.arange(24)[:, None]
    near = -torch.cdist(images.mean.double(), texts.mean.double()).square()
    for way, scores, gallery, m in (("i2t", near, texts, match), ("t2i", near.T, images, match.T)):
        u = gallery.uncertainty().double()
        under = {weight: metrics.retrieval_metrics(scores - weight * u, m) for weight in GRID}
        total = {weight: sum(one[f"r@{k}"] for k in (1, 5, 10)) for weight, one in under.items()}
        weight = found["tolerance"][way]
        assert total[weight] == pytest.approx(max(total.values()), abs=0.03)
        assert found[way] == pytest.approx(under[weight], abs=0.03)


@pytest.fixture(scope="module")
def two_networks(tmp_path_factory):
    """A run folder with two random tiny models, of another embed_dim."""
    folder = tmp_path_factory.mktemp("two")
    torch.manual_seed(1)
    for name, dim in (("model", 16), ("model-second", 24)):
        save_model(create_model("ViT-Micro-32", embed_dim=dim), folder / name)
    return folder


@pytest.mark.slow
def test_two_networks_of_a_run_are_measured_by_the_mean_of_their_similarities(
    two_networks, captioned, tmp_path, capsys
):
    """By themselves if a run has two, or those that are named; --no-second is the first alone."""
    data, found = find_captions(captioned), {}
    pixels = None
    scores: dict[str, list] = {"csd": [], "mean": []}
    for name in ("model", "model-second"):
        model, tokenizer, transforms = load_model(two_networks / name)
        pixels = torch.stack([transforms.evaluate(data.images.open(i)) for i in range(24)])
        with torch.no_grad():
            images, texts = model.encode_image(pixels), model.encode_text(tokenizer(data.flat()))
        scores["mean"].append(images.mean @ texts.mean.T)
        scores["csd"].append(-csd(images, texts))
    match = torch.tensor(data.owner()) == torch.arange(24)[:, None]
    cases = {
        "run": (two_networks, (), 2),
        "named": (two_networks / "model", ("--second", str(two_networks / "model-second")), 2),
        "first of the run": (two_networks, ("--no-second",), 1),
        "first": (two_networks / "model", (), 1),
    }
    for case, (model, options, n) in cases.items():
        assert command(model, captioned, tmp_path / case, "--rankings", "csd,mean", "--erased", "2", *options) == 0
        told, results = capsys.readouterr().out, json.loads((tmp_path / case / "results.json").read_text())
        assert ("are evaluated together, by the mean of their similarities" in told) == (n == 2)
        assert ("(--no-second: the first alone)" in told) == (case == "run")
        assert ("similarities are the means of both" in (tmp_path / case / "report.html").read_text()) == (n == 2)
        assert len(results["models"]) == n
        for row in results["rows"]:
            if row["positives"] == "own captions":
                mean = sum(scores[row["ranking"]][:n]) / n
                for way, s, m in (("i2t", mean, match), ("t2i", mean.T, match.T)):
                    assert row[way] == pytest.approx(metrics.retrieval_metrics(s, m), abs=0.03), (case, row["ranking"])
        found[case] = [{key: row[key] for key in ("ranking", "positives", "rsum")} for row in results["rows"]]
    assert found["run"] == found["named"] != found["first"] == found["first of the run"]


def test_the_report_stands_alone(measured, captioned):
    out, results = measured
    html = (out / "report.html").read_text()
    for heading in (
        "Rankings",
        "What u measures",
        "Uncertainty against recall",
        "Refusing",
        "what is erased",
        "in a plane",
        "Most and least",
    ):
        assert heading in html
    assert html.count("<svg") == 9
    extremes = results["uncertainty"]["extremes"]  # the queries with what they retrieve
    assert len(extremes["captions"]["most"]) == len(extremes["images"]["least"]) == 8
    texts = find_captions(captioned).flat()
    for queries in extremes["captions"].values():  # the same text once
        assert len({texts[query["row"]] for query in queries}) == 8
    assert {
        len(query["retrieved"]) for side in extremes.values() for queries in side.values() for query in queries
    } == {3}
    assert html.count('<div class="thumbs">') == 16
    links = re.findall(r"(?:src|href)=\"(?!data:|#)([^\"]*)", html)
    assert {str(file.relative_to(out)) for file in (out / "figures").iterdir()} == set(links)
    assert len(links) == 2 * 9
    assert "<script" not in html
    found = results["uncertainty"]
    assert set(found["quality"]["images"]) == set(found["quality"]["captions"])
    assert "all true captions: mAP@R" in found["quality"]["images"]
    assert found["erased"]["words"]["items"] == 4
    ends = found["erased"]["ends"]
    assert ends["uncertainty"][0] == pytest.approx(found["erased"]["words"]["uncertainty"][0])
    assert ends["lies_in"][0] is None
    assert 0 <= ends["lies_in"][-1] <= 1
    assert -1 <= found["length_spearman"] <= 1
    assert -1 <= found["ambiguity_spearman"] <= 1
    own, nested = results["generality"]["own"], results["generality"]["nested"]
    assert own["pairs"] == results["captions"]
    assert nested["pairs"] == nested["found"] > 0
    for one in (own["lies_in"], own["lies_in_other"], nested["lies_in"], nested["roc_auc"]):
        assert 0 <= one["low"] <= one["value"] <= one["high"] <= 1
    assert f"Image lies in its own caption (inclusion), of {own['pairs']} pairs" in html
    assert f"of {nested['pairs']:,} nested pairs" in html


def test_weights_chosen_on_the_evaluated_images_are_an_oracle(measured, capsys):
    out, results = measured
    (kind, found), *others = results["tolerance"].items()
    assert (kind, others) == ("oracle", [])
    assert (found["metric"], found["positives"]) == ("map_at_r", "all true captions")
    row = next(r for r in results["rows"] if (r["ranking"], r["positives"]) == ("tolerance", "all true captions"))
    assert row["chosen"] == "oracle"
    for way in ("i2t", "t2i"):
        at = dict(zip(found["curve"]["lambda"], found["curve"][way]))
        assert list(at) == list(GRID)
        assert at[found[way]] == max(at.values()) == pytest.approx(row[way]["map_at_r"], abs=0.02)
    html = (out / "report.html").read_text()
    assert "tolerance, oracle" in html
    assert "an <b>oracle</b>" in html
    assert (out / "figures" / "tolerance.pdf").exists()


def test_a_point_model_has_no_uncertainty_to_tell_of(captioned, tmp_path, capsys):
    save_model(create_model("ViT-Micro-32", probabilistic=False), tmp_path / "point")
    assert command(tmp_path / "point", captioned, tmp_path / "out", "--rankings", "mean") == 0
    told = capsys.readouterr().out
    assert "The model predicts no uncertainty." in told
    assert "Pearson" not in told
    html = (tmp_path / "out" / "report.html").read_text()
    assert "in a plane" in html
    assert "ncertain" not in html
    assert json.loads((tmp_path / "out" / "results.json").read_text())["uncertainty"] == {}


def test_markup_in_captions_and_unreadable_images(run_folder, tmp_path, capsys):
    from probemb.data.scenes import scene

    members = []
    for i in range(10):
        data = b"no" if i == 4 else jpeg(scene("bad", i))
        members += [(f"<i>{i}.jpg", data), (f"<i>{i}.txt", f"<script>alert({i})</script>\nother {i}".encode())]
    tar = write_tar(tmp_path / "a.tar", members)
    options = ("--rankings", "mean,csd", "--erased", "0")
    with pytest.raises(UserError, match="1 of 10 images"):
        command(run_folder, tar, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()
    options += ("--max-bad", "0.1")
    assert command(run_folder, tar, tmp_path / "out", *options) == 0
    html = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in html
    assert "&lt;script&gt;alert(3)" in html
    assert "<i>3" not in html
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["images"], results["captions"]) == (9, 18)
    assert [row["name"] for row in results["images_left_out"]] == ["<i>4"]
    assert "1 image left out" in capsys.readouterr().out


def test_plausible_matches_by_an_instances_file(run_folder, tmp_path):
    from probemb.data.scenes import scene

    members = [(f"{i}.jpg", jpeg(scene("p", i))) for i in range(6)]
    members += [(f"{i}.json", json.dumps({"captions": ["a", f"b {i}"], "image_id": i}).encode()) for i in range(6)]
    tar = write_tar(tmp_path / "a.tar", sorted(members))
    file = tmp_path / "instances.json.gz"
    pairs = [(0, 1), (0, 5), (1, 5), (2, 1), (2, 5), (3, 9), (99, 1)]  # images 4 and 5 have no objects
    annotations = [{"image_id": image, "category_id": category} for image, category in pairs]
    content = {"categories": [{"id": c} for c in (1, 5, 9)], "annotations": annotations}
    file.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert read_objects(file, list(range(6))).tolist() == [
        [1, 1, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]
    ]  # fmt: skip
    options = ("--instances", str(file), "--rankings", "csd,faiss-csd", "--erased", "0")
    command(run_folder, tar, tmp_path / "out", *options)
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    found = {row["positives"]: row for row in rows if row["positives"].startswith("plausible")}
    assert set(found) == {"plausible matches, pcme", "plausible matches, eccv-caption"}
    assert 0 < found["plausible matches, eccv-caption"]["i2t"]["r_precision"] <= 1
    assert found["plausible matches, pcme"]["t2i"]["per_zeta"]["0"]["r@1"] <= 1


def test_coco_benchmarks_beside_the_rest(monkeypatch):
    """Few images under COCO's ids, two captions more than the benchmarks know; 250 images take the place of 5,000."""
    image_ids, caption_ids = coco_test_ids()
    n = 250
    monkeypatch.setattr("probemb.metrics.coco.coco_test_ids", lambda: (image_ids[:n], caption_ids[: 5 * n]))
    real, few = package_metrics(), copy.copy(package_metrics())
    for name in ("coco_gts", "cxc_gts", "eccv_gts"):
        known = {"i2t": set(image_ids[:n]), "t2i": set(caption_ids[: 5 * n])}
        truth = getattr(real, name)
        setattr(few, name, {way: {q: items for q, items in truth[way].items() if q in known[way]} for way in known})
    monkeypatch.setattr("probemb.metrics.coco.package_metrics", lambda: few)

    captions = [["x"] * 5 for _ in range(n)]
    ids = [caption_ids[5 * i : 5 * i + 5] for i in range(n)]
    for extra in (False, True):
        if extra:
            for i in (0, 200):
                captions[i].append("sixth")
                ids[i].append(-i - 1)
        data = CaptionDataset(captions=captions, image_ids=image_ids[:n], caption_ids=ids)
        owner = torch.tensor(data.owner())
        images = gaussians(n)
        noise = torch.randn(len(owner), 8, generator=torch.Generator().manual_seed(1))
        texts = Gaussian(torch.nn.functional.normalize(images.mean[owner] + 0.1 * noise, dim=1), images.log_var[owner])
        pairs = EmbeddedPairs(images, texts, owner, list(range(n)), [])
        assert choose_benchmarks(None, data, has_objects=False) == ["coco", "cxc", "eccv"]
        rows, per_query, _ = evaluate_rankings(pairs, data, ["csd"], RankingOptions(), ["coco", "cxc", "eccv"])
        found = {row["positives"]: row for row in rows}
        assert list(found) == ["own captions", "COCO 5K", "COCO 1K", "CxC", "ECCV Caption", "CxC 1K"]
        assert found["COCO 1K"]["rsum"] > found["COCO 5K"]["rsum"] > 0
        if not extra:
            own = {way: {name: found["own captions"][way][name] for name in ("r@1", "r@5")} for way in ("i2t", "t2i")}
            for way, recalls in own.items():
                assert {name: found["COCO 5K"][way][name] for name in recalls} == pytest.approx(recalls, abs=1e-12)
        for name, metric, key in (("ECCV Caption", "mAP@R", "map_at_r"), ("CxC", "R-P", "r_precision")):
            for side, way in (("images", "i2t"), ("captions", "t2i")):
                mean = per_query[side][f"{name}: {metric}"].nanmean().item()
                assert mean == pytest.approx(found[name][way][key], abs=1e-12)
        for side, way in (("images", "i2t"), ("captions", "t2i")):  # each query within its own fold
            folds = per_query[side]["COCO 1K: R@1"]
            assert folds.isnan().sum() == 2 * extra * (side == "captions")
            assert folds.nanmean().item() == pytest.approx(found["COCO 1K"][way]["r@1"], abs=1e-12)
        assert quality(pairs, per_query)["images"]["COCO 1K: R@1"]["bins"]["counts"] == [25] * 10
        assert per_query["captions"]["COCO 5K: R@1"].isnan().sum() == 2 * extra
        assert quality(pairs, per_query)["captions"]["ECCV Caption: R@1"]["bins"]["counts"]
        objects = (torch.rand(n, 5, generator=torch.Generator().manual_seed(2)) < 0.4).long()
        rows, *_ = evaluate_rankings(pairs, data, ["csd"], RankingOptions(), ["coco"], objects)
        fold = {row["positives"]: row for row in rows}["plausible matches 1K, pcme"]
        values = []
        for i in range(0, n, n // 5):
            of = [k for k, number in enumerate(chain(*ids)) if number in caption_ids[5 * i : 5 * i + n]]
            scores = -csd(images[i : i + n // 5], texts[of])
            labels = objects[i : i + n // 5], objects[owner[of]]
            values.append(metrics.plausible_match_r_precision(scores, *labels)["pmrp"])
        assert fold["i2t"]["r_precision"] == pytest.approx(sum(values) / 5)


def test_re_ranking_beyond_the_candidates_keeps_the_order_of_the_means():
    images, texts = gaussians(6), gaussians(40, seed=1)
    options = RankingOptions(candidates=10)
    by_mean, ranked = (
        rank_all(make_ranker(name, images, texts, options), 6, 40, (20, 6)).i2t
        for name in ("faiss-mean", "faiss-rerank")
    )
    assert torch.equal(ranked[:, 10:], by_mean[:, 10:])
    assert torch.equal(ranked[:, :10].sort(dim=1).values, by_mean[:, :10].sort(dim=1).values)
    assert not torch.equal(ranked[:, :10], by_mean[:, :10])
    positives = own_captions(torch.arange(40) % 6, 6)
    assert positives.counts.tolist() == [7, 7, 7, 7, 6, 6]


def test_captions_with_words_that_a_model_does_not_know_are_told():
    data = CaptionDataset(captions=[["a red dog", "a zebra"], ["two <b>zebras</b>"]], image_ids=[1, 2])
    found = unknown_captions(WordTokenizer(["a", "red", "dog"], 8), data)
    assert (found["captions"], found["share"]) == (2, 2 / 3)
    assert found["words"][:2] == ["zebra", "two"]
    assert "2 captions (66.67 %) have words that the model does not know (such as zebra, two" in describe_unknown(found)
    assert unknown_captions(object(), data) is None


def test_a_collapsed_model_has_a_plane():
    """t-SNE divides its start by the spread of the points, and ends the process at NaN."""
    same = Gaussian(torch.eye(8)[:1].expand(40, 8), torch.zeros(40, 8))
    found = projection(EmbeddedPairs(same, same, torch.arange(40), list(range(40)), []))
    assert found["method"] == "the first two dimensions"
    assert found["images"]["x"].tolist() == [1] * 40


def test_what_is_erased_is_what_was_asked_for():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.ones(3, 3, 20, 20)
    for share in (0.0, 0.25, 1.0):
        erased = erase_pixels(pixels, share, generator)
        assert (erased == 0).double().mean().item() == pytest.approx(share, abs=0.01)
    regions = torch.ones(2, 5, 3)
    regions[1, 1:] = 0  # an image with one region
    for share, left in ((0.0, [5, 1]), (0.4, [3, 1]), (1.0, [1, 1])):
        assert (erase_regions(regions, share, generator) != 0).all(-1).sum(1).tolist() == left
    words = "a b c d e f g h i j"
    assert [prefix(words, share) for share in (0.0, 0.3, 1.0)] == [words, "a b c d e f g", ""]
    assert erase_words(words, 0.0, generator) == words
    left = erase_words(words, 0.3, generator).split()
    assert len(left) == 7
    assert left == sorted(left)
    assert erase_words("one", 0.8, generator) == ""
    assert evenly(100, 3) == [0, 50, 99]
    assert evenly(2, 5) == [0, 1]
    assert evenly(3, 1) == [0]


@pytest.mark.parametrize("name", MEASURES)
def test_uncertainty_by_every_measure(name):
    images, texts = gaussians(30), gaussians(60, seed=1)
    pairs = EmbeddedPairs(images, texts, torch.arange(60) // 2, list(range(30)), [])
    score = torch.rand(60, generator=torch.Generator().manual_seed(2))
    (bins,) = (
        found["bins"] for found in quality(pairs, {"captions": {"x": score}}, MEASURES[name])["captions"].values()
    )
    expected = {
        "sum": texts.var.sum(1),
        "log-det": torch.stack([torch.logdet(torch.diag(v)) for v in texts.var]),
        "geometric-mean": texts.std.log().mean(1).exp(),
    }[name].double()
    of_bins = torch.tensor([u * n for u, n in zip(bins["uncertainty"], bins["counts"])]).sum() / 60
    assert float(of_bins) == pytest.approx(float(expected.mean()), rel=1e-5)
    ranks = (metrics.average_ranks(x) for x in (expected, score.double()))
    assert bins["spearman"] == pytest.approx(metrics.pearson(*ranks), abs=1e-6)


def test_the_command_takes_a_measure(run_folder, captioned, tmp_path):
    options = ("--rankings", "csd", "--erased", "3", "--uncertainty")
    pages, found = {}, {}
    for name in ("sum", "log-det"):
        assert command(run_folder, captioned, tmp_path / name, *options, name) == 0
        found[name] = json.loads((tmp_path / name / "results.json").read_text())["uncertainty"]
        pages[name] = (tmp_path / name / "report.html").read_text()
    assert "u is the log-determinant of an item" in pages["log-det"]
    assert "u is the sum of an item" in pages["sum"]
    assert all(u > 0 for u in found["sum"]["erased"]["words"]["uncertainty"])
    assert all(u < 0 for u in found["log-det"]["erased"]["words"]["uncertainty"])  # variances far below 1
    assert found["sum"]["quality"] != found["log-det"]["quality"]


def test_small_sets_have_projections_and_extremes():
    pairs = EmbeddedPairs(gaussians(2), gaussians(3, seed=1), torch.tensor([0, 0, 1]), [0, 1], [])
    found = projection(pairs)
    assert len(found["captions"]["x"]) == 3
    assert "t-SNE" in found["method"]
    assert {len(rows) for rows in extremes(pairs.images.uncertainty()).values()} == {1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-bad", "2"), "--max-bad is 2.0"),
        (("--workers", "-3"), "--workers is -3"),
        (("--batch-size", "0"), "--batch-size is 0"),
        (("--device", "meta"), "--device meta is not supported"),
        (("--benchmarks", "coco"), "no COCO ids of its captions|are not in the data"),
        (("--benchmarks", "ecv"), "no benchmark 'ecv'. Did you mean 'eccv'"),
        (("--benchmarks", "pmrp"), "the objects that the images show"),
        (("--instances", "nowhere.json"), "nowhere.json does not exist"),
        (("--instances", __file__), "no object annotations in COCO's form"),
        (("--rankings", "cds"), "no ranking 'cds'. Did you mean 'csd'"),
        (("--rankings", ","), "--rankings names none"),
        (("--candidates", "0"), "--candidates is 0"),
        (("--tolerance.i2t", "-1"), "--tolerance.i2t is given without --tolerance.t2i"),
        (("--tolerance.i2t", "-1", "--tolerance.t2i", "nan"), "tolerance.t2i is nan"),
        (("--tolerance.i2t", "1", "--tolerance.t2i", "1", "--select-data", "x"), "the weights of tolerance are too"),
        (("--tolerance.i2t", "1", "--tolerance.t2i", "1", "--rankings", "csd"), "the rankings are csd"),
        (("--tolerance.i2t", "1", "--tolerance.t2i", "1", "--select-metric", "recall"), "has no effect on weights"),
        (("--select-split", "test"), "--select-split has no effect"),
        (("--erased", "-1"), "--erased is -1"),
        (("--images", "nowhere"), "image folder nowhere would not be used"),
        (("--second", "nowhere/at/all"), "There is no model at nowhere/at/all"),
    ],
)
def test_bad_input(options, message, run_folder, captioned, tmp_path):
    with pytest.raises(UserError, match=message):
        command(run_folder, captioned, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_an_index_that_cannot_be_is_refused_before_the_model_is_loaded(captioned, tmp_path):
    with pytest.raises(UserError, match="FAISS makes no index of 'Flatt'"):
        command(tmp_path / "no-model", captioned, tmp_path / "out", "--factory", "Flatt")
    with pytest.raises(UserError, match="There is no model"):  # rankings without FAISS need none
        command(tmp_path / "no-model", captioned, tmp_path / "out", "--factory", "Flatt", "--rankings", "csd")
    with pytest.raises(UserError, match=r"'IVF4096,Flat' cannot be made from .* items: it needs at least 4,096"):
        command(tmp_path / "no-model", captioned, tmp_path / "out", "--factory", "IVF4096,Flat")


def test_what_is_missing_is_said(run_folder, captioned, tmp_path):
    with pytest.raises(UserError, match="--model is missing"):
        main([])
    with pytest.raises(UserError, match="--data is missing"):
        main(["--model", "x"])
    with pytest.raises(UserError, match="no split 'train'"):
        main(["--model", str(run_folder), "--data", str(captioned), "--split", "train"])
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(UserError, match="was not written by this command"):
        command(run_folder, captioned, tmp_path)
    file = tmp_path / "instances.json"
    file.write_text(json.dumps({"categories": [{"id": 1}], "annotations": [{"image_id": 7, "category_id": 1}]}))
    with pytest.raises(UserError, match="None of the 24 images is annotated"):
        command(run_folder, captioned, tmp_path / "out", "--instances", str(file))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--data": "nowhere"}, "does not exist"),
        ({"--data": "."}, "holds no webdataset shards"),
        ({"--data": "labelled"}, "no image with a caption"),
    ],
)
def test_data_without_captions(options, message, shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {name: str(shards) if value == "labelled" else value for name, value in options.items()}
    with pytest.raises(UserError, match=message):
        main(["--model", "x", *(word for pair in options.items() for word in pair)])
    assert list(tmp_path.iterdir()) == []


def test_the_split_is_the_test_split_where_there_are_several(run_folder, captioned, tmp_path):
    """By default: all of a folder of one split or of a tar, and what is chosen is said."""
    folder = tmp_path / "data"
    for split, n in (("train", 1), ("val", 1), ("test", 2)):
        for i in range(n):
            path = folder / split / f"{i}.tar"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(captioned.read_bytes())
    options = ["--rankings", "mean", "--erased", "0", "--out", str(tmp_path / "out"), "--model", str(run_folder)]
    for data, images, split in (
        (folder, 48, "test"),
        (folder / "val", 24, None),
        (folder / "test" / "0.tar", 24, None),
    ):
        assert main([*options, "--data", str(data)]) == 0
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        assert (results["images"], results["config"]["split"]) == (images, split)


def test_results_go_into_the_run_folder_and_to_no_other_command(captioned, shards, tmp_path):
    save_model(create_model("ViT-Micro-32"), tmp_path / "run" / "model")
    options = ["--model", str(tmp_path / "run"), "--data", str(captioned), "--rankings", "mean", "--erased", "0"]
    for _ in range(2):
        assert main(options) == 0
    assert {file.name for file in (tmp_path / "run" / "retrieval").iterdir()} == {
        "results.json",
        "report.html",
        "figures",
    }
    from zeroshot.imagenet import main as imagenet

    with pytest.raises(UserError, match="was not written by this command"):
        imagenet([*options[:2], "--data", str(shards), "--out", str(tmp_path / "run" / "retrieval")])


def test_captions_and_scenes_are_found(captioned):
    found = find_captions(captioned)
    assert len(found.images) == 24
    assert all(len(texts) == 3 for texts in found.captions)
    kept = [0, 5, 7]
    match = exact_match(found, kept)
    told = [caption for i in kept for caption in found.scenes[i][1]]
    for row, i in enumerate(kept):
        assert match[row].tolist() == [matches(caption, found.scenes[i][0]) for caption in told]
        assert match[row, 3 * row : 3 * row + 3].all()


def test_plain_captions_have_no_scenes(tmp_path, pictures):
    members = [("a.jpg", pictures[0][1]), ("a.txt", b"one\ntwo\n"), ("b.jpg", pictures[1][1]), ("b.txt", b"three")]
    found = find_captions(write_tar(tmp_path / "a.tar", members))
    assert found.captions == [["one", "two"], ["three"]]
    assert found.scenes is None


def test_scores_of_a_perfect_embedding_and_of_uncertain_rivals():
    mean = torch.eye(6)
    owner = torch.arange(6).repeat_interleave(2)
    images = Gaussian(mean, torch.full((6, 6), -5.0))
    data = CaptionDataset(captions=[["x", "y"]] * 6, image_ids=list("abcdef"))

    def rows(texts):
        pairs = EmbeddedPairs(images, texts, owner, list(range(6)), [])
        return evaluate_rankings(pairs, data, ["csd", "mean"], RankingOptions())[0]

    for row in rows(Gaussian(mean[owner], torch.full((12, 6), -5.0))):
        assert row["rsum"] == pytest.approx(600)
        assert row["i2t"]["map_at_r"] == row["t2i"]["r_precision"] == 1
    wrong = torch.nn.functional.normalize(mean[owner] + 0.9 * mean[(owner + 1) % 6], dim=1)
    wrong[::2] = mean[owner][::2]
    spread = torch.full((12, 6), -5.0)
    spread[1::2] = 2.0  # the captions that lie between two images say so
    by_csd, by_mean = rows(Gaussian(wrong, spread))
    assert by_csd["i2t"]["r@1"] == 1
    assert by_csd["t2i"] == by_mean["t2i"]  # a query's own uncertainty is a constant


def test_too_many_exact_pairs_are_refused():
    def world(n_captions):
        return CaptionDataset(captions=[["x"] * (n_captions // 20_000)] * 20_000, image_ids=[], scenes=[])

    refuse_too_many_exact_pairs(world(100_000))
    with pytest.raises(UserError, match="20,000 images and 120,000 captions are 2,400,000,000 pairs"):
        refuse_too_many_exact_pairs(world(120_000))


def test_help_comes_without_torch():
    code = "import sys; from zeroshot.retrieval import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0
    assert "--benchmarks" in found.stdout


def test_the_table_of_what_each_score_knows(measured):
    """u's row is the correlation that the command reports elsewhere; the page shows every score and its definition."""
    out, results = measured
    found, html = results["predictors"], (out / "report.html").read_text()
    for side in ("captions", "images"):
        rows = {row["score"]: row for row in found[side]}
        assert list(rows) == ["u", "expected-matches", "entropy", "spread", "distance", "margin"]
        quality = results["uncertainty"]["quality"][side]["own captions: R@1"]
        assert rows["u"]["r@1"]["value"] == pytest.approx(quality["bins"]["spearman"])
        curve = quality["rejection"]
        gain = (curve["area"] - curve["random"]) / (curve["oracle"] - curve["random"])
        assert rows["u"]["gain"]["value"] == pytest.approx(gain)
        assert all(row["title"] in html for row in rows.values())
    u = found["captions"][0]
    assert u["ambiguity"]["value"] == pytest.approx(results["uncertainty"]["ambiguity_spearman"])
    assert u["accepted_share"] is None
    assert "What each score of a query knows" in html


def test_the_warning_names_the_direction_in_which_u_is_turned_round(capsys):
    def row(spearman, difference):
        parts = {"certain": 0.1, "rest": 0.1 - difference, "difference": {"value": difference, "se": 0.01}}
        return {"score": "u", "title": "u", "ambiguity": None, "accepted_share": None,
                "r@1": {"value": spearman, "se": 0.02}, "halves": parts, "gain": None}  # fmt: skip

    good, turned, halved = row(-0.3, 0.2), row(0.3, 0.0), row(0.0, -0.2)
    assert warning({"captions": [good], "images": [good]}) is None
    assert warning({"captions": [row(0.03, -0.01)], "images": [good]}) is None  # chance
    for one in (turned, halved):
        found = {"captions": [one], "images": [good]}
        line = warning(found)
        assert line.startswith("warning: u runs against recall here (captions: ")
        assert "images" not in line
        assert "\n" not in line
        assert "--calibrate" in line
    assert "; images: " in warning({"captions": [turned], "images": [halved]})
    print_predictors(found | {"match_probability": "x", "match_of_first": None, "warning": line})
    assert line in capsys.readouterr().out
