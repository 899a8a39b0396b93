"""An index in a folder: FAISS files that are read through the page cache, so that a gallery may exceed the memory.

    INDEX/index.json             {"format", "identity", "model", "weights", "resize", "dim", "width", "kind", "form",
                                  "weight", "origin", "factory", "why", "effort", "count",
                                  "parts": [items of each]}
    INDEX/part-00000.faiss …     FAISS' own files, together the gallery in its order
    INDEX/u.f32                  N little-endian float32: the items' uncertainty, which re-ranking reads
    INDEX/sample.f32             means of evenly spaced items, see `Index.sample`
    INDEX/items/0.parquet …      metadata of each item: 65,536 rows each, in groups of 1,024

FAISS does not check its files: load only your own. An opened index keeps all of its files or their content, so
replacing or removing the folder changes nothing for it.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from uuid import uuid4

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from probemb.errors import UserError
from probemb.files import flush, replace_text
from probemb.progress import silent
from probemb.search.choice import Choice, training_count
from probemb.search.embeddings import Embeddings, Partition, read_json
from probemb.search.index import (
    Index,
    fill,
    gallery_vectors,
    new_index,
    sample_rows,
    set_effort,
    train,
    weighing,
    width_of,
)

FORMAT = 2
NAME, UNCERTAINTY, SAMPLE, ITEMS = "index.json", "u.f32", "sample.f32", "items"
TOLD = ("identity", "model", "weights", "resize", "dim", "width", "kind", "form", "weight", "origin", "factory", "why")
ROWS = 1 << 16  # vectors added at a time
ROWS_PER_FILE = 1 << 16
ROWS_PER_GROUP = 1 << 10
CACHED_GROUPS = 64
GPU_SHARE = 0.8  # of a GPU's free memory that an index may take under "auto"
_REBUILD = "Rebuild the index with `python -m tools.build_index`."

# ------------------------------------------------------------------------------------------------ writing


def write_index(
    out: Path, sources: Sequence[Embeddings], kind: str, choice: Choice, *, form: str = "csd",
    tolerance: float = 1.0, part_items: int | None = None, train_items: int | None = None, seed: int = 0,
    gpu: bool = False, show: Callable = silent,
) -> Path:  # fmt: skip
    """Build an index folder, aside: it appears when it is complete.

    Args:
        sources: of one model; their partitions in the order of their names are the gallery's order.
        kind: "image" or "text".
        form, tolerance: as `build_index` takes them.
        part_items: vectors in a FAISS file, which is in memory while it is filled; all by default.
        train_items: to train on, drawn at random with `seed`; by default as many as the factory needs.
        gpu: train on the GPU.
        show: as `probemb.progress.progress`.

    Raises UserError: no items, one that is not finite, an unknown factory or one that needs more items, no space on the
    disk, an existing `out`.
    """
    parts = [(source, part) for source in sources for part in source.partitions(kind) if part.count]
    count, dim = sum(part.count for _, part in parts), sources[0].dim
    if not count:
        folders = " and ".join(str(source.folder) for source in sources)
        raise UserError(
            f"{folders} hold no {kind} embeddings.", f"Make them with `python -m tools.embed --items {kind}`."
        )
    ends = [(float(u.min()), float(u.max())) for u in (source.read_uncertainty(part) for source, part in parts)]
    weight, origin = weighing(form, tolerance, min(least for least, _ in ends), max(most for _, most in ends))
    rows, width = min(count, part_items or count), width_of(dim, form, choice.factory)
    empty = new_index(width, choice.factory)

    def vectors(mean: np.ndarray, u: np.ndarray) -> np.ndarray:
        return gallery_vectors(mean, u, form, choice.factory, weight, origin)

    with _aside(out) as folder:
        if not empty.is_trained:
            wanted = min(count, train_items or training_count(choice.factory, count))
            drawn = np.sort(np.random.default_rng(seed).choice(count, wanted, replace=False, shuffle=False))
            _train(empty, np.concatenate([vectors(*found) for found in _read_rows(parts, drawn)]), choice.factory, gpu)
        index, sizes, sample, start = _clone(empty, choice.factory), [], sample_rows(count).numpy(), 0
        with (
            show("items", count) as advance,
            open(folder / UNCERTAINTY, "wb") as u_file,
            open(folder / SAMPLE, "wb") as sample_file,
        ):
            for source, part in parts:
                mean, u = source.read(part)
                u_file.write(u.astype("<f4").tobytes())
                kept = sample[(sample >= start) & (sample < start + part.count)] - start
                sample_file.write(mean[kept].astype("<f4").tobytes())
                start, first = start + part.count, 0
                while first < part.count:
                    last = min(part.count, first + ROWS, first + rows - index.ntotal)
                    fill(index, vectors(mean[first:last], u[first:last]), choice.factory)
                    if advance:
                        advance(last - first)
                    first = last
                    if index.ntotal == rows:
                        sizes.append(_save_part(index, folder, len(sizes)))
                        index = _clone(empty, choice.factory)
        _write_items(parts, folder / ITEMS)
        if index.ntotal:
            sizes.append(_save_part(index, folder, len(sizes)))
        model = sources[0]
        about = {"format": FORMAT, "identity": uuid4().hex[:16], "model": model.model, "weights": model.weights}
        about |= {"resize": model.resize, "dim": dim, "width": width, "kind": kind, "form": form}
        about |= {"factory": choice.factory, "why": choice.why, "effort": choice.effort, "count": count, "parts": sizes}
        about |= {"weight": weight, "origin": origin}
        replace_text(folder / NAME, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        for path in (folder / UNCERTAINTY, folder / SAMPLE, *(folder / ITEMS).iterdir(), folder / ITEMS):
            flush(path)
    return out


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` at the end; another process may not fill it meanwhile. Raises UserError."""
    folder = out.parent / f".{out.name}.unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        what = f"The index cannot be written to {out}: {error.strerror}."
        raise UserError(what, "Name another folder with --out.") from error
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"Another command builds {out}.", "Wait for it, or name another folder.") from None
        if out.exists() or out.is_symlink():
            folder.rmdir()
            raise UserError(f"{out} already exists.", "Name another folder with --out, or remove it.")
        try:
            for path in folder.iterdir():  # of a killed build
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield folder
            folder.rename(out)
            flush(out.parent)
        except OSError as error:
            what = f"The index cannot be written to {out}: {error.strerror or error}."
            raise UserError(what, "Free some space, or name another folder with --out.") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def _read_rows(
    parts: Sequence[tuple[Embeddings, Partition]], drawn: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """mean and u of ascending rows of the gallery."""
    start = 0
    for source, part in parts:
        rows = drawn[(drawn >= start) & (drawn < start + part.count)] - start
        if len(rows):
            mean, u = source.read(part)
            yield mean[rows], u[rows]
        start += part.count


def _train(index: faiss.Index, vectors: np.ndarray, factory: str, gpu: bool) -> None:
    inverted = faiss.try_extract_index_ivf(index) if gpu else None
    if inverted is None:
        return train(index, vectors, factory)
    cells = faiss.index_cpu_to_all_gpus(faiss.IndexFlatL2(inverted.d))  # only the cells' centres gain from a GPU
    inverted.clustering_index = cells
    try:
        return train(index, vectors, factory)
    finally:
        inverted.clustering_index = None


def _clone(index: faiss.Index, factory: str) -> faiss.Index:
    try:
        return faiss.clone_index(index)
    except RuntimeError as error:
        raise UserError(f"FAISS cannot copy the index '{factory}'.", "Use a string such as IVF256,Flat.") from error


def _save_part(index: faiss.Index, folder: Path, number: int) -> int:
    """Write through Python's file, as FAISS' own does not report a full disk for the last bytes. Raises OSError."""
    path = folder / f"part-{number:05d}.faiss"
    with open(path, "wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
    flush(path)
    return index.ntotal


def _write_items(parts: Sequence[tuple[Embeddings, Partition]], folder: Path) -> None:
    """Write the metadata of all items in their order."""
    folder.mkdir()
    waiting, numbers = [], itertools.count()
    for source, part in parts:
        waiting.append(source.read_items(part))
        while (left := sum(map(len, waiting))) >= ROWS_PER_FILE or (left and part is parts[-1][1]):
            table, path = pa.concat_tables(waiting), folder / f"{next(numbers)}.parquet"
            rows = table.slice(0, ROWS_PER_FILE)
            pq.write_table(rows, path, row_group_size=ROWS_PER_GROUP, compression="zstd")
            waiting = [table.slice(ROWS_PER_FILE)]


# ------------------------------------------------------------------------------------------------ reading


def load_index(folder: str | Path, device: str = "cpu", memory_map: bool = True) -> Index:
    """The index in a folder that `tools.build_index` wrote.

    Args:
        device: "cpu", or another for the GPUs, if the index fits into them and FAISS can search it there.
        memory_map: leave everything in its files and read only the pages that a search needs; writing into such a file
            (`cp` over it) crashes the process, replacing it does not.

    Raises UserError: a file is missing, damaged or of another size than index.json says.
    """
    folder = Path(folder)
    if not (folder / NAME).is_file():
        raise UserError(f"There is no index in {folder}.", "Build one with `python -m tools.build_index`.")
    about = read_json(folder / NAME, _REBUILD)
    if about.get("format") != FORMAT:
        raise UserError(f"{folder / NAME} has the format {about.get('format')!r}, not {FORMAT}.", _REBUILD)
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
    if device != "cpu":
        parts = _on_gpus(parts, folder)
    rows = sample_rows(about["count"])
    index = Index(
        parts=tuple(parts),
        uncertainty=_read_numbers(folder / UNCERTAINTY, (about["count"],), memory_map),
        sample=(rows, _read_numbers(folder / SAMPLE, (len(rows), about["dim"]), memory_map=False)),
        items=Items(folder / ITEMS, about["count"], memory_map),
        **{name: about[name] for name in TOLD},
    )
    if about["effort"]:
        set_effort(index, about["effort"])
    return index


def require_model(index: Index, model: str, weights: str, dim: int) -> None:
    """Refuse queries of another model than the gallery's. Raises UserError, which names both.

    Args:
        model: as typed; weights: `probemb.models.weights_sha256` of it; dim: D.
    """
    if (index.weights, index.dim) != (weights, dim):
        raise UserError(
            f"The index was made with {index.model} ({str(index.weights)[:12]}, {index.dim} dimensions), the query's "
            f"model is {model} ({weights[:12]}, {dim} dimensions).",
            f"Search with --model {index.model}, or build an index with the other model.",
        )


def _read_numbers(path: Path, shape: tuple[int, ...], memory_map: bool) -> torch.Tensor:
    try:
        # Copy on write, as torch wants a writable array.
        numbers = np.memmap(path, "<f4", "c", shape=shape) if memory_map else np.fromfile(path, "<f4").reshape(shape)
        if path.stat().st_size != numbers.nbytes:
            raise ValueError("another size")
        return torch.from_numpy(numbers)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}).", _REBUILD) from error


