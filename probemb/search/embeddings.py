"""The embeddings of shards in a folder: one partition a shard, complete once its marker is there.

    OUT/embeddings.json          {"format", "model", "weights", "dim", "mean_dtype", "resize"}
    OUT/corpora/HASH.json        {"data": path or address, "shards": [SHARD, …]}; a file each, as commands run at once
    OUT/image/SHARD.npz          mean (n, D) of mean_dtype, u (n,) float32 = sum of the variances
    OUT/image/SHARD.parquet      n rows: key, captions, shard, offset, size (of the image's bytes in the tar), url
    OUT/image/SHARD.done.json    {"shard", "bytes", "modified" or "version", "members", "samples", "without_image",
                                 "count", "failures": {cause: n}, "examples"}, written last
    OUT/text/…                   the same, a row for each caption: captions has that one, `number` is its index

SHARD is the tar's folder and name, so that several corpora fit into one folder of embeddings. A kind is complete once
every shard of every corpus has its marker. `tools.embed` writes the folder, `tools.build_index` reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from probemb.errors import UserError
from probemb.files import replace_file, replace_text

if TYPE_CHECKING:
    import pyarrow

FORMAT = 2
KINDS = ("image", "text")
MEAN_DTYPES = ("float16", "float32")  # the first one of folders that do not say
NAME = "embeddings.json"
RESIZES = ("pil", "tensor")  # the first one of folders that do not say
ABOUT = ("model", "weights", "dim", "mean_dtype", "resize")
CORPORA = "corpora"
MARKER = ".done.json"
MAX_JSON_BYTES = 64 << 20
MAX_DIM = 1 << 16
_ANEW = "Embed the data again, into another folder."
_AGAIN = "Delete it, and repeat the command of tools.embed for that corpus."
_REPAIR = "Embed that shard again: delete its .done.json and repeat the command of tools.embed."


@dataclass(frozen=True)
class Partition:
    """One embedded shard: `kind` "image" or "text", `name` of its files without extension, `count` rows, and the path
    or address of the tar.
    """

    kind: str
    name: str
    count: int
    shard: str


@dataclass(frozen=True)
class Embeddings:
    """An existing folder of embeddings.

    Attributes:
        model: as typed; weights: its SHA-256 (`probemb.models.weights_sha256`).
        dim: D.
        corpora: names of all partitions by the path or address of each corpus.
        mean_dtype: of the means in the files, in MEAN_DTYPES.
        resize: who cropped and resized the images, in RESIZES (`probemb.models.create_transforms`).
    """

    folder: Path
    model: str
    weights: str
    dim: int
    corpora: dict[str, list[str]]
    mean_dtype: str = MEAN_DTYPES[0]
    resize: str = RESIZES[0]

    def count(self, kind: str) -> int | None:
        """Rows of a kind; None while it is incomplete. Raises UserError."""
        done = {part.name: part.count for part in self.partitions(kind)}
        return sum(done.values()) if done and self._listed() <= set(done) else None

    def _listed(self) -> set[str]:
        return {name for several in self.corpora.values() for name in several}

    def gone(self, kind: str) -> list[str]:
        """Names of partitions whose shards no corpus has any more, which count as no partitions."""
        names = {marker.name.removesuffix(MARKER) for marker in (self.folder / kind).glob(f"*{MARKER}")}
        return sorted(names - self._listed())

    def partitions(self, kind: str) -> list[Partition]:
        """The complete ones of the corpora, in the order of their names. Raises UserError for an invalid marker."""
        found, listed = [], self._listed()
        for marker in sorted((self.folder / kind).glob(f"*{MARKER}")):
            if marker.name.removesuffix(MARKER) not in listed:
                continue
            content = read_json(marker, _REPAIR)
            count, shard = content.get("count"), content.get("shard")
            if type(count) is not int or count < 0 or type(shard) is not str:
                raise UserError(f"{marker} is not the marker of an embedded shard.", _REPAIR)
            found.append(Partition(kind, marker.name.removesuffix(MARKER), count, shard))
        return found

    def read(self, part: Partition) -> tuple[np.ndarray, np.ndarray]:
        """mean (n, D) of `mean_dtype` and u (n,) float32. Raises UserError for files that do not fit the marker."""
        path, (mean, u) = self.path(part), self._arrays(part, "mean", "u")
        if mean.shape != (part.count, self.dim) or mean.dtype != self.mean_dtype or u.shape != (part.count,):
            wanted = f"{self.mean_dtype} of ({part.count}, {self.dim})"
            raise UserError(f"{path} holds {mean.dtype} of the shape {mean.shape}, not {wanted}.", _REPAIR)
        return mean, np.ascontiguousarray(u, dtype=np.float32)

    def read_uncertainty(self, part: Partition) -> np.ndarray:
        """u (n,) float32 alone. Raises UserError for a file that does not fit the marker."""
        u = self._arrays(part, "u")[0]
        if u.shape != (part.count,):
            raise UserError(f"{self.path(part)} holds {len(u)} uncertainties, not {part.count}.", _REPAIR)
        return np.ascontiguousarray(u, dtype=np.float32)

    def path(self, part: Partition) -> Path:
        """The file with the vectors of a partition."""
        return self.folder / part.kind / f"{part.name}.npz"

    def _arrays(self, part: Partition, *names: str) -> list[np.ndarray]:
        try:
            with np.load(self.path(part), allow_pickle=False) as arrays:
                return [arrays[name] for name in names]
        except Exception as error:  # numpy raises many types for a damaged zip
            raise UserError(f"{self.path(part)} cannot be read ({type(error).__name__}).", _REPAIR) from error

    def read_items(self, part: Partition) -> pyarrow.Table:
        """key, captions, shard, offset, size, url (and number, of captions) of every row. Raises UserError."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path, schema = self.folder / part.kind / f"{part.name}.parquet", item_schema(part.kind)
        try:
            table = pq.read_table(path)
            if "url" not in table.column_names:  # of an older version
                table = table.append_column("url", pa.nulls(table.num_rows, pa.string()))
            fits = table.num_rows == part.count and set(schema.names) <= set(table.column_names)
            table = table.select(schema.names).cast(schema) if fits else None
        except Exception as error:  # pyarrow raises many types for a damaged file
            raise UserError(f"{path} cannot be read ({type(error).__name__}).", _REPAIR) from error
        if table is None:
            raise UserError(f"{path} does not fit its marker.", _REPAIR)
        return table

    def marker(self, kind: str, name: str) -> dict | None:
        """The marker of a partition; None if it is missing or unreadable."""
        path = self.folder / kind / f"{name}{MARKER}"
        try:
            return read_json(path, _REPAIR) if path.is_file() else None
        except UserError:
            return None

    def forget(self, kind: str, name: str) -> None:
        """Mark a partition as missing, as its shard has changed. Raises UserError."""
        try:
            (self.folder / kind / f"{name}{MARKER}").unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(kind, error) from error

    def write(self, kind: str, name: str, mean: np.ndarray, u: np.ndarray, items: pyarrow.Table, marker: dict) -> None:
        """Write a partition, each file atomically, the marker last. `marker` gets the count.

        Raises UserError: it cannot be written, as on a full disk.
        """
        import pyarrow.parquet as pq

        folder = self.folder / kind
        mean, u = np.asarray(mean, dtype=self.mean_dtype), np.asarray(u, dtype=np.float32)

        def arrays(path: Path) -> None:
            with open(path, "wb") as file:
                np.savez(file, mean=mean, u=u)

        self.forget(kind, name)
        try:
            replace_file(folder / f"{name}.npz", arrays)
            replace_file(folder / f"{name}.parquet", lambda path: pq.write_table(items, path, compression="zstd"))
            replace_text(folder / f"{name}{MARKER}", json.dumps({**marker, "count": len(u)}) + "\n")
        except OSError as error:
            raise self._unwritable(kind, error) from error

    def _unwritable(self, kind: str, error: OSError) -> UserError:
        return UserError(
            f"The embeddings cannot be written to {self.folder / kind}: {error.strerror or error}.",
            "Free some space or make the folder writable, and repeat the command: it resumes where it stopped.",
        )


