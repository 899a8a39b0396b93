"""Everything that a GPU must prove, on one GPU, in at most nine minutes: `make gpu-check`.

    python -m tools.bench.gpu                               # all checks
    python -m tools.bench.gpu --only compile speed-B-16 --minutes 30 --out gpu.json
    python -m tools.bench.gpu --small                       # tiny towers; so it also runs without a GPU

Prints a table and a line of JSON. Exit code 0: every check that could run has passed; 1: one has not.
Every check has a process and a time of its own; one that fails or takes too long ends no other.
"""

from __future__ import annotations

import time
from pathlib import Path

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError, nearest
from tools.bench.gpu.checks import AT_ONCE, CHECKS, longest

MINUTES = 9


def main() -> int:
    parser = Parser(prog="python -m tools.bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="CHECK", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--small", action="store_true", help="tiny towers; always so without a GPU")
    minutes = "for all checks together; every check's time is scaled to it (%(default)s)"
    parser.add_argument("--minutes", type=float, default=MINUTES, help=minutes)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--run", help="one check, in this process; used by the command itself")
    parser.add_argument("--notes", type=Path, help="file of that check's findings")
    parser.add_argument("--seconds", type=float, help="of that check")
    options = parser.parse_args()
    for name in options.only or ():
        if name not in CHECKS:
            raise UserError(f"There is no check '{name}'.{nearest(name, CHECKS)}", f"Choose of {', '.join(CHECKS)}.")
    if not options.minutes > 0:
        raise UserError(f"--minutes is {options.minutes:g}.", "Give a number above 0.")

    if options.run:
        from tools.bench.gpu.running import run_one

        run_one(options.run, options.notes, options.small, options.seconds)
        return 0
    return check_all(options)


def check_all(options) -> int:
    """Run the chosen checks and report; returns the exit code."""
    import torch

    from tools.bench.gpu.report import show, tell
    from tools.bench.gpu.running import run_checks, to_json
    from tools.bench.timing import machine

    gpu = torch.cuda.is_available()
    chosen = {name: check for name, check in CHECKS.items() if not options.only or name in options.only}
    about = {"machine": machine(), "small": options.small or not gpu, "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    at_once, factor = AT_ONCE if gpu else 1, options.minutes / MINUTES
    print(f"{about['machine']}: {len(chosen)} checks, {factor * longest(chosen, at_once):.0f} s at most", flush=True)
    began = time.monotonic()
    outcomes = run_checks(chosen, about["small"], factor, at_once, tell)
    about["seconds"] = round(time.monotonic() - began, 1)
    show(outcomes, about)
    text = to_json(outcomes, about)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    return 0 if all(outcome.fine for outcome in outcomes) else 1


if __name__ == "__main__":
    run_command(main)
