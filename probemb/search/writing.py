"""Writes an index folder from embeddings, part by part, without holding the gallery in memory.

Several processes can each write a share of the parts (`write_share`); `write_index` then puts them together, which
moves no vectors.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.cli.progress import silent
from probemb.errors import UserError
from probemb.files import flush, replace_text
from probemb.search.choice import Choice, training_count
from probemb.search.embeddings import RESIZES, Embeddings
from probemb.search.folder import FORMAT, ITEMS, NAME, UNCERTAINTY
from probemb.search.gallery import Gallery
from probemb.search.index import fill, new_index, train
from probemb.search.items import ItemsWriter
from probemb.search.penalty import FORMS
from probemb.search.unfinished import TRAINED, Share, Unfinished

if TYPE_CHECKING:
    import faiss
    import numpy as np

MAX_STDERR = 1 << 20  # bytes of FAISS that are repeated


@dataclass(frozen=True)
class Recipe:
    """An index folder to build.

    Args:
        sources: of one model; their partitions in the order of their names are the gallery's order.
        kind: "image" or "text".
        form, tolerance: as `build_index` takes them.
        part_items: vectors in a FAISS file; all by default. A part is in memory while it is filled.
        train_items: to train on, drawn at random; by default as many as the factory needs.
        seed: of that choice.
        gpu: train on the GPU.
    """

    sources: Sequence[Embeddings]
    kind: str
    choice: Choice
    form: str = "csd"
    tolerance: float | None = None
    part_items: int | None = None
    train_items: int | None = None
    seed: int = 0
    gpu: bool = False

    def __post_init__(self):
        if self.form not in FORMS:
            raise ValueError(self.form)

    def gallery(self) -> Gallery:
        return Gallery(self.sources, self.kind, self.form, self.choice.factory, self.tolerance)

    def about(self, gallery: Gallery) -> dict:
        """The gallery's description in index.json."""
        first = self.sources[0]
        about = {"format": FORMAT, "model": first.model, "weights": first.weights, "dim": gallery.dim}
        about |= {"width": gallery.width, "kind": self.kind, "form": self.form, "factory": gallery.factory}
        about["count"] = gallery.count
        if first.resize != RESIZES[0]:
            about["resize"] = first.resize
        if self.form == "tolerance":
            about |= {"tolerance": gallery.penalty.weight, "largest_u": gallery.penalty.most}
        if gallery.penalty.least:
            about["least_u"] = gallery.penalty.least
        return about

    def plan(self, gallery: Gallery, shares: int = 1) -> dict:
        """All on which the parts depend; commands of another plan are refused."""
        return self.about(gallery) | {
            "rows": min(gallery.count, self.part_items or gallery.count),
            "train_items": min(gallery.count, self.train_items or training_count(gallery.factory, gallery.count)),
            "seed": self.seed,
            "embeddings": gallery.versions(),
            "why": self.choice.why,
            "shares": shares,
        }


