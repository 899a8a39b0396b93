"""An index in a folder: FAISS files that are read through the page cache, so that a gallery may exceed the memory.

    INDEX/index.json             {"format", "model", "weights", "dim", "width", "kind", "form", "factory", "why",
                                  "effort", "count", "parts": [{"file", "count"}]}; for the form "tolerance" its
                                 weight and, for a negative one, the largest u: "tolerance", "largest_u". "least_u":
                                 the smallest one, taken off in the vectors; absent: 0. "resize": who resized the
                                 images that were embedded; absent: pil
    INDEX/part-00000.faiss …     FAISS' own files, together the gallery in its order
    INDEX/u.f32                  N little-endian float32: the items' uncertainty, which re-ranking reads
    INDEX/items/00000.parquet …  metadata of each item; see `items.py`

`writing.py` makes such a folder. FAISS does not check its files: load only your own. An opened index keeps all of its
files or their content, so replacing or removing the folder changes nothing for it.
"""

import hashlib
import math
import os
import re
from pathlib import Path

import numpy as np
import torch

from probemb.errors import UserError
from probemb.search.embeddings import RESIZES, read_json
from probemb.search.index import Index, set_effort
from probemb.search.items import Items
from probemb.search.penalty import FORMS, Penalty, penalty_of

FORMAT = 1
NAME, UNCERTAINTY, ITEMS = "index.json", "u.f32", "items"
DEVICES = ("auto", "cpu", "cuda")
GPU_SHARE = 0.8  # of a GPU's free memory that an index may take under "auto"
_REBUILD = "Rebuild the index with `python -m tools.build_index`."


def load_index(folder: str | Path, device: str = "cpu", memory_map: bool = True) -> Index:
    """The index in a folder that `tools.build_index` wrote.

    Args:
        device: "cpu", "cuda" (all GPUs take parts in turn), or "auto": the GPUs if the index fits into them.
        memory_map: leave everything in its files and read only the pages that a search needs; writing into such a file
            (`cp` over it) crashes the process, replacing it does not.

    Raises UserError: a file is missing, damaged or of another size than index.json says; the folder is replaced
    meanwhile; no GPU, or FAISS cannot search the index there.
    """
    import faiss

    if device not in DEVICES:
        raise UserError(f"There is no device '{device}' for an index.", f"Choose {', '.join(DEVICES)}.")
    folder = Path(folder)
    before = identity(folder)
    about = read_about(folder)
    mapped = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY if "IVF" in about["factory"] else faiss.IO_FLAG_MMAP_IFC
    flags = mapped if memory_map else 0
    parts = []
    for row in about["parts"]:
        path = folder / row["file"]
        try:
            part = faiss.read_index(str(path), flags)
        except RuntimeError as error:
            raise UserError(f"{path} cannot be read as an index of FAISS.", _REBUILD) from error
        if part.ntotal != row["count"] or part.d != about["width"]:
            raise UserError(
                f"{path} holds {part.ntotal:,} vectors of {part.d} dimensions, but index.json says "
                f"{row['count']:,} of {about['width']}.",
                _REBUILD,
            )
        parts.append(part)
    if device != "cpu":
        parts = _on_gpus(parts, folder, about, must=device == "cuda")
    u = _read_uncertainty(folder, about["count"], memory_map)
    index = Index(
        tuple(parts), about["form"], about["dim"], about["width"], u, _penalty(about), about["kind"], about["model"],
        about["weights"], about["factory"], about["why"], Items(folder / ITEMS, about["count"], memory_map), before,
        about.get("resize", RESIZES[0]),
    )  # fmt: skip
    if identity(folder) != before:
        raise UserError(f"{folder} was replaced while it was opened.", "Repeat the command.")
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