def item_schema(kind: str) -> pyarrow.Schema:
    """The columns of a partition's parquet file; `url` is where the image came from, null if unknown."""
    import pyarrow as pa

    columns = {"key": pa.string(), "captions": pa.list_(pa.string()), "shard": pa.string()}
    columns |= {"offset": pa.int64(), "size": pa.int64(), "url": pa.string()}
    columns |= {"number": pa.int32()} if kind == "text" else {}
    return pa.schema(columns)


def open_embeddings(folder: str | Path) -> Embeddings:
    """The embeddings in a folder. Raises UserError: there are none, or a file is damaged or of another version."""
    path = Path(folder) / NAME
    if not path.is_file():
        raise UserError(f"There are no embeddings in {folder}.", "Make them with `python -m tools.embed`.")
    content = read_json(path, _ANEW)
    if content.get("format") != FORMAT:
        raise UserError(f"{path} has the format {content.get('format')!r}, not {FORMAT}.", _ANEW)
    model, weights, dim = (content.get(key) for key in ("model", "weights", "dim"))
    mean_dtype = content.get("mean_dtype", MEAN_DTYPES[0])
    resize = content.get("resize", RESIZES[0])
    known = mean_dtype in MEAN_DTYPES and resize in RESIZES
    if not (known and type(model) is type(weights) is str and type(dim) is int and 0 < dim <= MAX_DIM):
        raise UserError(f"{path} does not describe embeddings.", _ANEW)
    corpora = {}
    for file in sorted((path.parent / CORPORA).glob("*.json")):
        one = read_json(file, _AGAIN)
        data, names = one.get("data"), one.get("shards")
        if type(data) is not str or type(names) is not list or not all(type(name) is str for name in names):
            raise UserError(f"{file} does not describe a corpus.", _AGAIN)
        corpora[data] = names
    return Embeddings(path.parent, model, weights, dim, corpora, mean_dtype, resize)


