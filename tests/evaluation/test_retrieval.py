"""Benchmarks of COCO beside the rest, validation, the choice of the variances' weights, re-ranking."""

import copy
import gzip
import json
from itertools import chain

import pytest
import torch

from probemb import Gaussian
from probemb.data.captions.dataset import CaptionDataset
from probemb.data.captions.find import find_captions
from probemb.data.compositions.find import read_objects
from probemb.distances import csd
from probemb.evaluation import retrieval
from probemb.evaluation.embedding import EmbeddedPairs
from probemb.evaluation.rankings import Ranker, RankingOptions, Tolerance
from probemb.evaluation.uncertainty import quality
from probemb.metrics.coco import coco_test_ids, package_metrics
from probemb.metrics.plausible import plausible_match_r_precision
from probemb.metrics.retrieval import Positives, mean_metrics, score_metrics
from tests.losses.points import unit_gaussians
from tools.make_scenes.command import Plan, make


def measured(scores, match):
    return mean_metrics(score_metrics(lambda rows: scores[rows], Positives.from_matrix(match)))


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
    for i in (0, 200):
        captions[i].append("sixth")
        ids[i].append(-i - 1)
    data = CaptionDataset(captions=captions, image_ids=image_ids[:n], caption_ids=ids)
    owner = torch.tensor(data.owner())
    images = unit_gaussians(n)
    noise = torch.randn(len(owner), 8, generator=torch.Generator().manual_seed(1))
    texts = Gaussian(torch.nn.functional.normalize(images.mean[owner] + 0.1 * noise, dim=1), images.log_var[owner])
    pairs = EmbeddedPairs(images, texts, owner, list(range(n)), [], data)
    assert retrieval.choose_benchmarks(None, data, has_objects=False) == ["coco", "cxc", "eccv"]
    rows, per_query, _ = retrieval.evaluate_rankings(pairs, ["csd"], RankingOptions(), ["coco", "cxc", "eccv"])
    found = {row["positives"]: row for row in rows}
    assert list(found) == ["own captions", "COCO 5K", "COCO 1K", "CxC", "ECCV Caption", "CxC 1K"]
    assert found["COCO 1K"]["rsum"] > found["COCO 5K"]["rsum"] > 0
    for name in ("COCO 1K: R@1", "COCO 5K: R@1"):  # of 1K each query within its own fold
        assert per_query["captions"][name].isnan().sum() == 2
    assert quality(pairs, per_query)["images"]["COCO 1K: R@1"]["bins"]["counts"] == [25] * 10
    assert quality(pairs, per_query)["captions"]["ECCV Caption: R@1"]["bins"]["counts"]
    objects = (torch.rand(n, 5, generator=torch.Generator().manual_seed(2)) < 0.4).long()
    rows, *_ = retrieval.evaluate_rankings(pairs, ["csd"], RankingOptions(), ["coco"], objects)
    fold = {row["positives"]: row for row in rows}["plausible matches 1K, pcme"]
    values = []
    for i in range(0, n, n // 5):
        of = [k for k, number in enumerate(chain(*ids)) if number in caption_ids[5 * i : 5 * i + n]]
        scores = -csd(images[i : i + n // 5], texts[of])
        labels = objects[i : i + n // 5], objects[owner[of]]
        values.append(plausible_match_r_precision(lambda rows, s=scores: s[rows], *labels)["pmrp"])
    assert fold["i2t"]["r_precision"] == pytest.approx(sum(values) / 5)


def test_re_ranking_beyond_the_candidates_keeps_the_order_of_the_means():
    images, texts = unit_gaussians(6), unit_gaussians(40, seed=1)
    options = RankingOptions(candidates=10)
    by_mean, ranked = (Ranker(name, images, texts, options)((20, 6)).i2t for name in ("faiss-mean", "faiss-rerank"))
    assert torch.equal(ranked[:, 10:], by_mean[:, 10:])
    assert torch.equal(ranked[:, :10].sort(dim=1).values, by_mean[:, :10].sort(dim=1).values)
    assert not torch.equal(ranked[:, :10], by_mean[:, :10])


def test_objects_of_images(tmp_path):
    pairs = [(0, 1), (0, 5), (1, 5), (2, 9), (99, 1)]  # image 3 has no objects
    annotations = [{"image_id": image, "category_id": category} for image, category in pairs]
    content = {"categories": [{"id": c, "name": f"c{c}"} for c in (1, 5, 9)], "annotations": annotations}
    (tmp_path / "instances.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    found = read_objects(tmp_path / "instances.json.gz", list(range(4)))
    assert found.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    out = tmp_path_factory.mktemp("birds") / "world"
    make(Plan(train=0, val=0, classes_images=0, size=32, captions=2, class_captions=96), out, workers=1)
    return out / "by-class"


def test_captions_of_the_class_are_positives_and_lost_images_are_left_out(birds):
    data = find_captions(birds, "test")
    kept = [i for i in range(len(data)) if i != 3]
    owner = torch.arange(len(kept)).repeat_interleave(2)
    zeros = Gaussian(*torch.zeros(2, 23, 4)), Gaussian(*torch.zeros(2, 46, 4))
    kinds = retrieval.known_positives(EmbeddedPairs(*zeros, owner, kept, [], data.only(kept)))
    assert list(kinds) == [retrieval.OWN, retrieval.CLASS, retrieval.TRUE]
    names = [data.classes[i] for i in kept]
    for i, name in enumerate(names):
        wanted = [j for j in range(46) if names[owner[j]] == name]
        found = kinds[retrieval.CLASS].of_queries(i, i + 1).keys.tolist()
        assert found == wanted
        assert set(kinds[retrieval.OWN].of_queries(i, i + 1).keys.tolist()) <= set(wanted)


N, M, DIM = 30, 60, 16


def spread(n, u, generator):
    """Random directions with these uncertainties (n,)."""
    mean = torch.nn.functional.normalize(torch.randn(n, DIM, generator=generator, dtype=torch.float64), dim=1)
    return Gaussian(mean, (u / DIM).log()[:, None].expand(n, DIM).contiguous())


@pytest.fixture
def vague():
    """Captions that fit more images the larger their variance; images alike."""
    draw = torch.Generator().manual_seed(0)
    u = torch.rand(M, generator=draw, dtype=torch.float64) + 0.1
    match = torch.rand(N, M, generator=draw, dtype=torch.float64) < 0.6 * u
    images, texts = spread(N, torch.full((N,), 0.3, dtype=torch.float64), draw), spread(M, u, draw)
    pairs = EmbeddedPairs(images, texts, torch.arange(M) // 2, list(range(N)), [])
    return pairs, Positives.from_matrix(match)


def test_the_curve_is_that_of_the_ranking_under_every_weight(vague, monkeypatch):
    pairs, positives = vague
    whole = retrieval.choose_tolerance(pairs, positives)
    monkeypatch.setattr("probemb.metrics.retrieval.CHUNK_ELEMENTS", 7 * M)
    recall = retrieval.choose_tolerance(pairs, positives, "recall")
    assert retrieval.choose_tolerance(pairs, positives).curve == whole.curve  # by blocks of queries
    for place, weight in enumerate(retrieval.GRID):
        options = RankingOptions(tolerance=Tolerance(weight, weight))
        found = retrieval.retrieval(pairs.images, pairs.texts, positives, "tolerance", options)
        for way in ("i2t", "t2i"):
            assert whole.curve[way][place] == pytest.approx(found[way]["map_at_r"], abs=1e-12)
            mean = sum(found[way][f"r@{k}"] for k in (1, 5, 10)) / 3
            assert recall.curve[way][place] == pytest.approx(mean, abs=1e-12)


def test_vague_captions_that_fit_more_images_want_a_tolerance(vague):
    pairs, positives = vague
    found = retrieval.choose_tolerance(pairs, positives)
    assert found.i2t < 0
    assert found.t2i == 0  # images of one variance: all weights are equal, and 0 is the simplest
    at = dict(zip(found.curve["lambda"], found.curve["i2t"]))
    assert at[found.i2t] == max(at.values()) > at[0] > at[1]
    assert (found.chosen, found.metric) == ("oracle", "map_at_r")
    few = Positives.from_pairs(positives.keys // M, M - 1 - positives.keys % M, N, M)
    turned = pairs._replace(texts=pairs.texts[torch.arange(M - 1, -1, -1)])
    assert retrieval.choose_tolerance(turned, few).curve["i2t"] == pytest.approx(found.curve["i2t"])
