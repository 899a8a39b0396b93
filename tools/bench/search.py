"""Search by CSD in D + 1 dimensions against the means alone, brute force, and re-ranking.

    python -m tools.bench.search --items 100000
    python -m tools.bench.search --items 1000000 --factories HNSW32 OPQ64_512,IVF8192,PQ64np    # an hour on two cores

First exact search (aim: CSD takes at most 1.05 of the means' time). Then, for every approximate index (auto: a suitable
IVF-PQ) and effort, CSD itself against the paper's two steps (PCME++ §C.5): the same factory over the means, re-ranked
from the fewest candidates that reach CSD's recall.

The items are synthetic: directions around clustered centres in 64 dimensions, rotated into D, with a little noise;
uncertainties are log-normal, so that they change the ranking. Queries lie near items.
"""

import re
import time
from dataclasses import replace
from functools import partial

import faiss
import numpy as np
import torch
from torch import Tensor

from probemb import Gaussian
from probemb.cli.command import run_command
from probemb.distances import csd
from probemb.search import build_index, choose_factory, rerank, search, set_effort
from tools.bench.timing import in_turn, options, ratio, report, show

K = 10
NODES = (8, 16, 32, 64, 128, 256, 512)  # efforts of graphs; of inverted files, up to all cells
CANDIDATES = (10, 20, 50, 100, 200, 500, 1000)
CHUNK = 50_000


def main() -> None:
    o = options(__doc__, items=100_000, dim=512, queries=200, repeats=5, factories=["HNSW32", "auto"])
    gallery = synthetic(o.items, o.dim)
    queries, suitable = near(gallery, o.queries), choose_factory(o.items, o.dim, 0).factory
    compare_exact(gallery, queries, o.repeats)
    for factory in o.factories:
        compare_approximate(gallery, queries, suitable if factory == "auto" else factory, o.repeats)


def synthetic(items: int, dim: int) -> Gaussian:
    """Items (N, D) of unit length whose uncertainty is spread evenly over the dimensions."""
    r, latent = np.random.default_rng(0), min(64, dim)
    centres = r.standard_normal((max(1, items // 500), latent), dtype=np.float32)
    turn = np.linalg.qr(r.standard_normal((dim, latent)))[0].T.astype(np.float32)
    place = centres[r.integers(0, len(centres), items)] + 0.6 * r.standard_normal((items, latent), dtype=np.float32)
    mean = 0.02 * r.standard_normal((items, dim), dtype=np.float32)
    mean += place @ turn
    mean /= np.linalg.norm(mean, axis=1, keepdims=True)
    log_u = torch.from_numpy(0.5 * r.standard_normal(items, dtype=np.float32) - 1.5)
    return Gaussian(torch.from_numpy(mean), (log_u - np.log(dim))[:, None].expand(-1, dim))


def near(gallery: Gaussian, count: int) -> Gaussian:
    """Certain queries (Q, D) near items, as captions near their images."""
    g = torch.Generator().manual_seed(1)
    mean = gallery.mean[torch.randint(len(gallery.mean), (count,), generator=g)]
    mean = mean + 0.5 / mean.shape[1] ** 0.5 * torch.randn(mean.shape, generator=g)
    return Gaussian(mean / mean.norm(dim=1, keepdim=True), torch.full_like(mean, -30.0))


def brute_force(gallery: Gaussian, queries: Gaussian) -> Tensor:
    """The closest items by CSD, (Q, K)."""
    starts = range(0, len(gallery.mean), CHUNK)
    parts = [csd(queries, gallery[start : start + CHUNK]).topk(K, largest=False) for start in starts]
    place = torch.cat([p.indices + s for p, s in zip(parts, starts)], 1)
    return place.gather(1, torch.cat([p.values for p in parts], 1).topk(K, largest=False).indices)


def compare_exact(gallery: Gaussian, queries: Gaussian, repeats: int, device: str = "cpu") -> None:
    """Flat over the means, Flat under CSD, and brute force by torch."""
    indexes = {form: build_index(gallery, "Flat", form) for form in ("mean", "csd")}
    on_device = Gaussian(gallery.mean.to(device), gallery.log_var.to(device))
    asked = Gaussian(queries.mean.to(device), queries.log_var.to(device))
    gpu = device == "cuda" and hasattr(faiss, "StandardGpuResources")  # not in faiss-cpu
    if gpu:
        resources = faiss.StandardGpuResources()
        for form, index in indexes.items():
            indexes[form] = replace(index, parts=(faiss.index_cpu_to_gpu(resources, 0, index.parts[0]),))
    runs = {
        "means": partial(search, indexes["mean"], queries, K),
        "CSD": partial(search, indexes["csd"], queries, K),
        "CSD, torch": partial(brute_force, on_device, asked),
    }
    same = recall(search(indexes["csd"], queries, K)[1], brute_force(on_device, asked).cpu())
    measured = in_turn(runs, repeats)
    where = f"{device}{', faiss on the CPU' * (device == 'cuda' and not gpu)}"
    title = f"Flat, {size_of(gallery)}, {len(queries.mean)} queries at once, {where}"
    report(f"{title}; {same:.2%} of CSD's items are brute force's", measured, "means")


def size_of(gallery: Gaussian) -> str:
    return f"{len(gallery.mean):,} items, D = {gallery.mean.shape[1]}"


def compare_approximate(gallery: Gaussian, queries: Gaussian, factory: str, repeats: int) -> None:
    """One factory at every effort."""
    truth, began = brute_force(gallery, queries), time.perf_counter()
    one_step = build_index(gallery, factory)
    built, size = time.perf_counter() - began, faiss.serialize_index(one_step.parts[0]).nbytes / 2**30
    two_steps = build_index(gallery, factory, "mean")
    cells, rows = re.search(r"IVF(\d+)", factory), {}
    for effort in NODES if cells is None else [2**i for i in range(int(cells[1]).bit_length())]:
        for index in (one_step, two_steps):
            set_effort(index, effort)
        aim = recall(search(one_step, queries, K)[1], truth)
        for candidates in CANDIDATES:
            reached = recall(rerank(two_steps, queries, K, candidates)[1], truth)
            if reached >= aim:
                break
        runs = {"CSD": partial(search, one_step, queries, K)}
        runs["two steps"] = partial(rerank, two_steps, queries, K, candidates)
        measured = in_turn(runs, repeats)
        speed = {f"{name}, queries/s": f"{len(queries.mean) / times.median:,.0f}" for name, times in measured.items()}
        rows[f"effort {effort}"] = {
            f"CSD, recall@{K}": f"{aim:.3f}",
            f"two steps, recall@{K}": f"{reached:.3f}{' (not reached)' * (reached < aim)}",
            **speed,
            "candidates": str(candidates),
            "time of CSD / two steps": f"{ratio(measured, 'CSD', 'two steps'):.2f}",
        }
    show(f"{factory}, {size_of(gallery)}: built in {built:.0f} s, {size:.2f} GiB", rows)


def recall(found: Tensor, truth: Tensor) -> float:
    """Share of the true (Q, K) items that were found."""
    return float((found[:, :, None] == truth[:, None, :]).any(1).double().mean())


if __name__ == "__main__":
    run_command(main)
