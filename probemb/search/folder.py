"""An index in a folder: FAISS files that are read through the page cache, so that a gallery may exceed the memory.

    INDEX/index.json             {"format", "identity", "model", "weights", "resize", "dim", "width", "kind", "form",
                                  "weight", "origin", "factory", "effort", "count", "parts": [items of each]}
    INDEX/part-00000.faiss …     FAISS' own files, together the gallery in its order
    INDEX/u.f32                  N little-endian float32: the items' uncertainty, which re-ranking reads
    INDEX/sample.f32             means of evenly spaced items, see `Index.sample`
    INDEX/items.arrow            metadata of each item, an Arrow file with the columns of `item_schema`

FAISS does not check its files: load only your own. An opened index keeps all of its files or their content, so
replacing or removing the folder changes nothing for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa
import torch

from probemb.errors import Extra, UserError
from probemb.files import flush, replace_text, writing
from probemb.progress import silent
from probemb.runs.lock import new_folder
from probemb.search import index as indexes
from probemb.search.embeddings import Embeddings, item_schema, read_json
from probemb.search.index import Choice, Index

faiss = Extra("faiss")
FORMAT = 4
NAME, UNCERTAINTY, SAMPLE, ITEMS = "index.json", "u.f32", "sample.f32", "items.arrow"
TOLD = ("identity", "model", "weights", "resize", "dim", "width", "kind", "form", "weight", "origin", "factory")
_REBUILD = "Rebuild the index with `python -m tools.build_index`."


def write_index(
    out: Path, sources: Sequence[Embeddings], kind: str, choice: Choice, *, form: str = "csd",
    tolerance: float = 1.0, part_items: int | None = None, memory: int = 1 << 62, show: Callable = silent,
) -> Path:  # fmt: skip
    """Build an index folder of "image" or "text" items, aside: it appears when it is complete.

    The gallery's order is that of the partitions in the sources, which are of one model. form, tolerance: as of
    `build_index`; part_items: vectors in a FAISS file; memory: bytes, which bound the items to train on. Raises
    UserError: no items, one that is not finite, an unfit factory, a full disk, an existing `out`.
    """
    parts = [(source, part) for source in sources for part in source.partitions(kind) if part.count]
    count, model = sum(part.count for _, part in parts), sources[0]
    if not count:
        what = f"{' and '.join(str(source.folder) for source in sources)} hold no {kind} embeddings."
        raise UserError(what, f"Make them with `python -m tools.embed --items {kind}`.")
    least, most = (end(part.u[i] for _, part in parts) for i, end in enumerate((min, max)))
    weight, origin = indexes.weighing(form, tolerance, least, most)

    def vectors(mean: np.ndarray, u: np.ndarray) -> np.ndarray:
        return indexes.gallery_vectors(mean, u, form, choice.factory, weight, origin)

    starts = np.cumsum([0, *(part.count for _, part in parts)])

    def of_parts(rows: np.ndarray) -> list[np.ndarray]:  # ascending rows of the gallery -> rows of each partition
        return [some - start for some, start in zip(np.split(rows, np.searchsorted(rows, starts[1:-1])), starts)]

    width, sizes, names = indexes.width_of(model.dim, form, choice.factory), [], [UNCERTAINTY, SAMPLE, ITEMS]
    rows, empty = part_items or count, indexes.new_index(width, choice.factory)
    with _aside(out) as folder, indexes.faiss_errors(choice.factory), show("items", count) as advance:
        if not empty.is_trained:
            wanted = indexes.training_count(choice.factory, count, model.dim, memory)
            drawn = np.random.default_rng(0).choice(count, wanted, replace=False, shuffle=False)
            chosen = ((one, some) for one, some in zip(parts, of_parts(np.sort(drawn))) if len(some))
            _train(empty, np.concatenate([vectors(*(x[some] for x in s.read(part))) for (s, part), some in chosen]))
        index = faiss.clone_index(empty)
        with ExitStack() as stack:
            u_file, sample_file, items_file = (stack.enter_context(open(folder / name, "wb")) for name in names)
            items = stack.enter_context(pa.ipc.new_file(items_file, item_schema(kind)))
            sample = of_parts(indexes.sample_rows(count).numpy())
            for (source, part), kept, stop in zip(parts, sample, starts[1:]):
                mean, u = source.read(part)
                items.write_table(source.read_items(part))
                u_file.write(u.astype("<f4"))
                sample_file.write(mean[kept].astype("<f4"))
                left = vectors(mean, u)
                while len(left):
                    added, left = np.split(left, [rows - index.ntotal])
                    index.add(added)
                    if index.ntotal == rows or (stop == count and not len(left)):
                        names.append(f"part-{len(sizes):05d}.faiss")
                        with open(folder / names[-1], "wb") as file:  # FAISS' own may not report a full disk
                            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
                        sizes.append(index.ntotal)
                        index = faiss.clone_index(empty)
                advance(part.count)
        for name in names:
            flush(folder / name)
        about = {"format": FORMAT, "identity": uuid4().hex[:16], "model": model.model, "weights": model.weights}
        about |= {"resize": model.resize, "dim": model.dim, "width": width, "kind": kind, "form": form}
        about |= {"weight": weight, "origin": origin, "factory": choice.factory, "effort": choice.effort}
        about |= {"count": count, "parts": sizes}
        replace_text(folder / NAME, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return out


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """`new_folder`. Raises UserError: it exists, or cannot be written."""
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} already exists.", "Name another folder with --out, or remove it.")
    with writing(out), new_folder(out) as folder:
        yield folder


def _train(index: faiss.Index, vectors: np.ndarray) -> None:
    """Train, the cells of an inverted file on the GPUs if there are some."""
    inverted = faiss.try_extract_index_ivf(index) if getattr(faiss, "get_num_gpus", lambda: 0)() else None
    if inverted is not None:
        cells = faiss.index_cpu_to_all_gpus(faiss.IndexFlatL2(inverted.d))
        inverted.clustering_index = cells
    index.train(vectors)
    if inverted is not None:
        inverted.clustering_index = None


def load_index(folder: str | Path, memory_map: bool = True) -> Index:
    """The index in a folder that `tools.build_index` wrote. memory_map: read only the pages that a search needs; then
    writing into a file crashes the process, replacing it does not. Raises UserError: a file is missing or damaged.
    """
    folder = Path(folder)
    if not (folder / NAME).is_file():
        raise UserError(f"There is no index in {folder}.", "Build one with `python -m tools.build_index`.")
    about = read_json(folder / NAME, FORMAT, _REBUILD)
    mapped = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY if "IVF" in about["factory"] else faiss.IO_FLAG_MMAP_IFC
    parts = []
    for number, items in enumerate(about["parts"]):
        path = folder / f"part-{number:05d}.faiss"
        try:
            part = faiss.read_index(str(path), mapped if memory_map else 0)
        except RuntimeError as error:
            raise UserError(f"{path} cannot be read as an index of FAISS.", _REBUILD) from error
        if (part.ntotal, part.d) != (items, about["width"]):
            what = f"{path} holds {part.ntotal:,} vectors of {part.d} dimensions, not {items:,} of {about['width']}."
            raise UserError(what, _REBUILD)
        parts.append(part)
    count = about["count"]
    rows = indexes.sample_rows(count)
    try:
        opened = pa.memory_map(str(folder / ITEMS)) if memory_map else pa.OSFile(str(folder / ITEMS))
        items = pa.ipc.open_file(opened).read_all()
        if len(items) != count:
            raise ValueError("another size")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / ITEMS} cannot be read ({error}).", _REBUILD) from error
    index = Index(
        parts=tuple(parts),
        uncertainty=_read(folder / UNCERTAINTY, (count,), memory_map),
        sample=(rows, _read(folder / SAMPLE, (len(rows), about["dim"]), False)),
        items=items,
        **{name: about[name] for name in TOLD},
    )
    if about["effort"]:
        indexes.set_effort(index, about["effort"])
    return index


def _read(path: Path, shape: tuple[int, ...], memory_map: bool) -> torch.Tensor:
    try:
        # Copy on write, as torch wants a writable array.
        numbers = np.memmap(path, "<f4", "c", shape=shape) if memory_map else np.fromfile(path, "<f4").reshape(shape)
        if path.stat().st_size != numbers.nbytes:
            raise ValueError("another size")
        return torch.from_numpy(numbers)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}).", _REBUILD) from error