class Items:
    """The metadata of gallery rows, `items[i]` -> dict. Raises UserError: a file cannot be opened.

    The files are mapped or read when they are opened, so rows stay the same if the folder is replaced or removed.
    """

    def __init__(self, folder: Path, count: int, memory_map: bool = True):
        self.folder, self.count = folder, count
        self._files = [self._bytes(folder / f"{n}.parquet", memory_map) for n in range(-(-count // ROWS_PER_FILE))]
        self._group = lru_cache(CACHED_GROUPS)(self._read_group)

    def __getitem__(self, i: int) -> dict:
        """key, captions (list), shard (path of the tar), offset and size of the image's bytes in it, url; for a gallery
        of captions also number, the caption's index within its image.

        Raises IndexError, UserError.
        """
        if not 0 <= i < self.count:
            raise IndexError(i)
        file, row = divmod(int(i), ROWS_PER_FILE)
        group, row = divmod(row, ROWS_PER_GROUP)
        return dict(self._group(file, group)[row])

    def _bytes(self, path: Path, memory_map: bool) -> np.ndarray:
        """The bytes of a file without an open descriptor, of which a process has few."""
        try:
            if not memory_map:
                return np.fromfile(path, np.uint8)
            return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8).numpy()
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path} cannot be read ({type(error).__name__}).", _REBUILD) from error

    def _read_group(self, file: int, group: int) -> list[dict]:
        try:
            with pq.ParquetFile(pa.BufferReader(self._files[file])) as opened:
                return opened.read_row_group(group).to_pylist()
        except Exception as error:  # pyarrow raises many types for a damaged file
            path = self.folder / f"{file}.parquet"
            raise UserError(f"{path} cannot be read ({type(error).__name__}).", _REBUILD) from error


def _on_gpus(parts: list, folder: Path) -> list:
    """The parts on the GPUs in turn, if there are some, they fit, and FAISS supports it."""
    count = getattr(faiss, "get_num_gpus", lambda: 0)()
    size = sum(path.stat().st_size for path in folder.glob("part-*.faiss"))
    free = sum(torch.cuda.mem_get_info(i)[0] for i in range(min(count, torch.cuda.device_count())))
    if not count or size > GPU_SHARE * free:
        return parts
    try:
        resources = [faiss.StandardGpuResources() for _ in range(count)]
        moved = [faiss.index_cpu_to_gpu(resources[i % count], i % count, part) for i, part in enumerate(parts)]
    except RuntimeError:  # FAISS has no such index there
        return parts
    for part in moved:
        part.referenced_resources = resources  # FAISS does not keep them alive
    return moved
