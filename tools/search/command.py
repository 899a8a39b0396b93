"""Search an index with texts and images, in the shell or on a page.

    python -m tools.search "two dogs on grass" --index index/cc3m                      # a table
    python -m tools.search "the same, at night" --image x.jpg --index index/cc3m --json
    python -m tools.search "a beach" "a dog" --without "people" --weights 1,2,0.5 --index index/cc3m
    python -m tools.search --image x.jpg --tolerance -1 --index index/captions         # all that fits, not the closest
    python -m tools.search --serve --index index/cc3m --index index/cc12m              # a search page
    python -m tools.search --calibrate data/val --min-precision 0.8 --index index/cc3m
    python -m tools.search "a dog" --max-uncertainty calibrated --index index/cc3m
    python -m tools.search "a dog" --coverage 0.9 --index index/cc3m         # as many as hold the right one, mostly

Several texts and images form one query, by the composer that the model was trained with, else the product of their
normals (MPC). Results are ranked by CSD. A query more uncertain than --max-uncertainty is refused with exit code 1.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from jsonargparse.typing import PositiveInt, restricted_number_type

from probemb import models
from probemb.cli.command import Parser, require_output
from probemb.cli.ranges import Share
from probemb.errors import UserError, count
from probemb.files import writing
from probemb.machine import choose_device, machine_memory
from probemb.progress import progress
from probemb.reports.results import finite, write_json
from probemb.reports.text import printable
from probemb.search import Index, load_index, set_effort
from tools.search.calibrate import NAME, calibrate, load_calibration
from tools.search.query import WITHOUT, QueryEncoder, Searcher, SearchRequest, read_image

PROG = "python -m tools.search"
REFUSED = 1
CALIBRATED = "calibrated"
QUERY, SERVE, CALIBRATE = "a query", "--serve", "--calibrate"
BELONGS = {  # options of some modes only
    **dict.fromkeys(("top", "max_uncertainty", "max_item_uncertainty", "without", "without_image"), (QUERY,)),
    **dict.fromkeys(("weights", "json", "coverage"), (QUERY,)),
    **dict.fromkeys(("tolerance", "rerank"), (QUERY, SERVE)),
    **dict.fromkeys(("min_precision", "within"), (CALIBRATE,)),
    **dict.fromkeys(("host", "port", "allow_host", "max_upload"), (SERVE,)),
}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.serve:
        return serve_page(options)
    if options.calibrate:
        return calibrate_index(options)
    return search_once(options)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options. Raises UserError: they are out of range or exclude each other."""
    port = restricted_number_type("Port", int, [(">=", 0), ("<=", 65535)])
    mebibytes = restricted_number_type("Mebibytes", int, [(">=", 1), ("<=", 1024)])
    parser = Parser(prog=PROG, description="Search an index with texts and images; several are one query.")
    add = parser.add_argument
    add("texts", nargs="*", metavar="TEXT", help="texts of the query")
    index = "index folder of tools.build_index; for --serve may be repeated, the page lets users choose"
    add("--index", type=Path, action="append", default=[], metavar="FOLDER", help=index)
    add("--image", type=Path, action="append", default=[], help="an image of the query; may be repeated")
    add("--without", action="append", default=[], metavar="TEXT", help="a text to leave out; may be repeated")
    add("--without-image", type=Path, action="append", default=[], metavar="IMAGE", help="an image to leave out")
    weights = "how much each part counts, in the order texts, --without, --image, --without-image (default: 1, and "
    add("--weights", metavar="W,W,...", help=f"{weights}{WITHOUT} of what to leave out)")
    add("--model", help="run, model folder or hub name (default: the one the index was made with)")
    add("--top", type=int, default=10, help="results (default: %(default)s)")
    coverage = "show as many results as hold the right one for this share of such queries, by --calibrate"
    add("--coverage", type=Share, metavar="P", help=coverage)
    limit = f"refuse a query more uncertain than this; {CALIBRATED}: than the threshold of --calibrate"
    add("--max-uncertainty", type=lambda x: x if x == CALIBRATED else float(x), metavar="U", help=limit)
    add("--max-item-uncertainty", type=float, metavar="U", help="leave out results above this")
    tolerance = "weight of the items' variances in the ranking: below 0 finds all that fits, 1 the closest, by CSD "
    add("--tolerance", type=float, metavar="LAMBDA", help=f"{tolerance}(default: as the index ranks)")
    add("--effort", type=PositiveInt, help="cells (IVF) or nodes (HNSW) that an approximate index searches")
    add("--rerank", type=int, metavar="N", help="candidates that CSD re-ranks in an index of means (--form mean)")
    add("--json", action="store_true", help="print the answer as JSON")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: %(default)s)")
    add("--precision", default="auto", help="auto, fp32, bf16, fp16 (default: %(default)s)")
    add = parser.add_argument_group("calibration").add_argument
    data = "held-out images with captions: writes what --coverage and --max-uncertainty need beside the index"
    add("--calibrate", metavar="DATA", help=data)
    add("--min-precision", type=Share, metavar="P", help="share of answers that is correct, for --max-uncertainty")
    within = "correct: among the K closest (default: %(default)s)"
    add("--within", type=PositiveInt, default=1, metavar="K", help=within)
    add = parser.add_argument_group("page").add_argument
    add("--serve", action="store_true", help="serve a search page")
    add("--host", default="127.0.0.1", help="address to serve at (default: %(default)s: this machine only)")
    add("--port", type=port, default=8000, help="port, 0 for a free one (default: %(default)s)")
    add("--allow-host", action="append", default=[], metavar="NAME", help="a name of this server; may be repeated")
    add("--max-upload", type=mebibytes, default=16, metavar="MIB", help="limit of one query (default: %(default)s)")
    options = parser.parse_intermixed_args(argv)  # texts may precede and follow options
    _check(parser, options)
    return options


