"""Search an index with texts and images, from the shell or on a page.

    python -m tools.search "two dogs on grass" --index index/cc3m                      # a table
    python -m tools.search "the same, at night" --image x.jpg --index index/cc3m --json
    python -m tools.search "a beach" "a dog" --without "people" --weights 1,2,0.5 --index index/cc3m
    python -m tools.search "a dog" --more general --index index/captions               # what includes the query
    python -m tools.search --serve --index index/cc3m --index index/cc12m              # a search page
    python -m tools.search --calibrate data/val --index index/cc3m                     # calibrate refusals
    python -m tools.search "a dog" --min-precision 0.8 --index index/cc3m
    python -m tools.search --image x.jpg --fits --tolerance -1 --index index/captions  # all that fits, not the closest

Several texts and images form one query, by the composer that the model was trained with, else the product of their
normals (MPC). Results are ranked by CSD. A query more uncertain than --max-uncertainty is refused with exit code 1, as
is one whose calibrated score is above the threshold for --min-precision, or above --max-score.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.errors import UserError
from tools.search.options import parse, signed_weights

if TYPE_CHECKING:
    from probemb.search import Index
    from tools.search.query import Searcher

REFUSED = 1


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.serve:
        return serve_page(options)
    if options.calibrate:
        return calibrate_index(options)
    return search_once(options)


def open_searchers(options: argparse.Namespace, calibrated: bool = True) -> dict[str, Searcher]:
    """Searchers of the indexes, by name, with the models that made them. Raises UserError."""
    from probemb.cli.device import choose_device
    from probemb.cli.machine import machine_memory
    from probemb.models import load_model, weights_sha256
    from probemb.search import require_model
    from tools.search.calibration import load_calibration
    from tools.search.decoding import DecodingPool
    from tools.search.encoding import QueryEncoder
    from tools.search.query import Searcher

    device, decoding = choose_device(options.device, options.precision), DecodingPool()
    on_gpu = options.serve and device.name.startswith("cuda")  # one query takes less time than the copy
    files = [file for folder in options.index for file in folder.rglob("*") if file.is_file()]
    in_memory = options.serve and sum(file.stat().st_size for file in files) <= machine_memory() / 4
    indexes = {folder: open_index(folder, options, "auto" if on_gpu else "cpu", in_memory) for folder in options.index}
    encoders: dict[tuple[str, str], QueryEncoder] = {}  # by model and by who resizes
    weights: dict[str, str] = {}
    found = {}
    for title, (folder, index) in zip(index_names(options.index), indexes.items()):
        name = options.model or index.model
        key = name, index.resize
        if key not in encoders:
            try:
                encoders[key] = QueryEncoder(load_model(name, device.name, index.resize), name, device, decoding)
            except UserError as error:
                if options.model:
                    raise
                what = f"The index {folder} was made with it; --model names its present location."
                raise UserError(error.what, what) from None
            weights[name] = weights_sha256(encoders[key].loaded.model)
        require_model(index, name, weights[name], encoders[key].loaded.model.embed_dim)
        calibration = load_calibration(folder, index.weights) if calibrated else None
        found[title] = Searcher(index, encoders[key], calibration, options.rerank, options.tolerance)
    return found


def open_searcher(options: argparse.Namespace, calibrated: bool = True) -> Searcher:
    """The searcher of a single index. Raises UserError."""
    (searcher,) = open_searchers(options, calibrated).values()
    return searcher


def open_index(folder: Path, options: argparse.Namespace, device: str, in_memory: bool) -> Index:
    """An index, with what the options say of its searches. Raises UserError: they do not apply to it."""
    from probemb.search import load_index, set_effort

    index = load_index(folder, device, memory_map=not in_memory)
    if options.rerank is not None and index.form != "mean":
        raise UserError(
            f"{folder} already ranks by CSD.",
            "Leave --rerank out, or build an index of the means with `python -m tools.build_index --form mean`.",
        )
    if options.effort is not None and options.effort > len(index):
        raise UserError(f"--effort is {options.effort:,} of {len(index):,} items.", "Give fewer.")
    if options.effort is not None and set_effort(index, options.effort) is None:
        raise UserError(f"The index '{index.factory}' always searches everything.", "Leave --effort out.")
    return index


def index_names(folders: Sequence[Path]) -> list[str]:
    """Names of distinct folders: their last components, as many as tell them apart."""
    parts = [folder.absolute().parts[1:] for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            break
    return names


def search_once(options: argparse.Namespace) -> int:
    """Answer one query."""
    from tools.search.tables import print_answer
    from tools.search.wish import Wish, check_wish, read_image

    images = [read_image(path) for path in (*options.image, *options.without_image)]
    wish = Wish(
        [*options.texts, *options.without], images, options.top, options.max_uncertainty,
        options.max_item_uncertainty, options.min_precision, options.fits, options.max_score, signed_weights(options),
        options.more,
    )  # fmt: skip
    check_wish(wish)
    answer = open_searcher(options).answer(wish)
    if options.json:
        from probemb.cli.results import finite

        print(json.dumps(finite(answer), indent=1, ensure_ascii=True))
    else:
        print_answer(answer)
    return REFUSED if answer["refused"] else 0


def calibrate_index(options: argparse.Namespace) -> int:
    """Measure a calibration and store it beside the index."""
    from probemb.cli.progress import progress
    from tools.search.calibrating import calibrate
    from tools.search.calibration import save_calibration
    from tools.search.tables import print_calibration

    searcher = open_searcher(options, calibrated=False)
    calibration = calibrate(searcher, options.calibrate, options.rivals, options.within, progress)
    (folder,) = options.index
    before = replaced(folder, calibration.weights)
    path = save_calibration(folder, calibration)
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


def serve_page(options: argparse.Namespace) -> int:
    """Serve the page until interrupted."""
    import sys

    from tools.search.web.guard import is_loopback
    from tools.search.web.page import make_app
    from tools.search.web.server import addresses, make_server

    if not is_loopback(options.host):
        print(f"Everyone who can reach {options.host} can search and see the pictures.", file=sys.stderr)
    max_upload = options.max_upload << 20
    app = make_app(open_searchers(options), options.host, options.allow_host, max_upload)
    server = make_server(app, options.host, options.port, max_upload)
    print(f"serving {' and '.join(addresses(server))} (end with Ctrl-C)", flush=True)
    server.run()
    return 0