def plan_embeddings(
    folder: str | Path,
    model: str,
    weights: str,
    dim: int,
    corpora: dict[str, list[str]],
    mean_dtype: str | None = None,
    resize: str | None = None,
) -> Embeddings:
    """A folder for the embeddings of `corpora`, which may already hold some of them, or of others. Writes nothing.

    `mean_dtype` and `resize` None take those of the folder. Raises UserError: it holds embeddings of another model,
    means of another type, images that were resized otherwise, or other files.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file.", "Name a folder.")
    if (folder / NAME).exists():
        held = open_embeddings(folder)
        if held.weights != weights or held.dim != dim:
            raise UserError(
                f"{folder} holds embeddings of {held.model} ({held.weights[:12]}, {held.dim} dimensions), not of "
                f"{model} ({weights[:12]}, {dim} dimensions).",
                "Name another folder with --out, or the model that it was made with.",
            )
        if mean_dtype not in (None, held.mean_dtype):
            raise UserError(
                f"{folder} holds means in {held.mean_dtype}, not in {mean_dtype}.",
                "Name another folder with --out, or leave --mean-dtype out.",
            )
        if resize not in (None, held.resize):
            raise UserError(
                f"{folder} holds images that were resized by {held.resize}, not by {resize}.",
                "Name another folder with --out, or leave --resize out.",
            )
        return replace(held, corpora=held.corpora | corpora)
    others = [file for file in folder.iterdir() if not file.name.startswith(f".{NAME}.")] if folder.is_dir() else []
    if others and (folder / NAME).exists():  # another process was quicker
        return plan_embeddings(folder, model, weights, dim, corpora, mean_dtype, resize)
    if others:  # besides leftovers of a killed process
        raise UserError(f"{folder} holds other files, and no embeddings.", "Name an empty or a new folder with --out.")
    return Embeddings(folder, model, weights, dim, corpora, mean_dtype or MEAN_DTYPES[0], resize or RESIZES[0])


def save_embeddings(embeddings: Embeddings, given: Iterable[str]) -> None:
    """Write the description of the folder and of the `given` corpora, if it changed. Raises UserError."""
    files = {NAME: {"format": FORMAT, **{name: getattr(embeddings, name) for name in ABOUT}}}
    for data in given:
        digest = hashlib.sha256(data.encode("utf-8", "surrogateescape")).hexdigest()
        files[f"{CORPORA}/{digest[:16]}.json"] = {"data": data, "shards": embeddings.corpora[data]}
    try:
        for name, content in files.items():
            path, text = embeddings.folder / name, json.dumps(content, indent=1) + "\n"
            if not path.is_file() or path.read_bytes() != text.encode():
                replace_text(path, text)
    except OSError as error:
        raise UserError(
            f"{embeddings.folder} cannot be written to: {error.strerror or error}.", "Name another folder with --out."
        ) from error


def same_model(several: Sequence[Embeddings]) -> None:
    """Refuse folders made by different models, or from pixels resized otherwise. Raises UserError, which names both."""
    first = several[0]
    for other in several[1:]:
        if (other.weights, other.dim) != (first.weights, first.dim):
            raise UserError(
                f"{first.folder} was embedded by {first.model} ({first.weights[:12]}, {first.dim} dimensions), "
                f"{other.folder} by {other.model} ({other.weights[:12]}, {other.dim} dimensions).",
                "Embed both with the same model.",
            )
        if other.resize != first.resize:
            raise UserError(
                f"{first.folder} was embedded with --resize {first.resize}, {other.folder} with {other.resize}.",
                "Embed both with the same --resize, or build an index of each.",
            )


def read_json(path: Path, remedy: str) -> dict:
    """A small file with a JSON object. Raises UserError."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
        if len(text) > MAX_JSON_BYTES:
            raise ValueError("too large")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON.", remedy) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object.", remedy)
    return content
