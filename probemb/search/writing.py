"""Writes an index folder from embeddings, part by part, without holding the gallery in memory."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.cli.progress import silent
from probemb.errors import UserError
from probemb.files import flush, replace_file, replace_text
from probemb.search.choice import Choice, training_count
from probemb.search.embeddings import Embeddings
from probemb.search.folder import FORMAT, ITEMS, NAME, UNCERTAINTY
from probemb.search.gallery import Gallery
from probemb.search.index import fill, new_index, train
from probemb.search.items import ItemsWriter
from probemb.search.penalty import FORMS
from probemb.search.unfinished import TRAINED, Unfinished

if TYPE_CHECKING:
    import faiss
    import numpy as np

MAX_STDERR = 1 << 20  # bytes of FAISS that are repeated


def write_index(
    out: Path, sources: Sequence[Embeddings], kind: str, choice: Choice, *, form: str = "csd",
    tolerance: float | None = None, part_items: int | None = None, train_items: int | None = None, seed: int = 0,
    gpu: bool = False, show: Callable | None = None, say: Callable[[str], object] = lambda text: None,
) -> Path:  # fmt: skip
    """Build an index folder, which appears only when it is complete. A repeated command resumes an interrupted build.

    Args:
        sources: of one model; their partitions in the order of their names are the gallery's order.
        kind: "image" or "text".
        form, tolerance: as `build_index` takes them.
        part_items: vectors in a FAISS file; all by default. A part is in memory while it is filled.
        train_items: to train on, drawn at random; by default as many as the factory needs.
        gpu: train on the GPU.
        show: as `probemb.cli.progress.progress`; say: called with messages for the user.

    Raises UserError: no items, one that is not finite, an unknown factory or one that needs more items, no space on the
    disk, an existing `out`, an unfinished index of another plan, embeddings that change.
    """
    if form not in FORMS:
        raise ValueError(form)
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} is there already.", "Name another folder with --out, or remove it.")
    gallery = Gallery(sources, kind, form, choice.factory, tolerance)
    untrained = new_index(gallery.width, choice.factory)
    about = {"format": FORMAT, "model": sources[0].model, "weights": sources[0].weights, "dim": gallery.dim}
    about |= {"width": gallery.width, "kind": kind, "form": form, "factory": choice.factory, "count": gallery.count}
    if form == "tolerance":
        about |= {"tolerance": gallery.penalty.weight, "largest_u": gallery.penalty.most}
    if gallery.penalty.least:
        about["least_u"] = gallery.penalty.least
    plan = about | {
        "rows": min(gallery.count, part_items or gallery.count),
        "train_items": min(gallery.count, train_items or training_count(choice.factory, gallery.count)),
        "seed": seed,
        "embeddings": gallery.versions(),
    }
    unfinished = Unfinished(out, plan)
    try:
        trained = _trained(unfinished, gallery, untrained, gpu)
        _write_beside(unfinished.folder, gallery)
        about["parts"] = _write_parts(unfinished, gallery, trained, show or silent, say)
        about |= {"why": choice.why, "effort": choice.effort}
        replace_text(unfinished.folder / NAME, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        unfinished.finish(len(about["parts"]))
    except OSError as error:
        unfinished.leave()
        raise UserError(
            f"The index cannot be written to {out}: {error.strerror or error}.",
            "Free some space and repeat the command, which resumes, or name another --out.",
        ) from error
    except BaseException:
        unfinished.leave()
        raise
    return out


def _trained(unfinished: Unfinished, gallery: Gallery, index: faiss.Index, gpu: bool) -> faiss.Index:
    """The trained index, from this build or the interrupted one."""
    import faiss

    if index.is_trained:
        return index
    path, plan = unfinished.folder / TRAINED, unfinished.plan
    with suppress(RuntimeError):  # missing or damaged
        return faiss.read_index(str(path))
    with _each_line_once():
        _train(index, gallery.sample(plan["train_items"], plan["seed"]), gallery.factory, gpu)
    _write_faiss(index, path)
    return faiss.read_index(str(path))


@contextmanager
def _each_line_once() -> Iterator[None]:
    """Print each line of FAISS on stderr once: it repeats a warning for each of hundreds of small clusterings."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            lines = dict.fromkeys(said.read(MAX_STDERR).decode(errors="replace").splitlines())
            print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr, flush=True)


def _train(index: faiss.Index, vectors: np.ndarray, factory: str, gpu: bool) -> None:
    import faiss

    inverted = faiss.try_extract_index_ivf(index) if gpu else None
    if inverted is None:
        return train(index, vectors, factory)
    cells = faiss.index_cpu_to_all_gpus(faiss.IndexFlatL2(inverted.d))  # only the cells' centres gain from a GPU
    inverted.clustering_index = cells
    try:
        return train(index, vectors, factory)
    finally:
        inverted.clustering_index = None


def _write_beside(folder: Path, gallery: Gallery) -> None:
    """Write the uncertainties and metadata of all items."""
    if (folder / ITEMS).exists():
        return
    aside = folder / f"{ITEMS}.aside"
    items = ItemsWriter(aside)
    with open(folder / UNCERTAINTY, "wb") as uncertainty:
        for source, part in gallery.parts:
            if part.count:
                items.add(source.read_items(part))
                uncertainty.write(source.read_uncertainty(part).astype("<f4").tobytes())
    items.close()
    for file in [folder / UNCERTAINTY, *aside.iterdir(), aside]:
        flush(file)
    aside.rename(folder / ITEMS)  # last: it marks both as complete
    flush(folder)


def _write_parts(
    unfinished: Unfinished, gallery: Gallery, trained: faiss.Index, show: Callable, say: Callable[[str], object]
) -> list[dict]:
    """Fill clones of the trained index, one after the other; returns their entries for index.json."""
    rows = unfinished.plan["rows"]
    sizes = [min(rows, gallery.count - start) for start in range(0, gallery.count, rows)]
    done = unfinished.parts()
    if done:
        say(f"resuming after {done:,} of {len(sizes):,} parts, which are complete")
    with show("items", sum(sizes[done:])) as advance:
        for number in range(done, len(sizes)):
            index = clone(trained, gallery.factory)
            for vectors in gallery.vectors(number * rows, number * rows + sizes[number]):
                fill(index, vectors, gallery.factory)
                if advance:
                    advance(len(vectors))
            _refuse_changed(unfinished, gallery)  # before the part counts as complete
            _write_faiss(index, unfinished.part(number))
    _refuse_changed(unfinished, gallery)
    return [{"file": unfinished.part(number).name, "count": size} for number, size in enumerate(sizes)]


def clone(index: faiss.Index, factory: str) -> faiss.Index:
    """Copy an index. Raises UserError: FAISS cannot copy all types."""
    import faiss

    try:
        return faiss.clone_index(index)
    except RuntimeError as error:
        raise UserError(f"FAISS cannot copy the index '{factory}'.", "Use a string such as IVF256,Flat.") from error


def _refuse_changed(unfinished: Unfinished, gallery: Gallery) -> None:
    if gallery.versions() != unfinished.plan["embeddings"]:
        raise UserError(
            "The embeddings have changed while their index was built.",
            f"Remove {unfinished.folder} and repeat the command.",
        )


def _write_faiss(index: faiss.Index, path: Path) -> None:
    """Write through Python's file, as FAISS' own does not report a full disk for the last bytes. Raises OSError."""
    import faiss

    def write(aside: Path) -> None:
        with open(aside, "wb") as file:
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))

    replace_file(path, write)
