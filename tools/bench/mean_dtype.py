"""Cost of storing means in float16: how many of the ten closest items by CSD stay the same, and the size.

    python -m tools.bench.mean_dtype --items 100000

Two galleries of synthetic items (`tools.bench.search`): as they are, and with near-duplicates, twenty of each of some
items that differ from it by a distance of --apart. Queries lie near items, in the second gallery near these.
"""

from __future__ import annotations

import numpy as np

from probemb.cli.command import Parser, run_command
from tools.bench.search import K, as_gaussian, near, synthetic

COPIES = 20


def main() -> None:
    parser = Parser(prog="python -m tools.bench.mean_dtype", description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--apart", type=float, default=0.01, help="distance of near-duplicates (%(default)s)")
    options = parser.parse_args()
    mean, u = synthetic(options.items, options.dim)
    shown = {"distinct items": (mean, near((mean, u), options.queries))}
    shown["near-duplicates"] = with_duplicates(mean, options.queries, options.apart)
    for name, (items, queries) in shown.items():
        print(f"{name}: overlap@{K} of float16 with float32 {100 * overlap(items, u, queries):.2f} %", flush=True)
    each = options.dim + 2  # u is float32 in both
    print(f"bytes an item: {2 * each} in float16, {4 * options.dim + 4} in float32")


def with_duplicates(mean: np.ndarray, count: int, apart: float, seed: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Means (N, D) with COPIES near-duplicates of each of the first `count`, and queries (count, D) near those."""
    r = np.random.default_rng(seed)
    count = min(count, len(mean) // COPIES)
    queries, mean = near((mean[:count], None), count), mean.copy()
    step = r.standard_normal((count, COPIES, mean.shape[1]), dtype=np.float32)
    step *= apart / np.linalg.norm(step, axis=2, keepdims=True)
    copies = (mean[:count, None] + step).reshape(count * COPIES, -1)
    mean[: len(copies)] = copies / np.linalg.norm(copies, axis=1, keepdims=True)
    return mean, queries


def overlap(mean: np.ndarray, u: np.ndarray, queries: np.ndarray) -> float:
    """Share of the K closest items under means in float32 that are among those under means in float16; u is equal."""
    from probemb.search import build_index, search

    u = np.full_like(u, u.mean())  # of all items alike: the means alone decide
    found = []
    for stored in (mean, mean.astype(np.float16).astype(np.float32)):
        found.append(search(build_index(as_gaussian(stored, u)), as_gaussian(queries), K)[1].numpy())
    return float(np.mean([len(np.intersect1d(a, b)) / K for a, b in zip(*found)]))


if __name__ == "__main__":
    run_command(main)