def write_index(
    out: Path, recipe: Recipe, *, merge: bool = False, show: Callable | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Path:  # fmt: skip
    """Build an index folder, which appears only when it is complete. A repeated command resumes an interrupted build.

    Args:
        merge: build no parts: others have, by `write_share`.
        show: as `probemb.cli.progress.progress`; say: called with messages for the user.

    Raises UserError: no items, one that is not finite, an unknown factory or one that needs more items, no space on the
    disk, an existing `out`, an unfinished index of another plan, embeddings that change, parts that are missing.
    """
    refuse_existing(out)
    gallery = recipe.gallery()
    untrained = new_index(gallery.width, gallery.factory)
    plan = recipe.plan(gallery)
    with _cleaning_up(Unfinished(out, plan)) as unfinished:
        sizes = _sizes(plan)
        if merge:
            unfinished.require(len(sizes))
        _write_beside(unfinished.folder, gallery)
        _write_parts(unfinished, gallery, untrained, recipe.gpu, show or silent, say)
        _refuse_changed(unfinished, gallery)
        about = recipe.about(gallery)
        about["parts"] = [{"file": unfinished.part(number).name, "count": size} for number, size in enumerate(sizes)]
        about |= {"why": recipe.choice.why, "effort": recipe.choice.effort}
        replace_text(unfinished.folder / NAME, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        unfinished.finish(len(sizes))
    return out


def write_share(
    out: Path, recipe: Recipe, share: Share, *, show: Callable | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> None:  # fmt: skip
    """Build one share of the parts of `out`, while other processes build theirs; the first one trains the index.

    A repeated command resumes, and finds nothing to do if its share is complete. Arguments and errors as `write_index`.
    """
    refuse_existing(out)
    gallery = recipe.gallery()
    untrained = new_index(gallery.width, gallery.factory)
    with _cleaning_up(Unfinished(out, recipe.plan(gallery, share.of), share)) as unfinished:
        if share.number == 0:
            _trained(unfinished, gallery, untrained, recipe.gpu, say)
        else:
            _write_parts(unfinished, gallery, untrained, recipe.gpu, show or silent, say)
        unfinished.end_share()


def refuse_existing(out: Path) -> None:
    """Raises UserError if something is at `out`."""
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} is there already.", "Name another folder with --out, or remove it.")


@contextmanager
def _cleaning_up(unfinished: Unfinished) -> Iterator[Unfinished]:
    try:
        yield unfinished
    except OSError as error:
        unfinished.leave()
        raise UserError(
            f"The index cannot be written to {unfinished.out}: {error.strerror or error}.",
            "Free some space and repeat the command, which resumes, or name another --out.",
        ) from error
    except BaseException:
        unfinished.leave()
        raise


def _trained(
    unfinished: Unfinished, gallery: Gallery, index: faiss.Index, gpu: bool, say: Callable[[str], object]
) -> faiss.Index:
    """The trained index, from this build, the interrupted one, or another process."""
    if index.is_trained:
        return index
    path, plan = unfinished.folder / TRAINED, unfinished.plan
    if trained := _read_trained(path, bool(unfinished.share)):
        return trained
    with unfinished.training(say):
        if trained := _read_trained(path, bool(unfinished.share)):
            return trained
        with _each_line_once():
            _train(index, gallery.sample(plan["train_items"], plan["seed"]), gallery.factory, gpu)
        unfinished.keep(path, lambda aside: _write_faiss(index, aside), first=True)
    return _read_trained(path, True)


def _read_trained(path: Path, must: bool) -> faiss.Index | None:
    """The trained index; None if it is missing or, unless it `must` be readable, damaged. Raises UserError."""
    import faiss

    if not path.exists():
        return None
    try:
        return faiss.read_index(str(path))
    except RuntimeError as error:
        if not must:
            return None
        raise UserError(f"{path} is damaged.", f"Remove {path.parent} and build the index again.") from error


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


def _sizes(plan: dict) -> list[int]:
    """Items of each part."""
    return [min(plan["rows"], plan["count"] - start) for start in range(0, plan["count"], plan["rows"])]


def _write_parts(
    unfinished: Unfinished, gallery: Gallery, untrained: faiss.Index, gpu: bool, show: Callable,
    say: Callable[[str], object],
) -> None:  # fmt: skip
    """Fill clones of the trained index, one after the other, for those parts of this process that are missing."""
    sizes, rows, share = _sizes(unfinished.plan), unfinished.plan["rows"], unfinished.share
    mine = range(len(sizes)) if share is None else range(share.number - 1, len(sizes), share.of)
    built = unfinished.built()
    missing = [number for number in mine if number not in built]
    if share and not missing:
        say(f"nothing to do: the index has {len(sizes):,} parts, and those of {share} are complete")
    elif len(missing) < len(mine):
        say(f"resuming after {len(mine) - len(missing):,} of {len(mine):,} parts, which are complete")
    if not missing:
        return
    trained = _trained(unfinished, gallery, untrained, gpu, say)
    with show("items", sum(sizes[number] for number in missing)) as advance:
        for number in missing:
            index = clone(trained, gallery.factory)
            for vectors in gallery.vectors(number * rows, number * rows + sizes[number]):
                fill(index, vectors, gallery.factory)
                if advance:
                    advance(len(vectors))
            _refuse_changed(unfinished, gallery)  # before the part counts as complete
            unfinished.keep(unfinished.part(number), lambda aside, index=index: _write_faiss(index, aside))


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

    with open(path, "wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
