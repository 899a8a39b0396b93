"""An index folder from embeddings, without holding the gallery in memory, one part after the other."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from probemb.embeddings import Embeddings, Partition
from probemb.errors import UserError
from probemb.files import flush, replace_file, replace_text
from probemb.progress import silent
from probemb.search.choice import Choice, training_count
from probemb.search.folder import FORMAT, ITEMS, NAME, UNCERTAINTY
from probemb.search.index import FORMS, fill, gallery_vectors, new_index, train, width_of
from probemb.search.items import ItemsWriter
from probemb.search.unfinished import TRAINED, Unfinished

if TYPE_CHECKING:
    import faiss

ROWS = 1 << 16  # vectors that are handed to FAISS at a time
MAX_SAID = 1 << 20  # bytes


def write_index(
    out: Path, sources: Sequence[Embeddings], kind: str, choice: Choice, *, form: str = "csd",
    part_items: int | None = None, train_items: int | None = None, seed: int = 0, gpu: bool = False,
    show: Callable | None = None, say: Callable[[str], object] = lambda text: None,
) -> Path:  # fmt: skip
    """Build an index folder; it is made aside and renamed, so that it is there as a whole or not at all.

    A build that was interrupted goes on, when it is repeated, with what it was trained on and behind the last part that
    is complete.

    Args:
        sources: of one model; their partitions in the order of their names are the gallery's order.
        kind: "image" or "text".
        part_items: vectors in a FAISS file; all by default. A part is in memory while it is filled.
        train_items: to train on, drawn at random; by default as many as the factory needs.
        gpu: train on the GPU.
        show: as `probemb.progress.progress`; say: called with what a person should know.

    Raises:
        UserError: no items, one that is not finite, a factory that FAISS does not know or that needs more items, no
            room on the disk, an `out` that is there, an unfinished index of another plan, embeddings that change.
    """
    if form not in FORMS:
        raise ValueError(form)
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} is there already.", "Name another folder with --out, or remove it.")
    parts = [(source, part) for source in sources for part in source.partitions(kind)]
    count = sum(part.count for _, part in parts)
    if not count:
        raise UserError(
            f"{' and '.join(str(source.folder) for source in sources)} hold no {kind} embeddings.",
            f"Make them with `python -m tools.embed --items {kind}`.",
        )
    dim = sources[0].dim
    width = width_of(dim, form, choice.factory)
    untrained = new_index(width, choice.factory)
    about = {
        "format": FORMAT,
        "model": sources[0].model,
        "weights": sources[0].weights,
        "dim": dim,
        "width": width,
        "kind": kind,
        "form": form,
        "factory": choice.factory,
        "count": count,
    }
    wanted = min(count, train_items or training_count(choice.factory, count))
    rows = min(count, part_items or count)
    files = _versions(parts)
    unfinished = Unfinished(out, {**about, "rows": rows, "train_items": wanted, "seed": seed, "embeddings": files})

    def check() -> None:
        if _versions(parts) != files:
            raise UserError(
                "The embeddings have changed while their index was built.",
                f"Remove {unfinished.folder} and repeat the command.",
            )

    if done := unfinished.parts():
        say(f"going on behind {done:,} of {-(-count // rows):,} parts, which are complete")
    try:
        trained = _trained(unfinished, untrained, parts, count, wanted, seed, form, choice.factory, gpu)
        _write_beside(unfinished.folder, parts)
        about["parts"] = _write_parts(unfinished, trained, parts, count, rows, form, choice.factory, check, show)
        about |= {"why": choice.why, "effort": choice.effort}
        replace_text(unfinished.folder / NAME, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        unfinished.finish(len(about["parts"]))
    except OSError as error:
        unfinished.leave()
        raise UserError(
            f"The index cannot be written to {out}: {error.strerror or error}.",
            "Free some space and repeat the command, which goes on with what is complete, or name another --out.",
        ) from error
    except BaseException:
        unfinished.leave()
        raise
    return out


def _versions(parts: Sequence[tuple[Embeddings, Partition]]) -> list[list]:
    """What tells whether the files of embeddings are still the same: [path, bytes, time of change] of each."""
    found = []
    for source, part in parts:
        path = source.path(part)
        try:
            status = path.stat()
            found.append([str(path.absolute()), status.st_size, status.st_mtime_ns])
        except OSError:  # reading it says why
            found.append([str(path.absolute()), None, None])
    return found


def _trained(
    unfinished: Unfinished, index: faiss.Index, parts: Sequence[tuple[Embeddings, Partition]], count: int,
    wanted: int, seed: int, form: str, factory: str, gpu: bool,
) -> faiss.Index:  # fmt: skip
    """The index trained, by this build or by the one that was interrupted."""
    import faiss

    if index.is_trained:
        return index
    path = unfinished.folder / TRAINED
    with suppress(RuntimeError):  # none, or not FAISS' own
        return faiss.read_index(str(path))
    with _each_line_once():
        _train(index, _sample(parts, count, wanted, seed, form, factory), factory, gpu)
    _write_faiss(index, path)
    return faiss.read_index(str(path))


@contextmanager
def _each_line_once() -> Iterator[None]:
    """What FAISS says on stderr, each line once: it repeats a warning for each of hundreds of small clusterings."""
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
            lines = said.read(MAX_SAID).decode(errors="replace").splitlines()
            for line in dict.fromkeys(lines):
                print(line, file=sys.stderr, flush=True)


def _train(index: faiss.Index, vectors: np.ndarray, factory: str, gpu: bool) -> None:
    import faiss

    inverted = faiss.try_extract_index_ivf(index) if gpu else None
    if inverted is None:
        return train(index, vectors, factory)
    cells = faiss.index_cpu_to_all_gpus(faiss.IndexFlatL2(inverted.d))  # the cells' centres alone are worth a GPU
    inverted.clustering_index = cells
    try:
        return train(index, vectors, factory)
    finally:
        inverted.clustering_index = None


def _sample(
    parts: Sequence[tuple[Embeddings, Partition]], count: int, wanted: int, seed: int, form: str, factory: str
) -> np.ndarray:
    """`wanted` of all items, drawn without replacement and in their order, as vectors."""
    drawn = np.sort(np.random.default_rng(seed).choice(count, wanted, replace=False, shuffle=False))
    found = np.empty((wanted, width_of(parts[0][0].dim, form, factory)), dtype=np.float32)
    start = 0
    for source, part in parts:
        first, last = np.searchsorted(drawn, (start, start + part.count))
        if last > first:
            mean, u = source.read(part)
            rows = drawn[first:last] - start
            found[first:last] = gallery_vectors(mean[rows], u[rows], form, factory)
        start += part.count
    return found


def _write_beside(folder: Path, parts: Sequence[tuple[Embeddings, Partition]]) -> None:
    """What stands behind the vectors: their uncertainties and what they are of."""
    if (folder / ITEMS).exists():
        return
    aside = folder / f"{ITEMS}.aside"
    items = ItemsWriter(aside)
    with open(folder / UNCERTAINTY, "wb") as uncertainty:
        for source, part in parts:
            if part.count:
                items.add(source.read_items(part))
                uncertainty.write(source.read_uncertainty(part).astype("<f4").tobytes())
    items.close()
    for file in [folder / UNCERTAINTY, *aside.iterdir(), aside]:
        flush(file)
    aside.rename(folder / ITEMS)  # last: it says that both are complete
    flush(folder)


def _write_parts(
    unfinished: Unfinished, trained: faiss.Index, parts: Sequence[tuple[Embeddings, Partition]], count: int,
    rows: int, form: str, factory: str, check: Callable[[], object], show: Callable | None,
) -> list[dict]:  # fmt: skip
    """Fill clones of the trained index, `rows` vectors each; what stands in index.json about them."""
    import faiss

    sizes = [min(rows, count - start) for start in range(0, count, rows)]
    done = unfinished.parts()
    with (show or silent)("items", sum(sizes[done:])) as advance:
        for number in range(done, len(sizes)):
            index = faiss.clone_index(trained)
            start = number * rows
            for mean, u in _read(parts, start, start + sizes[number]):
                for first in range(0, len(u), ROWS):
                    some = slice(first, first + ROWS)
                    fill(index, gallery_vectors(mean[some], u[some], form, factory), factory)
                    if advance:
                        advance(len(u[some]))
            check()
            _write_faiss(index, unfinished.part(number))
    check()
    return [{"file": unfinished.part(number).name, "count": size} for number, size in enumerate(sizes)]


def _read(parts: Sequence[tuple[Embeddings, Partition]], start: int, end: int) -> Iterator[tuple]:
    """(mean, u) of the gallery's rows from `start` to `end`, partition by partition."""
    place = 0
    for source, part in parts:
        if place < end and place + part.count > start:
            mean, u = source.read(part)
            rows = slice(max(0, start - place), end - place)
            yield mean[rows], u[rows]
        place += part.count


def _write_faiss(index: faiss.Index, path: Path) -> None:
    """Raises OSError. Through a file of Python's: FAISS' own does not say when the last bytes find no room."""
    import faiss

    def write(aside: Path) -> None:
        with open(aside, "wb") as file:
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))

    replace_file(path, write)
