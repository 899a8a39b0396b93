"""CSD search in D + 1 dimensions against the means alone, brute force, and re-ranking.

    python -m tools.bench.search --items 100000
    python -m tools.bench.search --items 1000000 --factories HNSW32 OPQ64_512,IVF8192,PQ64np    # an hour on two cores

Three tables: exact search with and without the uncertainty; recall of the ten closest against queries per second for
each approximate index; and, at equal recall, the same factory over the means with re-ranking (PCME++ §C.5) of the
cheapest number of candidates that reaches it. Compared pairs are timed in turn.

The items are synthetic: directions around clustered centres in 64 dimensions, rotated into D, with a little noise;
uncertainties are log-normal, so that they change the ranking. Queries lie near items.
"""

from __future__ import annotations

import json
import re
import resource
import time
from argparse import Namespace

from probemb.cli.command import Parser, run_command

K = 10
NODES = (4, 8, 16, 32, 64, 128, 256, 512)  # efforts for graphs; for inverted files up to all cells
CANDIDATES = (10, 20, 50, 100, 200, 500, 1000)
TURNS = 5  # times the repeats
RECALLS = (0.7, 0.8, 0.9, 0.95, 0.99)
CHUNK = 50_000


def main() -> None:
    parser = Parser(prog="python -m tools.bench.search", description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--factories", nargs="*", help="default: HNSW32 and a suitable IVF-PQ")
    parser.add_argument("--no-two-step", action="store_true", help="no comparison with re-ranking")
    options = parser.parse_args()

    from probemb.search import choose_factory

    factories = options.factories
    if factories is None:
        factories = ["HNSW32", choose_factory(options.items, options.dim, 0).factory]
    gallery = synthetic(options.items, options.dim)
    queries = near(gallery, options.queries)
    truth = exact(gallery, queries, options)
    for factory in factories:
        approximate(gallery, queries, truth, factory, options)
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


def synthetic(items: int, dim: int, latent: int = 64, seed: int = 0):
    """Means (N, D) float32 of unit length and uncertainties (N,)."""
    import numpy as np

    r = np.random.default_rng(seed)
    centres = r.standard_normal((max(1, items // 500), latent), dtype=np.float32)
    turn = np.linalg.qr(r.standard_normal((dim, latent)))[0].T.astype(np.float32)
    mean = np.empty((items, dim), dtype=np.float32)
    for start in range(0, items, CHUNK):
        part = mean[start : start + CHUNK]
        place = centres[r.integers(0, len(centres), len(part))]
        part[:] = (place + 0.6 * r.standard_normal(place.shape, dtype=np.float32)) @ turn
        part += 0.02 * r.standard_normal(part.shape, dtype=np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return mean, np.exp(0.5 * r.standard_normal(items, dtype=np.float32) - 1.5)


def near(gallery, count: int, seed: int = 1):
    """Queries (Q, D) near items, as captions near their images."""
    import numpy as np

    r = np.random.default_rng(seed)
    mean = gallery[0][r.integers(0, len(gallery[0]), count)]
    mean = mean + 0.5 / mean.shape[1] ** 0.5 * r.standard_normal(mean.shape, dtype=np.float32)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def as_gaussian(mean, u=None):
    """Gaussians of the means, with the uncertainties distributed evenly over the dimensions."""
    import torch

    from probemb import Gaussian

    mean = torch.from_numpy(mean)
    each = torch.zeros(len(mean)) if u is None else (torch.from_numpy(u) / mean.shape[1]).log()
    return Gaussian(mean, each[:, None].expand(-1, mean.shape[1]))


def build(gallery, factory: str, form: str):
    """An index, filled like that of an index folder, and the seconds that it took."""
    import numpy as np
    import torch

    from probemb.search import Index
    from probemb.search.choice import training_count
    from probemb.search.index import fill, gallery_vectors, new_index, width_of

    mean, u = gallery
    start = time.perf_counter()
    width = width_of(mean.shape[1], form, factory)
    index = new_index(width, factory)
    if not index.is_trained:
        rows = np.random.default_rng(0).choice(len(u), training_count(factory, len(u)), replace=False)
        index.train(gallery_vectors(mean[rows], u[rows], form, factory))
    for first in range(0, len(u), CHUNK):
        fill(index, gallery_vectors(mean[first : first + CHUNK], u[first : first + CHUNK], form, factory), factory)
    seconds = time.perf_counter() - start
    return Index((index,), form, mean.shape[1], width, torch.from_numpy(u)), seconds


def exact(gallery, queries, options: Namespace):
    """Print the first table; returns the ten closest items of every query by brute force, (Q, 10)."""
    import torch

    from probemb.search import search
    from tools.bench.timing import report, time_in_turn

    with_u, alone = build(gallery, "Flat", "csd")[0], build(gallery, "Flat", "mean")[0]
    bare = unpadded(gallery)
    q = as_gaussian(queries)
    mean, u = (torch.from_numpy(one) for one in gallery)
    distance, found = search(with_u, q, K)
    best, truth = brute_force(mean, u, q.mean)
    own = q.uncertainty()[:, None]
    torch.testing.assert_close(distance - own, best, rtol=1e-4, atol=1e-5)
    agree = float((found[:, :, None] == truth[:, None, :]).any(1).double().mean())
    differing = (search(alone, q, K)[1].sort(1).values != found.sort(1).values).any(1).double().mean()
    print(
        f"Flat gives the distances of brute-force CSD for all {len(q):,} queries, and {agree:.2%} of its items (the "
        f"others tie in float32); the means alone find other items for {float(differing):.0%} of the queries."
    )
    single = q[: min(32, len(q))]
    target = "CSD at most 1.05 of the time of the means alone"
    for title, run in (
        (f"{len(q)} queries at once", lambda index: search(index, q, K)),
        (f"{len(single)} queries, one after the other", lambda index: [search(index, one, K) for one in rows(single)]),
    ):
        several = {"means": alone, "CSD": with_u, f"CSD, {bare.width} wide": bare}
        variants = {name: lambda run=run, index=index: run(index) for name, index in several.items()}
        title = f"Flat, {options.items:,} items, D = {options.dim}, {title}"
        report(title, time_in_turn(variants, options.repeats), "means", target)
    return truth


def unpadded(gallery):
    """Flat under CSD in exactly D + 1 dimensions, to measure the effect of padding."""
    import faiss
    import torch

    from probemb.search import Index
    from probemb.search.index import gallery_vectors

    mean, u = gallery
    index = faiss.IndexFlatL2(mean.shape[1] + 1)
    for first in range(0, len(u), CHUNK):
        part = gallery_vectors(mean[first : first + CHUNK], u[first : first + CHUNK], "csd", "Flat")
        index.add(part[:, : index.d].copy())
    return Index((index,), "csd", mean.shape[1], index.d, torch.from_numpy(u))


def rows(q):
    return [q[i : i + 1] for i in range(len(q))]


def brute_force(mean, u, queries):
    """Distances (without the query's u) and rows of the ten closest items of every query."""
    import torch

    best, truth = None, None
    for start in range(0, len(mean), CHUNK):
        part = mean[start : start + CHUNK]
        d = (queries.square().sum(1)[:, None] + part.square().sum(1) - 2 * queries @ part.T) + u[start : start + CHUNK]
        values, places = d.topk(min(K, d.shape[1]), largest=False)
        best = values if best is None else torch.cat([best, values], 1)
        truth = places if truth is None else torch.cat([truth, places + start], 1)
    best, order = best.topk(K, largest=False)
    return best, truth.gather(1, order)


def efforts_of(factory: str) -> tuple[int, ...]:
    """Search efforts of an index, ascending."""
    found = re.search(r"IVF(\d+)", factory)
    return NODES if found is None else tuple(2**i for i in range(int(found[1]).bit_length()))


def approximate(gallery, queries, truth, factory: str, options: Namespace) -> None:
    """The second and third table for one factory."""
    import faiss
    from rich.console import Console
    from rich.table import Table

    from probemb.search import rerank, search, set_effort
    from tools.bench.timing import machine

    q = as_gaussian(queries)
    console = Console(width=120)
    index, seconds = build(gallery, factory, "csd")
    size = faiss.serialize_index(index.faiss).nbytes / 2**30
    console.print(f"\n{factory}, {options.items:,} items, D = {options.dim}: built in {seconds:.0f} s, {size:.2f} GiB\n"
                  f"{machine()}", soft_wrap=True)  # fmt: skip
    ours = []
    table = Table()
    for heading in ("effort", "recall@10", "queries/s"):
        table.add_column(heading, justify="right")
    for effort in efforts_of(factory):
        known = set_effort(index, effort)
        point = measure(lambda: search(index, q, K)[1], truth, options.repeats)
        ours.append({"effort": effort, **point})
        table.add_row(f"{known or ''} {effort}", f"{point['recall']:.3f}", f"{point['queries_s']:,.0f}")
        if known is None:
            break
    console.print(table)
    record = {"factory": factory, "items": options.items, "dim": options.dim, "build_s": seconds, "csd": ours}
    if not options.no_two_step:
        means, _ = build(gallery, factory, "mean")
        theirs = []
        for effort in efforts_of(factory):
            known = set_effort(means, effort)
            for candidates in CANDIDATES:
                if candidates <= options.items:
                    run = lambda c=candidates: rerank(means, q, K, c)[1]  # noqa: E731
                    theirs.append({"effort": effort, "candidates": candidates, **measure(run, truth, options.repeats)})
            if known is None:
                break
        record["two_step"] = [p for p in theirs if not any(dominates(other, p) for other in theirs)]

        def one_step(point: dict):
            set_effort(index, point["effort"])
            return search(index, q, K)

        def two_steps(point: dict):
            set_effort(means, point["effort"])
            return rerank(means, q, K, point["candidates"])

        console.print(equal_recall(ours, theirs, one_step, two_steps, len(q), options.repeats))
    print(json.dumps(record))


def measure(run, truth, repeats: int) -> dict:
    """Recall of the ten closest, and queries per second in the fastest repeat."""
    found, seconds = run(), []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    recall = (found[:, :, None] == truth[:, None, :]).any(1).double().mean()
    return {"recall": float(recall), "queries_s": len(truth) / min(seconds)}


def dominates(one: dict, other: dict) -> bool:
    """True if one is at least as fast and as good as the other, and better in one of the two."""
    pairs = [(one[key], other[key]) for key in ("recall", "queries_s")]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def equal_recall(ours: list[dict], theirs: list[dict], one_step, two_steps, count: int, repeats: int):
    """A table of the fastest point of each form that reaches a recall, also at the highest recall of either."""
    import statistics

    from rich.table import Table

    from tools.bench.timing import time_in_turn

    table = Table(title="at equal recall", title_justify="left")
    for heading in ("recall@10", "CSD, queries/s", "two steps, queries/s", "candidates", "CSD / two steps"):
        table.add_column(heading, justify="right")
    most = [max(p["recall"] for p in points) for points in (ours, theirs)]
    for recall in sorted({*RECALLS, *most}):
        one, two = (
            max((p for p in points if p["recall"] >= recall), key=lambda p: p["queries_s"], default=None)
            for points in (ours, theirs)
        )
        ratio = ""
        if one and two:
            variants = {"one": lambda p=one: one_step(p), "two": lambda p=two: two_steps(p)}
            seconds = time_in_turn(variants, TURNS * repeats)
            ratio = f"{statistics.median(b / a for a, b in zip(seconds['one'], seconds['two'])):.2f}"
            medians = (count / statistics.median(several) for several in seconds.values())
            one, two = ({**point, "queries_s": speed} for point, speed in zip((one, two), medians))
        table.add_row(
            f"{recall:.3f}" + (" (the most)" if recall in most else ""),
            f"{one['queries_s']:,.0f}" if one else "not reached",
            f"{two['queries_s']:,.0f}" if two else "not reached",
            f"{two['candidates']:,}" if two else "",
            ratio,
        )
    return table


if __name__ == "__main__":
    run_command(main)
