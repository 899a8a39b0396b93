"""Search an index with texts and images, from the shell or on a page.

    python -m tools.search "two dogs on grass" --index index/cc3m                      # a table
    python -m tools.search "the same, at night" --image x.jpg --index index/cc3m --json
    python -m tools.search --serve --index index/cc3m                                  # a search page
    python -m tools.search --calibrate data/val --index index/cc3m                     # calibrate refusals
    python -m tools.search "a dog" --min-precision 0.8 --index index/cc3m
    python -m tools.search --image x.jpg --fits --tolerance -1 --index index/captions  # all that fits, not the closest

Several texts and images form one query, the product of their normals (MPC). Results are ranked by CSD. A query more
uncertain than --max-uncertainty is refused with exit code 1, as is one whose calibrated score is above the threshold
for --min-precision, or above --max-score.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from probemb.cli.command import Parser
from probemb.errors import UserError

PROG = "python -m tools.search"
REFUSED = 1
BELONGS = {  # options of some modes only
    **dict.fromkeys(("top", "max_uncertainty", "max_item_uncertainty", "min_precision", "max_score"), ("a query",)),
    "fits": ("a query",),
    "tolerance": ("a query", "--serve"),
    **dict.fromkeys(("rivals", "within"), ("--calibrate",)),
    **dict.fromkeys(("host", "port", "allow_host", "max_upload"), ("--serve",)),
    "json": ("a query", "--calibrate"),
}
WANTED = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)  # precisions in the table of a calibration


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.serve:
        return serve_page(options)
    if options.calibrate:
        return calibrate_index(options)
    return search_once(options)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options. Raises UserError: they are out of range or exclude each other."""
    parser = add_options()
    options = parser.parse_intermixed_args(argv)  # texts may precede and follow options
    check_mode(parser, options)
    if options.rerank is not None and options.rerank < options.top:
        raise UserError(f"--rerank is {options.rerank}, --top {options.top}.", "Use at least as many candidates.")
    return options


def add_options() -> Parser:
    """All options."""
    from jsonargparse.typing import PositiveInt, restricted_number_type

    port = restricted_number_type("Port", int, [(">=", 0), ("<=", 65535)])
    mebibytes = restricted_number_type("Mebibytes", int, [(">=", 1), ("<=", 1024)])
    parser = Parser(prog=PROG, description="Search an index with texts and images; several are one query.")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts of the query")
    parser.add_argument("--index", type=Path, metavar="FOLDER", help="index folder of tools.build_index")
    image = "an image of the query; may be repeated"
    parser.add_argument("--image", type=Path, action="append", default=[], help=image)
    parser.add_argument("--model", help="run, model folder or hub name (default: the one the index was made with)")
    parser.add_argument("--top", type=int, default=10, help="results (default: %(default)s)")
    parser.add_argument("--max-uncertainty", type=float, metavar="U", help="refuse a query more uncertain than this")
    parser.add_argument("--max-item-uncertainty", type=float, metavar="U", help="leave out results above this")
    precision = "refuse a query above the threshold calibrated for this"
    parser.add_argument("--min-precision", type=float, metavar="P", help=precision)
    fits = (
        "all that fits, a large variance as a tolerance; --no-fits: the closest, by CSD (default: as the index ranks)"
    )
    parser.add_argument("--fits", action=argparse.BooleanOptionalAction, help=fits)
    tolerance = "weight of the variances for --fits (default: the index' own, or the calibrated one)"
    parser.add_argument("--tolerance", type=float, metavar="LAMBDA", help=tolerance)
    score = "refuse a query whose calibrated score is above this"
    parser.add_argument("--max-score", type=float, metavar="S", help=score)
    parser.add_argument(
        "--effort", type=PositiveInt, help="cells (IVF) or nodes (HNSW) that an approximate index searches"
    )
    rerank = "candidates that CSD re-ranks in an index of means (--form mean)"
    parser.add_argument("--rerank", type=int, metavar="N", help=rerank)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: %(default)s)")
    parser.add_argument("--precision", default="auto", help="auto, fp32, bf16, fp16 (default: %(default)s)")
    calibration = parser.add_argument_group("calibration")
    data = "validation images with captions: writes calibration.json"
    calibration.add_argument("--calibrate", metavar="DATA", help=data)
    rivals = "items that compete with the correct one: validation, or index for both (default: %(default)s)"
    calibration.add_argument("--rivals", default="validation", metavar="WHICH", help=rivals)
    within = "an answer is correct if the correct item is among the K closest (default: %(default)s)"
    calibration.add_argument("--within", type=PositiveInt, default=1, metavar="K", help=within)
    page = parser.add_argument_group("page")
    page.add_argument("--serve", action="store_true", help="serve a search page")
    host = "address to serve at (default: %(default)s: this machine only)"
    page.add_argument("--host", default="127.0.0.1", help=host)
    page.add_argument("--port", type=port, default=8000, help="port, 0 for a free one (default: %(default)s)")
    name = "a further name of this server; may be repeated"
    page.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=name)
    upload = "limit of one query (default: %(default)s)"
    page.add_argument("--max-upload", type=mebibytes, default=16, metavar="MIB", help=upload)
    return parser


