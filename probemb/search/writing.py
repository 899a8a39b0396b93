"""An index folder from embeddings, without holding the gallery in memory: one pass to train, one to add."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from probemb.embeddings import Embeddings, Partition
from probemb.errors import UserError
from probemb.files import flush
from probemb.search.choice import Choice, training_count
from probemb.search.folder import FORMAT, ITEMS, NAME, UNCERTAINTY
from probemb.search.index import FORMS, fill, gallery_vectors, new_index, train, width_of
from probemb.search.items import ItemsWriter

if TYPE_CHECKING:
    import faiss

ROWS = 1 << 16  # vectors that are handed to FAISS at a time
MAX_SAID = 1 << 20  # bytes


def write_index(
    out: Path, sources: Sequence[Embeddings], kind: str, choice: Choice, *, form: str = "csd",
    part_items: int | None = None, train_items: int | None = None, seed: int = 0, gpu: bool = False,
    advance: Callable[[int], object] = lambda n: None,
) -> Path:  # fmt: skip
    """Build an index folder; it is made aside and renamed, so that it is there as a whole or not at all.

    Args:
        sources: of one model; their partitions in the order of their names are the gallery's order.
        kind: "image" or "text".
        part_items: vectors in a FAISS file; all by default. A part is in memory while it is filled.
        train_items: to train on, drawn at random; by default as many as the factory needs.
        gpu: train on the GPU.
        advance: called with the number of items that were added.

    Raises:
        UserError: no items, one that is not finite, a factory that FAISS does not know or that needs more items, no
            room on the disk, an `out` that is there.
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
    trained = new_index(width, choice.factory)
    wanted = min(count, train_items or training_count(choice.factory, count))
    if not trained.is_trained:
        with _each_line_once():
            _train(trained, _sample(parts, count, wanted, seed, form, choice.factory), choice.factory, gpu)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise UserError(f"The index cannot be written to {out}: {error.strerror}.", "Name another --out.") from error
    try:
        rows = _write_parts(aside, trained, parts, form, choice.factory, part_items or count, advance)
        about = {
            "format": FORMAT,
            "model": sources[0].model,
            "weights": sources[0].weights,
            "dim": dim,
            "width": width,
            "kind": kind,
            "form": form,
            "factory": choice.factory,
            "why": choice.why,
            "effort": choice.effort,
            "count": count,
            "parts": rows,
        }
        (aside / NAME).write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for file in [*aside.rglob("*"), aside]:
            flush(file)
        aside.chmod(0o755)
        aside.rename(out)
    except OSError as error:
        raise UserError(
            f"The index cannot be written to {out}: {error.strerror or error}.",
            "Free some space or name another folder with --out, and repeat the command.",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # gone if it was renamed
    return out


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


def _batches(parts: Sequence[tuple[Embeddings, Partition]]) -> Iterator[tuple[np.ndarray, np.ndarray, object]]:
    """(mean, u, table of items) of every partition that has rows."""
    for source, part in parts:
        if part.count:
            yield *source.read(part), source.read_items(part)


def _write_parts(
    folder: Path, trained: faiss.Index, parts: Sequence[tuple[Embeddings, Partition]], form: str, factory: str,
    part_items: int, advance: Callable[[int], object],
) -> list[dict]:  # fmt: skip
    """Fill clones of the trained index one after the other; what stands in index.json about them."""
    import faiss

    rows: list[dict] = []
    index = faiss.clone_index(trained)

    def finish() -> None:
        name = f"part-{len(rows):05d}.faiss"
        try:
            faiss.write_index(index, str(folder / name))
        except RuntimeError as error:
            raise OSError(0, f"FAISS could not write {name}", str(folder)) from error
        rows.append({"file": name, "count": index.ntotal})

    items = ItemsWriter(folder / ITEMS)
    with open(folder / UNCERTAINTY, "wb") as uncertainty:
        for mean, u, table in _batches(parts):
            items.add(table)
            uncertainty.write(u.astype("<f4").tobytes())
            start = 0
            while start < len(u):
                end = min(len(u), start + ROWS, start + part_items - index.ntotal)
                fill(index, gallery_vectors(mean[start:end], u[start:end], form, factory), factory)
                advance(end - start)
                start = end
                if index.ntotal >= part_items:
                    finish()
                    index = faiss.clone_index(trained)
    if index.ntotal:
        finish()
    items.close()
    return rows
