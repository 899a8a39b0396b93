"""Retrieval metrics of 5,000 images and 25,000 captions, as in COCO's test split, against the published loops.

    python -m tools.bench.metrics
    python -m tools.bench.metrics --dim 512

Two tables, both from embeddings:
R@1, R@5, R@10 of COCO 5K and COCO 1K, CxC and ECCV Caption. The loops follow the published evaluation: the whole
similarity matrix, one argsort for each image and each caption, again for each of the five folds, and the first 500 ids
of each query for the package eccv_caption. As published, they use float64, numpy's default (PCME++, VSE infinity);
--peer-float32 measures the effect.
PMRP with zeta = 0, 1, 2 for random labels (80 categories, about three an image): the loops rank in the same way,
compare the labels of all pairs of images, and count for each zeta and query.
"""

from __future__ import annotations

import contextlib
import io
from functools import partial

from probemb.cli.command import Parser, run_command

N_IMAGES, N_CAPTIONS, KEPT = 5000, 25000, 500
CATEGORIES, ZETAS = 80, (0, 1, 2)


def main() -> None:
    parser = Parser(prog="python -m tools.bench.metrics", description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--peer-float32", action="store_true", help="run the loops in float32, unlike the published ones"
    )
    options = parser.parse_args()

    from tools.bench.timing import peak_memory, report, time_in_turn

    precision = "float32" if options.peer_float32 else "float64"
    benches = {
        "COCO 5K, 1K, CxC and ECCV Caption": (partial(argsort_loops, precision=precision), ours),
        "PMRP": (partial(pmrp_loops, precision=precision), our_pmrp),
    }

    def prepared(run):
        embedded = embeddings(options.dim)
        return lambda: run(embedded)

    # Memory first: a process that has computed with several threads cannot be forked.
    peaks = {title: [peak_memory(lambda run=run: prepared(run)) for run in runs] for title, runs in benches.items()}
    embedded = embeddings(options.dim)
    for title, runs in benches.items():
        variants = {name: (lambda run=run: run(embedded)) for name, run in zip(("argsort loops", "probemb"), runs)}
        assert_equal(*(run() for run in variants.values()))
        seconds = time_in_turn(variants, options.repeats, warmup=0)
        memory = {name: {"peak": f"{peak / 2**20:,.0f} MiB"} for name, peak in zip(variants, peaks[title])}
        title = f"{title} from embeddings, D = {options.dim}, loops in {precision}"
        report(title, seconds, "argsort loops", "at most 0.1 of the loops' time and 2,048 MiB", memory)


def embeddings(dim: int):
    """Gaussians of images, and of captions close to their images."""
    import torch
    from torch.nn import functional as F

    from probemb import Gaussian

    r = torch.Generator().manual_seed(0)
    images = F.normalize(torch.randn(N_IMAGES, dim, generator=r), dim=1)
    noise = torch.randn(N_CAPTIONS, dim, generator=r) * 0.25
    captions = F.normalize(images.repeat_interleave(5, dim=0) + noise, dim=1)
    log_vars = [torch.randn(n, dim, generator=r) * 0.5 - 9 for n in (N_IMAGES, N_CAPTIONS)]
    return Gaussian(images, log_vars[0]), Gaussian(captions, log_vars[1])


def similarities(embedded, precision: str):
    """-CSD of all pairs of unit means, (N, M)."""
    import numpy as np

    images, captions = ((g.mean.numpy().astype(precision), g.log_var.numpy().astype(precision)) for g in embedded)
    distance = 2 - 2 * images[0] @ captions[0].T
    distance = distance + np.exp(images[1]).sum(1)[:, None]
    return -(distance + np.exp(captions[1]).sum(1)[None, :])