def check_mode(parser: Parser, options: argparse.Namespace) -> None:
    """Refuse several modes, options of another mode, and empty queries. Raises UserError."""
    if options.index is None:
        raise UserError("--index is missing.", "Name the folder that tools.build_index has made.")
    asked = bool(options.texts or options.image)
    if options.serve + bool(options.calibrate) + asked > 1:
        raise UserError("A query, --serve and --calibrate exclude each other.", "Use one at a time.")
    doing = "--serve" if options.serve else "--calibrate" if options.calibrate else "a query"
    for name, belongs in BELONGS.items():
        if doing not in belongs and getattr(options, name) != parser.get_default(name):
            raise UserError(f"--{name.replace('_', '-')} does not belong to {doing}.", "Leave it out.")
    if options.tolerance is not None and not math.isfinite(options.tolerance):
        raise UserError(f"--tolerance is {options.tolerance}.", "Give a finite number, such as -1.")
    if doing != "a query":
        return
    if options.tolerance is not None and not options.fits:
        raise UserError("--tolerance has no effect without --fits.", "Add --fits, or leave --tolerance out.")
    if not any(map(str.strip, options.texts)) and not options.image:
        raise UserError("The query is empty.", f'Write `{PROG} "two dogs on grass" --index FOLDER`, or give --image.')
    if not all(map(str.strip, options.texts)):
        raise UserError("One of the texts is empty.", "Leave it out.")


def open_searcher(options: argparse.Namespace, calibrated: bool = True):
    """A searcher of the index with the model that made it. Raises UserError."""
    from probemb.cli.device import choose_device
    from probemb.search import load_index, require_model, set_effort

    device = choose_device(options.device, options.precision)
    on_gpu = options.serve and device.name.startswith("cuda")  # one query takes less time than the copy
    index = load_index(options.index, device="auto" if on_gpu else "cpu")
    if options.rerank is not None and index.form != "mean":
        raise UserError(
            f"{options.index} already ranks by CSD.",
            "Leave --rerank out, or build an index of the means with `python -m tools.build_index --form mean`.",
        )
    if options.effort is not None and options.effort > len(index):
        raise UserError(f"--effort is {options.effort:,} of {len(index):,} items.", "Give fewer.")
    if options.effort is not None and set_effort(index, options.effort) is None:
        raise UserError(f"The index '{index.factory}' always searches everything.", "Leave --effort out.")
    from probemb.models import load_model, weights_sha256
    from tools.search.calibration import load_calibration
    from tools.search.query import Searcher

    name = options.model or index.model
    try:
        loaded = load_model(name, device=device.name)
    except UserError as error:
        if options.model:
            raise
        raise UserError(
            error.what, f"The index {options.index} was made with it; --model names its present location."
        ) from None
    require_model(index, name, weights_sha256(loaded.model), loaded.model.embed_dim)
    calibration = load_calibration(options.index, index.weights) if calibrated else None
    return Searcher(index, loaded, name, calibration, device, options.rerank, options.tolerance)


def search_once(options: argparse.Namespace) -> int:
    """Answer one query."""
    from tools.search.query import Wish, check_wish, read_image

    wish = Wish(
        options.texts, [read_image(path) for path in options.image], options.top, options.max_uncertainty,
        options.max_item_uncertainty, options.min_precision, options.fits, options.max_score,
    )  # fmt: skip
    check_wish(wish)
    answer = open_searcher(options).answer(wish)
    if options.json:
        from probemb.cli.results import finite

        print(json.dumps(finite(answer), indent=1, ensure_ascii=True))
    else:
        print_answer(answer)
    return REFUSED if answer["refused"] else 0