def identity(folder: Path) -> str:
    """A digest of the folder's files: names, inodes, sizes and times of change, which no other index shares."""
    told = []
    for path in sorted([folder / NAME, folder / UNCERTAINTY, *folder.glob("part-*.faiss"), *folder.glob(f"{ITEMS}/*")]):
        try:
            status = path.stat()
        except OSError:  # reported when it is read
            continue
        told.append((path.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def read_about(folder: Path) -> dict:
    """index.json, checked. Raises UserError."""
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"There is no index in {folder}.", "Build one with `python -m tools.build_index`.")
    about = read_json(path, _REBUILD)
    if about.get("format") != FORMAT:
        raise UserError(f"{path} has the format {about.get('format')!r}, not {FORMAT}.", _REBUILD)
    if not _is_fine(about):
        raise UserError(f"{path} does not describe an index.", _REBUILD)
    missing = [row["file"] for row in about["parts"] if not (folder / row["file"]).is_file()]
    if missing:
        raise UserError(f"{folder} lacks {missing[0]}.", _REBUILD)
    return about


def _is_fine(about: dict) -> bool:
    texts = all(type(about.get(key)) is str for key in ("model", "weights", "factory", "why"))
    whole = all(type(about.get(key)) is int and about[key] > 0 for key in ("dim", "width", "count"))
    rows, effort = about.get("parts"), about.setdefault("effort", None)
    if not (texts and whole and isinstance(rows, list) and (effort is None or (type(effort) is int and effort > 0))):
        return False
    for row in rows:
        if not isinstance(row, dict) or type(row.get("count")) is not int or row["count"] < 1:
            return False
        if not re.fullmatch(r"part-\d{5,9}\.faiss", str(row.get("file"))):
            return False
    if about.get("resize", RESIZES[0]) not in RESIZES:
        return False
    weights = [about.get(key) for key in ("tolerance", "largest_u")]
    if about.get("form") == "tolerance" and not all(type(w) in (int, float) and math.isfinite(w) for w in weights):
        return False
    least = about.get("least_u", 0.0)
    if type(least) not in (int, float) or not math.isfinite(least):
        return False
    kinds = about.get("kind") in ("image", "text") and about.get("form") in FORMS
    return kinds and sum(row["count"] for row in rows) == about["count"] and about["width"] >= about["dim"]


def _penalty(about: dict) -> Penalty:
    return penalty_of(about["form"], about.get("tolerance"), about.get("largest_u", 0.0), about.get("least_u", 0.0))


def _read_uncertainty(folder: Path, count: int, memory_map: bool) -> torch.Tensor:
    path = folder / UNCERTAINTY
    try:
        if os.path.getsize(path) != 4 * count:
            raise UserError(f"{path} does not hold {count:,} numbers.", _REBUILD)
        # Copy on write, as torch wants a writable array.
        u = np.memmap(path, "<f4", "c", shape=(count,)) if memory_map else np.fromfile(path, "<f4")
        return torch.from_numpy(u)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).", _REBUILD) from error


def _on_gpus(parts: list, folder: Path, about: dict, must: bool) -> list:
    """The parts on the GPUs in turn; unless it is a must, only if they fit and FAISS supports it."""
    import faiss

    count = getattr(faiss, "get_num_gpus", lambda: 0)()
    if not count:
        if must:
            raise UserError("FAISS sees no GPU here.", "Search with --device cpu.")
        return parts
    size = sum((folder / row["file"]).stat().st_size for row in about["parts"])
    free = sum(torch.cuda.mem_get_info(i)[0] for i in range(min(count, torch.cuda.device_count())))
    if not must and size > GPU_SHARE * free:
        return parts
    try:
        resources = [faiss.StandardGpuResources() for _ in range(count)]
        moved = [faiss.index_cpu_to_gpu(resources[i % count], i % count, part) for i, part in enumerate(parts)]
    except RuntimeError as error:
        if must:
            raise UserError(
                f"FAISS cannot search {about['factory']} on the GPU ({' '.join(str(error).split())[-120:]}).",
                "Search with --device cpu, or build a Flat or IVF index.",
            ) from error
        return parts
    for part in moved:
        part.referenced_resources = resources  # FAISS does not keep them alive
    return moved
