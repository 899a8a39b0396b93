"""Options of `python -m tools.search`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from probemb.cli.command import Parser
from probemb.errors import UserError
from tools.search.wish import WITHOUT

PROG = "python -m tools.search"
BELONGS = {  # options of some modes only
    **dict.fromkeys(("top", "max_uncertainty", "max_item_uncertainty", "min_precision", "max_score"), ("a query",)),
    **dict.fromkeys(("without", "without_image", "weights"), ("a query",)),
    **dict.fromkeys(("fits", "more"), ("a query",)),
    "tolerance": ("a query", "--serve"),
    **dict.fromkeys(("rivals", "within"), ("--calibrate",)),
    **dict.fromkeys(("host", "port", "allow_host", "max_upload"), ("--serve",)),
    "json": ("a query", "--calibrate"),
}


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
    index = "index folder of tools.build_index; for --serve may be repeated, the page lets people choose"
    parser.add_argument("--index", type=Path, action="append", default=[], metavar="FOLDER", help=index)
    image = "an image of the query; may be repeated"
    parser.add_argument("--image", type=Path, action="append", default=[], help=image)
    without = "a text that the results should not have; may be repeated"
    parser.add_argument("--without", action="append", default=[], metavar="TEXT", help=without)
    without = "an image that the results should not be like; may be repeated"
    parser.add_argument("--without-image", type=Path, action="append", default=[], metavar="IMAGE", help=without)
    weights = (
        "how much each part counts, in the order texts, --without, --image, --without-image (default: 1, and "
        f"{WITHOUT} of what to leave out)"
    )
    parser.add_argument("--weights", metavar="W,W,...", help=weights)
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
    more = "items that include the query (general), or lie in it (specific), among the closest"
    parser.add_argument("--more", choices=("general", "specific"), help=more)
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
    if not options.index:
        raise UserError("--index is missing.", "Name the folder that tools.build_index has made.")
    if len(options.index) > 1 and not options.serve:
        raise UserError(f"--index is given {len(options.index)} times.", "Give one; only --serve takes several.")
    folders = [folder.absolute() for folder in options.index]
    if twice := next((one for one in folders if folders.count(one) > 1), None):
        raise UserError(f"--index {twice} is given twice.", "Give it once.")
    asked = bool(options.texts or options.image or options.without or options.without_image)
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
    left_out = any(map(str.strip, options.without)) or options.without_image
    if not any(map(str.strip, options.texts)) and not options.image and not left_out:
        raise UserError("The query is empty.", f'Write `{PROG} "two dogs on grass" --index FOLDER`, or give --image.')
    if not all(map(str.strip, [*options.texts, *options.without])):
        raise UserError("One of the texts is empty.", "Leave it out.")


def signed_weights(options: argparse.Namespace) -> list[float] | None:
    """The weight of every part of a query, texts first; below 0 for those of --without. None if all are 1.

    Raises:
        UserError: they are no numbers above 0, or not as many as parts.
    """
    signs = [1] * len(options.texts) + [-1] * len(options.without)
    signs += [1] * len(options.image) + [-1] * len(options.without_image)
    if options.weights is None:
        return [1.0 if sign > 0 else -WITHOUT for sign in signs] if -1 in signs else None
    remedy = "Give one number above 0 for every part, in the order texts, --without, --image, --without-image: 1,0.5,2."
    try:
        sizes = [float(one) for one in options.weights.split(",")]
    except ValueError:
        raise UserError(f"--weights is '{options.weights}'.", remedy) from None
    if len(sizes) != len(signs):
        raise UserError(f"--weights has {len(sizes)} numbers for {len(signs)} parts.", remedy)
    if not all(size > 0 for size in sizes):
        raise UserError(f"--weights is {options.weights}.", f"{remedy} What to leave out is said by --without.")
    return [size * sign for size, sign in zip(sizes, signs)]