def own_ranks(scores) -> dict:
    """Rank from 0 of each query's closest match, one argsort a query; caption k belongs to image k // 5."""
    import numpy as np

    ranks = {"i2t": [], "t2i": []}
    orders = {"i2t": [], "t2i": []}
    for i in range(len(scores)):
        order = np.argsort(scores[i])[::-1]
        ranks["i2t"].append(min(np.where(order == k)[0][0] for k in range(5 * i, 5 * i + 5)))
        orders["i2t"].append(order[:KEPT])
    columns = scores.T
    for k in range(len(columns)):
        order = np.argsort(columns[k])[::-1]
        ranks["t2i"].append(np.where(order == k // 5)[0][0])
        orders["t2i"].append(order[:KEPT])
    return {way: (np.array(ranks[way]), orders[way]) for way in ranks}


def argsort_loops(embedded, precision: str) -> dict:
    """The metrics of COCO, CxC and ECCV Caption, query by query."""
    import numpy as np

    from probemb.metrics.coco import coco_test_ids, package_metrics

    image_ids, caption_ids = (np.array(ids) for ids in coco_test_ids())
    found = {"coco_5k": own_ranks(similarities(embedded, precision))}
    for fold in range(5):
        images, captions = slice(1000 * fold, 1000 * fold + 1000), slice(5000 * fold, 5000 * fold + 5000)
        part = embedded[0][images], embedded[1][captions]
        found[f"fold {fold}"] = own_ranks(similarities(part, precision))
    out = {}
    for way in ("i2t", "t2i"):
        for k in (1, 5, 10):
            recalls = {name: float(np.mean(ranks[way][0] < k)) for name, ranks in found.items()}
            out[f"coco_5k {way} r@{k}"] = recalls.pop("coco_5k")
            out[f"coco_1k {way} r@{k}"] = sum(recalls.values()) / 5
    orders = {way: order for way, (_, order) in found["coco_5k"].items()}
    lists = {
        "i2t": {int(image_ids[i]): [int(c) for c in caption_ids[order]] for i, order in enumerate(orders["i2t"])},
        "t2i": {int(caption_ids[k]): [int(i) for i in image_ids[order]] for k, order in enumerate(orders["t2i"])},
    }
    targets = ("cxc_recalls", "eccv_map_at_r", "eccv_rprecision", "eccv_r1")
    with contextlib.redirect_stderr(io.StringIO()):
        scores = package_metrics().compute_all_metrics(
            lists["i2t"], lists["t2i"], target_metrics=targets, Ks=(1, 5, 10)
        )
    for way in ("i2t", "t2i"):
        out |= {f"cxc {way} r@{k}": scores[f"cxc_r{k}"][way] for k in (1, 5, 10)}
        for metric, theirs in (("r@1", "r1"), ("map_at_r", "map_at_r"), ("r_precision", "rprecision")):
            out[f"eccv {way} {metric}"] = scores[f"eccv_{theirs}"][way]
    return out


def ours(embedded) -> dict:
    """The same metrics by the library."""
    from probemb.evaluation.scores import csd_scores
    from probemb.metrics import coco_benchmarks, rank_both
    from probemb.metrics.coco import coco_test_ids

    scores = csd_scores(*embedded)

    def rank(images, captions, depth):
        part = scores.only(images, captions)
        return rank_both(part, *part.shape, depth)

    found = coco_benchmarks(rank, *coco_test_ids())
    out = {}
    for way in ("i2t", "t2i"):
        for name in ("coco_1k", "coco_5k", "cxc"):
            out |= {f"{name} {way} r@{k}": found[name][way][f"r@{k}"] for k in (1, 5, 10)}
        out |= {f"eccv {way} {metric}": value for metric, value in found["eccv"][way].items()}
    return out


def drawn_labels():
    """Categories of the images, (N, L) bool."""
    import torch

    return torch.rand(N_IMAGES, CATEGORIES, generator=torch.Generator().manual_seed(1)) < 3 / CATEGORIES


def pmrp_loops(embedded, precision: str) -> dict:
    """PMRP, query by query; images without a label are left out of all rankings, as in PCME's code."""
    import numpy as np

    scores, labels = similarities(embedded, precision), drawn_labels().numpy().astype("float64")
    labelled = labels.any(1)
    differ = np.stack([np.sum(np.abs(labels - label), axis=1) for label in labels])
    out = {}
    for way, image, matrix in (("i2t", np.arange(N_CAPTIONS) // 5, scores), ("t2i", np.arange(N_IMAGES), scores.T)):
        precisions = {zeta: [] for zeta in ZETAS}
        for query in range(len(matrix)):
            own = query if way == "i2t" else query // 5
            if not labelled[own]:
                continue
            order = image[np.argsort(matrix[query])[::-1]]
            retrieved = differ[own][order[labelled[order]]]
            for zeta in ZETAS:
                matched = retrieved <= zeta
                r = np.sum(matched)
                precisions[zeta].append(np.sum(matched[:r]) / r)
        out |= {f"{way} zeta {zeta}": float(np.mean(values)) for zeta, values in precisions.items()}
    return out


def our_pmrp(embedded) -> dict:
    """PMRP by the library."""
    from probemb.evaluation.scores import both_ways, csd_scores
    from probemb.metrics import plausible_match_r_precision

    of_images = drawn_labels()
    labels, out = (of_images, of_images.repeat_interleave(5, dim=0)), {}
    for way, scores, sides in zip(("i2t", "t2i"), both_ways(csd_scores(*embedded)), (labels, labels[::-1])):
        found = plausible_match_r_precision(scores, *sides, zetas=ZETAS)["per_zeta"]
        out |= {f"{way} zeta {zeta}": found[zeta]["r_precision"] for zeta in ZETAS}
    return out


def assert_equal(expected: dict, got: dict) -> None:
    """Check that both give the same metrics; float32 may swap neighbours that nearly tie."""
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert abs(value - got[name]) <= 1e-3, f"{name}: {value} by loops, {got[name]} here"


if __name__ == "__main__":
    run_command(main)
