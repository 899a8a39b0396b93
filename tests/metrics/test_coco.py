"""The COCO benchmarks against the authors' numbers and the package's own scores."""

import numpy as np
import pytest
import torch

from probemb.data.captions.dataset import CaptionDataset
from probemb.evaluation.embedding import EmbeddedPairs
from probemb.evaluation.rankings import Ranker, Scores
from probemb.evaluation.retrieval import all_kinds, measure
from probemb.gaussian import Gaussian
from probemb.metrics.coco import coco_rows, coco_test_ids, package_metrics
from probemb.metrics.retrieval import ranking
from probemb.metrics.uncertainty import uncertainty_bins


def test_ids_in_any_order_and_with_captions_to_spare():
    image_ids, caption_ids = coco_test_ids()
    images, captions = coco_rows([str(i) for i in reversed(image_ids)], [7, *caption_ids, "x"])
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

    class Given(Ranker):
        def __init__(self, scores):
            self.scores = Scores(torch.arange(5000), torch.arange(25000), lambda i, c: scores[i][:, c])

    few = Gaussian(*torch.zeros(2, 1, 2))
    data = CaptionDataset([["x"] * 5] * 5000, image_ids, [caption_ids[i : i + 5] for i in range(0, 25000, 5)])
    pairs = EmbeddedPairs(few[[0] * 5000], few[[0] * 25000], torch.arange(25000) // 5, [], [], data)
    kinds = all_kinds(pairs, ("coco", "cxc", "eccv"))
    _, got, single = measure(Given(torch.from_numpy(scores)), kinds)
    for way, side in (("i2t", "images"), ("t2i", "captions")):
        for title, name in (("COCO 1K", "coco_1k"), ("COCO 5K", "coco_5k"), ("CxC", "cxc")):
            for k in (1, 5, 10):
                assert got[title][way][f"r@{k}"] == pytest.approx(float(ref[f"{name}_r{k}__{way}"]), abs=1e-9)
        for name, theirs in (("map_at_r", "map_at_r"), ("r_precision", "rprecision"), ("r@1", "r1")):
            assert got["ECCV Caption"][way][name] == pytest.approx(float(ref[f"eccv_{theirs}__{way}"]), abs=1e-9)
        for k in (1, 5, 10):
            mean = single[side][f"ECCV Caption: R@{k}"].nanmean().item()
            assert mean == pytest.approx(float(ref[f"eccv_r{k}__{way}"]), abs=1e-9)

    part = torch.from_numpy(scores[:300, :1500])
    match = torch.arange(1500) // 5 == torch.arange(300)[:, None]
    for way, s, m in (("i2t", part, match), ("t2i", part.T, match.T)):
        top = ranking(s, s.shape[1])
        ranks = 1 + m.gather(1, top).int().argmax(1).double()
        recalls = [100 * (ranks <= k).double().mean() for k in (1, 5, 10)]
        want = ref[f"karpathy300__{way}_r1_r5_r10_medr_meanr"]
        np.testing.assert_allclose([*recalls, ranks.quantile(0.5).floor(), ranks.mean()], want, atol=1e-9)

    caption_sigma -= 0.4 * own[:, None]
    image_sigma -= 0.4 * np.repeat(own.reshape(-1, 5).mean(1), 5)[:, None]
    uncertainty = {"img": np.exp(image_sigma).sum(1)[::5], "cap": np.exp(caption_sigma).sum(1)}
    for title, metric, name in (
        ("ECCV Caption", "mAP@R", "eccv_map_at_r"), ("ECCV Caption", "R@1", "eccv_r1"), ("CxC", "R@1", "cxc_r1"),
        ("COCO 5K", "R@1", "coco_5k_r1"),
    ):  # fmt: skip
        for modality, side in (("img", "images"), ("cap", "captions")):
            u = torch.from_numpy(uncertainty[modality])
            bins = uncertainty_bins(u, single[side][f"{title}: {metric}"], 5, cut_over_all=True)
            want = ref[f"unc5__{name}__{modality}"]
            np.testing.assert_allclose(bins["accuracy"], want, atol=1e-9)