def print_answer(answer: dict) -> None:
    """Print the answer as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from probemb.reports.text import printable
    from tools.search.scoring import SCORES

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    query = answer["query"]
    line = f"uncertainty of the query: {query['uncertainty']:.4g}"
    if len(query["parts"]) > 1:
        line += f" (its parts: {', '.join(format(part['uncertainty'], '.4g') for part in query['parts'])})"
    if answer["weight"] != 1:
        line += f"; ranked with the variances of the items times {answer['weight']:g}"
    console.print(line, highlight=False)
    score, exceeded = answer["score"], answer["limit"]
    if score["name"] != "u" and score["value"] is not None:
        console.print(f"{score['title']}: {score['value']:.4g} ({SCORES[score['name']][1]})", highlight=False)
        exceeded = score["limit"]
    if answer["refused"]:
        limit = f"refused: that is above {exceeded:.4g}; make the query more specific, or raise the limit"
        console.print(limit, highlight=False, soft_wrap=True)
        return
    table = Table()
    for heading in ("rank", "distance", "uncertainty"):
        table.add_column(heading, justify="right")
    table.add_column("key", overflow="fold")
    table.add_column("caption", overflow="fold")
    for result in answer["results"]:
        table.add_row(
            str(result["rank"]), f"{result['distance']:.4f}", f"{result['uncertainty']:.4g}",
            escape(printable(result["key"])), escape(printable((result["captions"] or [""])[0])),
        )  # fmt: skip
    if answer["results"]:
        console.print(table)
    else:
        console.print(f"no certain enough result among the {answer['looked_at']:,} closest", highlight=False)


def calibrate_index(options: argparse.Namespace) -> int:
    """Measure a calibration and store it beside the index."""
    from probemb.cli.progress import progress
    from tools.search.calibrating import calibrate
    from tools.search.calibration import save_calibration

    searcher = open_searcher(options, calibrated=False)
    calibration = calibrate(searcher, options.calibrate, options.rivals, options.within, progress)
    before = replaced(options.index, calibration.weights)
    path = save_calibration(options.index, calibration)
    if options.json:
        print(path.read_text(encoding="utf-8"))
        return 0
    print_calibration(calibration)
    print(f"written: {path}{before}", flush=True)
    return 0


def replaced(folder: Path, weights: str) -> str:
    """Describe the calibration that a new one replaces; "" if there is none or it is unreadable."""
    from tools.search.calibration import load_calibration

    try:
        before = load_calibration(folder, weights)
    except UserError:
        before = None
    if before is None:
        return ""
    return f" (replaces one with {before.curves[min(before.curves)].queries:,} queries of {before.data})"


def print_calibration(calibration) -> None:
    """Print what each score gains, and thresholds for some precisions."""
    from rich.console import Console
    from rich.table import Table

    from probemb.metrics import highest_threshold
    from tools.search.scoring import SCORES

    console, title = Console(width=110), SCORES[calibration.score][0]
    gains = Table(title="what refusing by each score gains, 0 at random and 1 at best")
    gains.add_column("score")
    for parts in calibration.tests:
        gains.add_column(f"{parts} {calibration.kind}{'' if parts == 1 else 's'}", justify="right")
    for name in calibration.tests[1]:
        found = (tests[name] for tests in calibration.tests.values())
        gains.add_row(SCORES[name][0], *(f"{t['gain']:+.3f} ± {t['se']:.3f}, {t['verdict']}" for t in found))
    console.print(gains)
    heading = f"queries of {calibration.kind}s against {calibration.gallery:,} items of {calibration.data}, by {title}"
    table = Table(title=heading)
    for heading in ("parts", "queries", "precision of all", "for precision", "refuse above", "answered"):
        table.add_column(heading, justify="right")
    for parts, curve in calibration.curves.items():
        first = (str(parts), f"{curve.queries:,}", f"{curve.precision[-1]:.3f}")
        if calibration.doubt(parts):
            table.add_row(*first, "", "not promised", "")
            continue
        for wanted in WANTED:
            threshold = highest_threshold(curve, wanted)
            if threshold is not None:
                answered = curve.coverage[curve.threshold.index(threshold)]
                table.add_row(*first, f"{wanted:g}", f"{threshold:.4g}", f"{100 * answered:.0f} %")
                first = ("", "", "")
        if first[0]:
            table.add_row(*first, f"{WANTED[0]:g}", "out of reach", "")
    console.print(table)
    for parts in calibration.curves:
        if doubt := calibration.doubt(parts):
            console.print(f"{doubt}: --min-precision is refused for them.", highlight=False, soft_wrap=True)
    if calibration.tolerance is not None:
        print(f"all that fits is found best with the variances of the items times {calibration.tolerance:g} (--fits)")


def serve_page(options: argparse.Namespace) -> int:
    """Serve the page until interrupted."""
    import sys

    from tools.search.page import addresses, is_loopback, make_app, make_server

    if not is_loopback(options.host):
        print(f"Everyone who can reach {options.host} can search and see the pictures.", file=sys.stderr)
    max_upload = options.max_upload << 20
    app = make_app(open_searcher(options), options.host, options.allow_host, max_upload)
    server = make_server(app, options.host, options.port, max_upload)
    print(f"serving {' and '.join(addresses(server))} (end with Ctrl-C)", flush=True)
    server.run()
    return 0