def _check(parser: Parser, options: argparse.Namespace) -> None:
    if not options.index:
        raise UserError("--index is missing.", "Name the folder that tools.build_index has made.")
    if len(options.index) > 1 and not options.serve:
        raise UserError(f"--index is given {len(options.index)} times.", "Give one; only --serve takes several.")
    names = [folder.absolute().name for folder in options.index]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"Two indexes are called {twice}.", "Give each once, and rename one of two folders.")
    asked = bool(options.texts or options.image or options.without or options.without_image)
    if options.serve + bool(options.calibrate) + asked > 1:
        raise UserError("A query, --serve and --calibrate exclude each other.", "Use one at a time.")
    doing = SERVE if options.serve else CALIBRATE if options.calibrate else QUERY
    for name, belongs in BELONGS.items():
        if doing not in belongs and getattr(options, name) != parser.get_default(name):
            raise UserError(f"--{name.replace('_', '-')} does not belong to {doing}.", "Leave it out.")
    if options.tolerance is not None and not math.isfinite(options.tolerance):
        raise UserError(f"--tolerance is {options.tolerance}.", "Give a finite number, such as -1.")
    if options.rerank is not None and options.rerank < options.top:
        raise UserError(f"--rerank is {options.rerank}, --top {options.top}.", "Use at least as many candidates.")


