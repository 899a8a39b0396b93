"""Retrieval metrics of 5,000 images and 25,000 captions against loops with an argsort for each query.

    python -m tools.bench.metrics

The set is as large as COCO's test split. Both begin with the embeddings and end with R@1, R@5, R@10 and the ranks of
COCO 5K, COCO 1K, CxC and ECCV Caption. The loops are the published evaluation written out plainly: the whole similarity
matrix, one argsort for each image and each caption, the first 500 ids of each handed to the package eccv_caption.
"""

from __future__ import annotations

import contextlib
import io

from probemb.command import Parser, run_command

N_IMAGES, N_CAPTIONS, KEPT = 5000, 25000, 500


def main() -> None:
    parser = Parser(prog="python -m tools.bench.metrics", description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    from tools.bench.timing import peak_memory, report, time_in_turn

    variants = {"argsort loops": argsort_loops, "probemb": ours}

    def prepared(run):
        embedded = embeddings(options.dim)
        return lambda: run(embedded)

    # Memory first: a process that has computed with several threads cannot be forked.
    peaks = {name: peak_memory(lambda run=run: prepared(run)) for name, run in variants.items()}
    memory = {name: {"peak": f"{peak / 2**20:,.0f} MiB"} for name, peak in peaks.items()}
    embedded = embeddings(options.dim)
    runs = {name: (lambda run=run: run(embedded)) for name, run in variants.items()}
    assert_equal(*(run() for run in runs.values()))
    seconds = time_in_turn(runs, options.repeats, warmup=0)
    title = f"COCO 5K, 1K, CxC and ECCV Caption from embeddings, D = {options.dim}"
    report(title, seconds, "argsort loops", "at most 0.1 of the loops' time and 2,048 MiB", memory)


def embeddings(dim: int):
    """Images and captions (Gaussians) whose captions lie around their image."""
    import torch
    from torch.nn import functional as F

    from probemb import Gaussian

    r = torch.Generator().manual_seed(0)
    images = F.normalize(torch.randn(N_IMAGES, dim, generator=r), dim=1)
    noise = torch.randn(N_CAPTIONS, dim, generator=r) * 0.25
    captions = F.normalize(images.repeat_interleave(5, dim=0) + noise, dim=1)
    log_vars = [torch.randn(n, dim, generator=r) * 0.5 - 9 for n in (N_IMAGES, N_CAPTIONS)]
    return Gaussian(images, log_vars[0]), Gaussian(captions, log_vars[1])


def argsort_loops(embedded) -> dict:
    """One query after the other."""
    import numpy as np

    from probemb.metrics.coco import coco_test_ids, package_metrics

    (images, captions), (image_ids, caption_ids) = embedded, (np.array(ids) for ids in coco_test_ids())
    distance = 2 - 2 * images.mean.numpy() @ captions.mean.numpy().T
    distance = distance + np.exp(images.log_var.numpy()).sum(1)[:, None]
    scores = -(distance + np.exp(captions.log_var.numpy()).sum(1)[None, :])
    i2t, t2i, ranks = {}, {}, {"i2t": [], "t2i": []}
    for i in range(N_IMAGES):
        order = np.argsort(scores[i])[::-1]
        ranks["i2t"].append(min(np.where(order == k)[0][0] for k in range(5 * i, 5 * i + 5)))
        i2t[int(image_ids[i])] = [int(name) for name in caption_ids[order[:KEPT]]]
    for k in range(N_CAPTIONS):
        order = np.argsort(scores[:, k])[::-1]
        ranks["t2i"].append(np.where(order == k // 5)[0][0])
        t2i[int(caption_ids[k])] = [int(name) for name in image_ids[order[:KEPT]]]
    targets = ("coco_1k_recalls", "coco_5k_recalls", "cxc_recalls", "eccv_map_at_r", "eccv_rprecision", "eccv_r1")
    with contextlib.redirect_stderr(io.StringIO()):
        found = package_metrics().compute_all_metrics(i2t, t2i, target_metrics=targets, Ks=(1, 5, 10))
    out = {}
    for way in ("i2t", "t2i"):
        for name in ("coco_1k", "coco_5k", "cxc"):
            out |= {f"{name} {way} r@{k}": found[f"{name}_r{k}"][way] for k in (1, 5, 10)}
        out |= {
            f"eccv {way} {metric}": found[f"eccv_{theirs}"][way]
            for metric, theirs in (("r@1", "r1"), ("map_at_r", "map_at_r"), ("r_precision", "rprecision"))
        }
        out |= {f"own {way} r@{k}": float(np.mean(np.array(ranks[way]) < k)) for k in (1, 5, 10)}
    return out


def ours(embedded) -> dict:
    """The library's."""
    from probemb.metrics import coco_benchmarks, rank_both
    from probemb.metrics.coco import coco_test_ids
    from probemb.scores import csd_scores

    scores = csd_scores(*embedded)

    def rank(images, captions, depth: int):
        part = scores.only(images, captions)
        return rank_both(part, *part.shape, depth)

    found = coco_benchmarks(rank, *coco_test_ids())
    out = {}
    for way in ("i2t", "t2i"):
        for name in ("coco_1k", "coco_5k", "cxc"):
            out |= {f"{name} {way} r@{k}": found[name][way][f"r@{k}"] for k in (1, 5, 10)}
        out |= {f"eccv {way} {metric}": value for metric, value in found["eccv"][way].items()}
        out |= {f"own {way} r@{k}": found["coco_5k"][way][f"r@{k}"] for k in (1, 5, 10)}
    return out


def assert_equal(expected: dict, got: dict) -> None:
    """A comparison of speed means something only between equal results; float32 may swap neighbours that nearly tie."""
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert abs(value - got[name]) <= 1e-3, f"{name}: {value} by loops, {got[name]} here"


if __name__ == "__main__":
    run_command(main)
