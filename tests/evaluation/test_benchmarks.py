"""What the retrieval command alone uses: COCO's benchmarks beside the rest, uncertainty and what is erased."""

import copy
import gzip
import json
from itertools import chain

import pytest
import torch

from probemb import Gaussian, metrics
from probemb.data.captions.find import CaptionDataset, find_captions
from probemb.data.compositions.coco import read_objects
from probemb.distances import csd
from probemb.evaluation.benchmarks import choose_benchmarks, evaluate_rankings
from probemb.evaluation.embed_pairs import EmbeddedPairs
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.rankings import RankingOptions, evaluate_retrieval, make_ranker, own_captions, rank_all
from probemb.evaluation.tolerance import GRID
from probemb.evaluation.uncertainty import (
    erase_pixels,
    erase_regions,
    erase_words,
    evenly,
    prefix,
    projection,
    quality,
)
from probemb.metrics.coco import coco_test_ids, package_metrics
from probemb.models import load_model


def gaussians(n, dim=8, seed=0):
    r = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(n, dim, generator=r), dim=1)
    return Gaussian(mean, torch.randn(n, dim, generator=r) - 3)


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


def test_objects_of_images(tmp_path):
    pairs = [(0, 1), (0, 5), (1, 5), (2, 9), (99, 1)]  # image 3 has no objects
    annotations = [{"image_id": image, "category_id": category} for image, category in pairs]
    content = {"categories": [{"id": c, "name": f"c{c}"} for c in (1, 5, 9)], "annotations": annotations}
    (tmp_path / "instances.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    found = read_objects(tmp_path / "instances.json.gz", list(range(4)))
    assert found.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
