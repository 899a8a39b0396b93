"""Throughput on one GPU, most important first, until the time is spent: the second half of `make gpu-check`.

    python -m tools.bench.gpu
    python -m tools.bench.gpu --only step-B-16 --minutes 30
    python -m tools.bench.gpu --device cpu --reduced      # tiny sizes: shows that every part runs

Prints images/s, the share of the GPU's peak (MFU) and memory of PCME++'s step beside CLIP's and open_clip's, then the
match loss and the exact search. Exit code 1: an aim was missed (PCME++ at most 1.10 of open_clip's time, and 45 % MFU
or more with a compiled ViT-B/16).
"""

import gc
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError
from tools.bench import loss, search, step
from tools.bench.timing import ratio

RATIO, MFU = 1.10, 0.45


def parts(device: str, reduced: bool) -> dict[str, Callable[[], list[str] | None]]:
    """Every part by name, most important first; a part returns the aims that it missed."""
    small = reduced, device

    def search_exactly() -> None:
        gallery = search.synthetic(*((2_000, 64) if reduced else (1_000_000, 512)))
        search.compare_exact(gallery, search.near(gallery, 16 if reduced else 1000), 2 if reduced else 10, device)

    return {
        "step-B-16": partial(steps, "ViT-B-16", 256, *small),
        "step-B-16-compiled": partial(steps, "ViT-B-16", 512, *small, compiled=True, mfu_aim=MFU),
        "step-B-32": partial(steps, "ViT-B-32", 512, *small),
        "loss": partial(loss.compare, *((64, 32, 2) if reduced else (1024, 512, 10)), device),
        "search": search_exactly,
    }


def steps(name: str, batch: int, reduced: bool, device: str, compiled: bool = False, mfu_aim: float = 0.0) -> list[str]:
    """`tools.bench.step`, with the largest batch up to `batch` that fits beside the peer's."""
    if reduced:
        name, batch = "ViT-Micro-32", 8
    while True:
        try:
            measured, mfu = step.compare(name, batch, 2 if reduced else 8, compiled and not reduced, device)
            break
        except torch.cuda.OutOfMemoryError:
            batch //= 2
            if not batch:
                raise
        gc.collect()  # after the exception, whose frames hold the tensors
        torch.cuda.empty_cache()
    if reduced:
        return []
    missed, slower = [], ratio(measured, "PCME++", step.PEER)
    if slower > RATIO:
        missed.append(f"{name}: PCME++ takes {slower:.2f} of open_clip's time, the aim is {RATIO}")
    if mfu and mfu["PCME++"] < mfu_aim:
        missed.append(f"{name}: PCME++'s MFU is {mfu['PCME++']:.1%}, the aim is {mfu_aim:.0%}")
    return missed


def main() -> int:
    parser = Parser(prog="python -m tools.bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="PART", choices=list(parts("cpu", True)), help="%(choices)s")
    parser.add_argument("--minutes", type=float, default=9, help="stop after this time (%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--reduced", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("There is no GPU here.", "Try the parts with --device cpu --reduced.")
    todo, problems, began = parts(options.device, options.reduced), [], time.monotonic()
    waiting = [name for name in todo if name in (options.only or todo)]
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # raises KeyboardInterrupt
    signal.setitimer(signal.ITIMER_REAL, 60 * options.minutes)
    with suppress(KeyboardInterrupt):
        while waiting:
            try:
                problems += todo[waiting[0]]() or []
            except Exception:  # of one part: the others may still run in the time
                problems.append(f"{waiting[0]} failed:\n{traceback.format_exc()}")
            del waiting[0]
            gc.collect()
            torch.cuda.empty_cache()
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(f"{time.monotonic() - began:.0f} s; not run: {', '.join(waiting) or 'none'}")
    print("\n".join(problems) or "no aim was missed")
    return int(bool(problems))


if __name__ == "__main__":
    run_command(main)
