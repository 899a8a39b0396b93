"""The COCO benchmarks against the authors' numbers and the package's own scores."""

import contextlib
import io

import numpy as np
import pytest
import torch

from probemb import metrics
from probemb.errors import UserError
from probemb.metrics.coco import _named, coco_depth, coco_test_ids, package_metrics


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


@pytest.fixture(scope="module")
def recipe():
    """Scores (5000, 25000) float32 with ids, made here: own captions close, other positives of ECCV Caption closer."""
    image_ids, caption_ids = coco_test_ids()
    scores = torch.randn(5000, 25000, generator=torch.Generator().manual_seed(0))
    scores[torch.arange(25000) // 5, torch.arange(25000)] += 3
    return scores, image_ids, caption_ids


@pytest.mark.slow
def test_equal_the_package_given_our_ranked_ids(recipe):
    """Single queries, computed here, against the package's own scores; COCO 1K against blocks of the matrix."""
    scores, image_ids, caption_ids = recipe
    rank = rank_in(scores)
    ours = metrics.coco_benchmarks(rank, image_ids, caption_ids)
    tops = rank(*metrics.coco_rows(image_ids, caption_ids), coco_depth())
    with contextlib.redirect_stderr(io.StringIO()):
        theirs = package_metrics().compute_all_metrics(
            _named(tops)["i2t"], _named(tops)["t2i"],
            target_metrics=("coco_5k_recalls", "cxc_recalls", "eccv_map_at_r", "eccv_rprecision"),
        )  # fmt: skip
    single = metrics.coco_query_metrics(tops)
    for way in ("i2t", "t2i"):
        for name in ("coco_5k", "cxc"):
            for k in (1, 5, 10):
                assert ours[name][way][f"r@{k}"] == pytest.approx(theirs[f"{name}_r{k}"][way], abs=1e-12)
        assert ours["eccv"][way]["map_at_r"] == pytest.approx(theirs["eccv_map_at_r"][way], abs=1e-12)
        for name in ("coco_5k", "cxc", "eccv"):
            for metric, value in ours[name][way].items():
                assert single[name][way][metric].nanmean().item() == pytest.approx(value, abs=1e-12)
    exact = {way: torch.zeros(5000, 25000, dtype=torch.bool) for way in ("i2t", "t2i")}
    image_at, caption_at = ({name: i for i, name in enumerate(ids)} for ids in (image_ids, caption_ids))
    for image, items in package_metrics().cxc_gts["i2t"].items():
        exact["i2t"][image_at[image], [caption_at[item] for item in items if item in caption_at]] = True
    for caption, items in package_metrics().cxc_gts["t2i"].items():
        exact["t2i"][[image_at[item] for item in items if item in image_at], caption_at[caption]] = True
    for way in ("i2t", "t2i"):
        folds = [(slice(1000 * f, 1000 * (f + 1)), slice(5000 * f, 5000 * (f + 1))) for f in range(5)]
        parts = [(scores[fold], exact[way][fold]) for fold in folds]
        found = [metrics.retrieval_metrics(*(x if way == "i2t" else x.T for x in part)) for part in parts]
        for metric in ("r@1", "r@5", "r@10", "r_precision"):
            mean = sum(fold[metric] for fold in found) / 5
            assert ours["cxc_1k"][way][metric] == pytest.approx(mean, abs=1e-12)
    match = torch.arange(5000) // 5 == torch.arange(1000)[:, None]
    blocks = [scores[1000 * f : 1000 * (f + 1), 5000 * f : 5000 * (f + 1)] for f in range(5)]
    for way, folds in (("i2t", [(s, match) for s in blocks]), ("t2i", [(s.T, match.T) for s in blocks])):
        found = [metrics.retrieval_metrics(s, m) for s, m in folds]
        for k in (1, 5, 10):
            mean = sum(fold[f"r@{k}"] for fold in found) / 5
            assert ours["coco_1k"][way][f"r@{k}"] == pytest.approx(mean, abs=1e-12)
    assert ours["coco_1k"]["rsum"] == pytest.approx(metrics.rsum(ours["coco_1k"]["i2t"], ours["coco_1k"]["t2i"]))


def test_ids_in_any_order_and_with_captions_to_spare():
    image_ids, caption_ids = coco_test_ids()
    images, captions = metrics.coco_rows([str(i) for i in reversed(image_ids)], [7, *caption_ids, "x"])
    assert images.tolist() == list(reversed(range(5000)))
    assert captions.tolist() == list(range(1, 25001))


def test_other_ids_are_refused():
    image_ids, caption_ids = coco_test_ids()
    with pytest.raises(UserError, match="2 of the 25,000 captions of COCO's test split are not in the data"):
        metrics.coco_rows(image_ids, caption_ids[2:])
    with pytest.raises(UserError, match="5,000 of the 5,000 images"):
        metrics.coco_rows(["a", "b"], caption_ids)
    with pytest.raises(UserError, match="no COCO ids of its captions"):
        metrics.coco_rows(image_ids, None)
    with pytest.raises(UserError, match="Did you mean 'cxc'"):
        metrics.coco_benchmarks(None, image_ids, caption_ids, ["cxcc"])


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
