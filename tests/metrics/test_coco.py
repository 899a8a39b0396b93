"""The COCO benchmarks against the authors' numbers and the package's own scores."""

import numpy as np
import pytest
import torch

from probemb import metrics
from probemb.metrics.coco import coco_depth, coco_test_ids, package_metrics


def rank_in(scores):
    """A `rank` for coco_benchmarks over a whole matrix."""

    known = {}

    def rank(images, captions, depth):
        key = (int(images[0]), len(images), depth)
        if key not in known:
            known[key] = fresh(images, captions, depth)
        return known[key]

    def fresh(images, captions, depth):
        whole = len(images) == len(scores)
        part = scores if whole else scores[images[0] : images[-1] + 1, captions[0] : captions[-1] + 1]
        return metrics.rank_both(lambda rows: part[rows], len(images), len(captions), depth)

    return rank


def test_ids_in_any_order_and_with_captions_to_spare():
    image_ids, caption_ids = coco_test_ids()
    images, captions = metrics.coco_rows([str(i) for i in reversed(image_ids)], [7, *caption_ids, "x"])
    assert images.tolist() == list(reversed(range(5000)))
    assert captions.tolist() == list(range(1, 25001))


def test_equal_the_authors_numbers(parity):
    """Every value of the reference, from scores made by its recipe."""
    ref = parity("05b_eccv_caption_metrics")
    image_ids, caption_ids = ref["image_id_order"].tolist(), ref["caption_id_order"].tolist()
    assert (image_ids, caption_ids) == coco_test_ids()
    draws = np.random.RandomState(int(ref["seed"]))
    scores = draws.standard_normal((5000, 25000))
    image_sigma = draws.standard_normal((25000, 4)) * 0.5 - 3
    caption_sigma = draws.standard_normal((25000, 4)) * 0.5 - 3
    columns = np.arange(25000)
    scores[columns // 5, columns] += float(ref["boost_own"])
    image_at, caption_at = ({name: i for i, name in enumerate(ids)} for ids in (image_ids, caption_ids))
    for image, captions in package_metrics().eccv_gts["i2t"].items():
        for caption in captions:
            if caption in caption_at:
                scores[image_at[image], caption_at[caption]] += float(ref["boost_eccv"])
    assert scores[0].sum() == pytest.approx(float(ref["check_sum_S_row0"]), abs=1e-9)
    own = scores[columns // 5, columns]

    rank = rank_in(torch.from_numpy(scores))
    got = metrics.coco_benchmarks(rank, image_ids, caption_ids)
    tops = rank(torch.arange(5000), torch.arange(25000), coco_depth())
    single = metrics.coco_query_metrics(tops)
    for way in ("i2t", "t2i"):
        for name in ("coco_1k", "coco_5k", "cxc"):
            for k in (1, 5, 10):
                assert got[name][way][f"r@{k}"] == pytest.approx(float(ref[f"{name}_r{k}__{way}"]), abs=1e-9)
        for name, theirs in (("map_at_r", "map_at_r"), ("r_precision", "rprecision"), ("r@1", "r1")):
            assert got["eccv"][way][name] == pytest.approx(float(ref[f"eccv_{theirs}__{way}"]), abs=1e-9)
        for k in (1, 5, 10):
            mean = single["eccv"][way][f"r@{k}"].nanmean().item()
            assert mean == pytest.approx(float(ref[f"eccv_r{k}__{way}"]), abs=1e-9)

    part = torch.from_numpy(scores[:300, :1500])
    match = torch.arange(1500) // 5 == torch.arange(300)[:, None]
    for way, s, m in (("i2t", part, match), ("t2i", part.T, match.T)):
        found = metrics.rank_summary(metrics.first_match_ranks(s, m))
        want = ref[f"karpathy300__{way}_r1_r5_r10_medr_meanr"]
        np.testing.assert_allclose([100 * found[f"r@{k}"] for k in (1, 5, 10)], want[:3], atol=1e-9)
        np.testing.assert_allclose([found["median_rank"], found["mean_rank"]], want[3:], atol=1e-9)

    caption_sigma -= 0.4 * own[:, None]
    image_sigma -= 0.4 * np.repeat(own.reshape(-1, 5).mean(1), 5)[:, None]
    uncertainty = {"img": np.exp(image_sigma).sum(1)[::5], "cap": np.exp(caption_sigma).sum(1)}
    for benchmark, metric in (("eccv", "map_at_r"), ("eccv", "r@1"), ("cxc", "r@1"), ("coco_5k", "r@1")):
        for modality, way in (("img", "i2t"), ("cap", "t2i")):
            u = torch.from_numpy(uncertainty[modality])
            bins = metrics.uncertainty_bins(u, single[benchmark][way][metric], 5, cut_over_all=True)
            want = ref[f"unc5__{benchmark}_{metric.replace('@', '')}__{modality}"]
            np.testing.assert_allclose(bins.accuracy, want, atol=1e-9)