def signed_weights(options: argparse.Namespace) -> list[float] | None:
    """The weight of every part of a query, texts first; below 0 for those of --without. None if all are 1.

    Raises UserError: they are no numbers above 0, or not as many as parts.
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
    if len(sizes) != len(signs) or not all(size > 0 for size in sizes):
        raise UserError(f"--weights is {options.weights} for {count(len(signs), 'part')}.", remedy)
    return [size * sign for size, sign in zip(sizes, signs)]


def open_searchers(options: argparse.Namespace) -> dict[str, Searcher]:
    """Searchers of the indexes, by name, with the models that made them. Raises UserError."""
    device = choose_device(options.device, options.precision)
    files = [file for folder in options.index for file in folder.rglob("*") if file.is_file()]
    in_memory = options.serve and sum(file.stat().st_size for file in files) <= machine_memory() / 4
    indexes, found = {folder: open_index(folder, options, in_memory) for folder in options.index}, {}

    @cache
    def encoder_of(name: str, resize: str) -> tuple[QueryEncoder, str]:
        """The encoder, and the hash of its weights."""
        loaded = models.load_model(name, device.name, resize)
        return QueryEncoder(loaded, name, device), models.weights_sha256(loaded.model)

    for folder, index in indexes.items():
        name = options.model or index.model
        try:
            encoder, weights = encoder_of(name, index.resize)
        except UserError as error:
            if options.model:
                raise
            remedy = f"The index {folder} was made with it; --model names its present location."
            raise UserError(error.what, remedy) from None
        if index.weights != weights:
            what = f"{folder} was made with {index.model} ({index.weights[:12]}), not {name} ({weights[:12]})."
            raise UserError(what, f"Search with --model {index.model}, or build an index with the other model.")
        calibration = None if options.calibrate else load_calibration(folder, index.weights)
        found[folder.absolute().name] = Searcher(index, encoder, options.tolerance, options.rerank, calibration)
    return found


def open_index(folder: Path, options: argparse.Namespace, in_memory: bool) -> Index:
    """An index, with what the options say of its searches. Raises UserError: they do not apply to it."""
    index = load_index(folder, memory_map=not in_memory)
    if options.rerank is not None and index.form != "mean":
        remedy = "Leave --rerank out, or build an index of the means with `python -m tools.build_index --form mean`."
        raise UserError(f"{folder} already ranks by CSD.", remedy)
    if options.effort is not None and options.effort > len(index):
        raise UserError(f"--effort is {options.effort:,} of {len(index):,} items.", "Give fewer.")
    if options.effort is not None and set_effort(index, options.effort) is None:
        raise UserError(f"The index '{index.factory}' always searches everything.", "Leave --effort out.")
    return index


def search_once(options: argparse.Namespace) -> int:
    """Answer one query."""
    images = [read_image(path) for path in (*options.image, *options.without_image)]
    texts, limit = [*options.texts, *options.without], options.max_uncertainty
    request = SearchRequest(
        texts, images, signed_weights(options), options.top, None if limit == CALIBRATED else limit,
        options.max_item_uncertainty, options.coverage and math.ceil(100 * options.coverage - 1e-9),
    )  # fmt: skip
    (searcher,) = open_searchers(options).values()
    if limit == CALIBRATED:
        limit = searcher.calibrated(["text"] * len(texts) + ["image"] * len(images))["max_uncertainty"]
        if limit is None:
            raise UserError("This index was calibrated without a threshold.", "Calibrate it with --min-precision P.")
        request = replace(request, max_uncertainty=limit)
    answer = searcher.answer(request)
    if options.json:
        print(json.dumps(finite(answer), indent=1, ensure_ascii=True))
    else:
        print_answer(answer)
    require_output()
    return REFUSED if answer["refused"] else 0


def print_answer(answer: dict) -> None:
    """Print the answer as a table; its texts are untrusted."""
    query = answer["query"]
    line = f"uncertainty of the query: {query['uncertainty']:.4g}"
    if len(query["parts"]) > 1:
        line += f" (its parts: {', '.join(format(part['uncertainty'], '.4g') for part in query['parts'])})"
    weighed = f"; ranked with the variances of the items times {answer['weight']:g}" if answer["weight"] != 1 else ""
    print(line + weighed)
    if query["unknown_words"]:
        words = ", ".join(map(printable, query["unknown_words"]))
        print(f"the model does not know: {words}; the uncertainty says nothing about that")
    if answer["refused"]:
        print(f"refused: that is above {answer['limit']:.4g}; make the query more specific, or raise the limit")
    elif not answer["results"]:
        print(f"no certain enough result among the {answer['looked_at']:,} closest")
    else:
        if answer["coverage"]:
            first = f"the right one is among the first {len(answer['results'])}"
            print(f"for {answer['coverage']} % of queries this uncertain, {first}")
        print("rank  distance  uncertainty  match              key  caption")
        for one in answer["results"]:
            p, texts = one["match"], (one["key"], *one["captions"][:1])
            match = "" if p is None else f"{100 * p:.3g} %, {p * answer['gallery']:.3g} x"
            row = f"{one['rank']:>4}  {one['distance']:>8.4f}  {one['uncertainty']:>11.4g}  {match:<17}"
            print(row, *map(printable, texts), sep="  ")
        if answer["results"][0]["match"] is not None:
            print(f"match: the probability if one of {answer['gallery']:,} matches, and as a multiple of the average")


def calibrate_index(options: argparse.Namespace) -> int:
    """Measure a threshold, print it among others, and store it beside the index."""
    (searcher,) = open_searchers(options).values()
    found, curve = calibrate(searcher, options.calibrate, options.min_precision, options.within, progress)
    with writing(options.index[0], "Free some space, or make it writable."):
        write_json(options.index[0] / NAME, found, "probemb tools.search --calibrate")
    print(f"{curve.queries:,} queries against {found['gallery']:,} items of {found['data']}")
    print("uncertainty up to  answered   correct  at least (95 %)")
    for u, *shares in zip(curve.threshold, curve.coverage, curve.precision, curve.at_least):
        print(f"{u:>17.4g}  {shares[0]:>8.1%}  {shares[1]:>8.1%}  {shares[2]:>15.1%}")
    print("results that hold the right one, for queries from the most certain to the least certain fifth:")
    for percent in ("50", "80", "90", "95"):
        print(f"--coverage 0.{percent}: {', '.join(f'{k:,}' if k else 'too many' for k in found['results'][percent])}")
    if found["max_uncertainty"] is not None:
        print(f"--max-uncertainty {CALIBRATED} is {found['max_uncertainty']:.4g}")
    print(f"written: {options.index[0] / NAME}", flush=True)
    return 0


def serve_page(options: argparse.Namespace) -> int:
    """Serve the page until interrupted."""
    from tools.search.page import addresses, is_loopback, make_app, make_server

    if not is_loopback(options.host):
        print(f"Everyone who can reach {options.host} can search and see the pictures.", file=sys.stderr)
    max_upload = options.max_upload << 20
    app = make_app(open_searchers(options), options.host, options.allow_host, max_upload)
    server = make_server(app, options.host, options.port, max_upload)
    print(f"serving {' and '.join(addresses(server))} (end with Ctrl-C)", flush=True)
    server.run()
    return 0
