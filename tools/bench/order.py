"""Time and memory until a rank of a large run has its index, its order, and the places of its first batch.

    python -m tools.bench.order                          # 2 billion samples in 200,000 shards, 1,024 ranks
    python -m tools.bench.order --shards 2000 --samples 20000000 --filter

Writes an index.json of that size beside files of the right sizes without content (they take no room), and starts one
rank in a process of its own: at the beginning, and resumed in the fourth epoch. Counted are the seconds and the memory
that reading the index, checking the files' sizes and `Stream` add to a process that has imported it. With --filter two
rules are applied, to columns of random numbers; the first start counts what they keep.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

from probemb.cli.command import Parser, run_command

MEASURED = ("index", "order", "rows", "seconds", "cpu", "mib", "peak_mib", "kept")
BYTES = 2_048  # of a sample: the least that an index may say


def main() -> None:
    parser = Parser(prog="python -m tools.bench.order", description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=2_000_000_000, help="of the corpus (%(default)s)")
    parser.add_argument("--shards", type=int, default=200_000, help="of the corpus (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1024, help="of the run (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32_768, help="over all ranks (%(default)s)")
    parser.add_argument("--filter", action="store_true", help="select by shorter side and words")
    options = parser.parse_args()
    from rich.console import Console
    from rich.table import Table

    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder), options.samples, options.shards, options.filter)
        table, found = Table(), {}
        for name in ("", "index", "order", "first rows", "together", "CPU", "memory added", "peak added"):
            table.add_column(name, justify="right" if name else "left")
        starts = [("first start", 0)] if options.filter else []
        for name, epochs in *starts, ("start", 0), ("resume", 3):
            arguments = (folder, options.ranks, options.batch_size, epochs, options.filter)
            found[name] = one = in_a_process(start_rank, *arguments)
            times = (f"{one[part]:.2f} s" for part in ("index", "order", "rows", "seconds", "cpu"))
            table.add_row(name, *times, f"{one['mib']:.0f} MiB", f"{one['peak_mib']:.0f} MiB")
    Console().print(table)
    print(f"{os.cpu_count()} CPU cores; target: under 5 s and 200 MiB")
    print(json.dumps({name: {part: one[part] for part in MEASURED} for name, one in found.items()}))


def write_corpus(folder: Path, samples: int, shards: int, columns: bool) -> None:
    """An index of `shards` shards with about equal numbers of samples, the files, and random columns."""
    import numpy as np

    from probemb.data.shards.columns import describe_shards
    from probemb.data.shards.index import Shard, write_index

    cuts = np.linspace(0, samples, shards + 1).astype(np.int64)
    cuts[1:-1] += np.random.default_rng(0).integers(-(samples // shards // 4), samples // shards // 4, shards - 1)
    rows = []
    for number, size in enumerate(np.diff(cuts).tolist()):
        path = folder / f"{number:06d}.tar"
        with open(path, "wb") as file:
            file.truncate(size * BYTES)
        rows.append(Shard(path.name, path, size, size * BYTES, f"{number:064x}"))
    write_index(folder, rows)
    if columns:
        (folder / "columns").mkdir()
        np.save(folder / "columns" / "shards.npy", describe_shards(rows))
        some = np.random.default_rng(1).integers(0, 1000, 1 << 20)
        for name, kind in ("width", "<u4"), ("height", "<u4"), ("fewest_words", "<u2"):
            column = np.lib.format.open_memmap(folder / "columns" / f"{name}.npy", "w+", kind, (samples,))
            for start in range(0, samples, len(some)):
                column[start : start + len(some)] = some[: samples - start]
            column.flush()


def in_a_process(work, *arguments):
    """The result of a function in a fresh process."""
    receive, send = get_context("spawn").Pipe(duplex=False)
    process = get_context("spawn").Process(target=_answer, args=(send, work, arguments))
    process.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        sys.exit("The measured process has ended without an answer.")
    finally:
        process.join()


def _answer(send, work, arguments) -> None:
    send.send(work(*arguments))


def start_rank(folder: str, ranks: int, batch_size: int, epochs: int, filtered: bool) -> dict[str, float | list]:
    """Seconds, CPU seconds and MiB of the last rank's start after so many epochs and a half; and its first slots."""
    import torch

    from pretrain.stream.filter import Filter
    from pretrain.stream.settings import Settings
    from pretrain.stream.stream import Stream
    from probemb.data.shards.index import read_index

    rules = Filter(min_side=100, min_words=100) if filtered else Filter()
    settings = Settings(batch_size=batch_size, lanes=ranks, filter=rules)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, began, busy = memory("VmRSS"), time.perf_counter(), time.process_time()
    shards = read_index(folder)
    read = time.perf_counter()
    place = dict(rank=ranks - 1, world_size=ranks)
    stream = Stream(shards, settings, lambda _: torch.zeros(3, 2, 2), lambda _: torch.zeros(1, 2, dtype=int), **place)
    identity = stream.identity
    made = time.perf_counter()
    order = stream.order
    epoch, step = order.locate((epochs * order.steps + (order.steps // 2 if epochs else 0)) * batch_size)
    slots = order.rows(epoch, step, batch_size - stream.rows, batch_size)
    ahead = order.shards_ahead(epoch, ranks - 1, step * order.share)
    ended = time.perf_counter()
    return {
        "index": read - began,
        "order": made - read,
        "rows": ended - made,
        "seconds": ended - began,
        "cpu": time.process_time() - busy,
        "mib": memory("VmRSS") - before,
        "peak_mib": memory("VmHWM") - before,
        "kept": order.slots_per_epoch,
        "slots": [column.tolist() for column in slots],
        "ahead": list(ahead),
        "identity": identity,
    }


def memory(name: str) -> float:
    """MiB of this process, by the name in /proc."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(name)


if __name__ == "__main__":
    run_command(main)
