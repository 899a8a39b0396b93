"""The embeddings of shards in a folder: one partition a shard.

    OUT/embeddings.json        {"format", "model", "weights", "dim", "mean_dtype", "resize"}
    OUT/corpora/HASH.json      {"data": path or address, "shards": [NAME, …]}; a file each, as commands run at once
    OUT/image/NAME.parquet     n rows: key, captions, shard, offset, size (of the image's bytes in the tar), url
    OUT/image/NAME.npz         mean (n, D) of mean_dtype, u (n,) float32 = sum of the variances, and about: JSON of
                               {"shard", "version", "samples", "failures": {cause: n}}. Written last
    OUT/text/…                 the same, a row for each caption: captions has that one, `number` is its index

NAME is the tar's folder and name. A kind is complete once every shard of every corpus has its npz.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from probemb.errors import UserError
from probemb.files import replace_file, replace_text, writing

FORMAT = 3
KINDS = ("image", "text")
MEAN_DTYPES = ("float16", "float32")
RESIZES = ("pil", "tensor")
NAME, CORPORA = "embeddings.json", "corpora"
_AGAIN = "Delete it, and repeat the command of tools.embed."
_RESUMES = "Free some space or name another folder with --out, and repeat the command: it resumes."


class Partition(NamedTuple):
    """One embedded shard: "image" or "text", the name of its files, its rows, `about` of its npz, least and most u."""

    kind: str
    name: str
    count: int
    about: dict
    u: tuple[float, float]


@dataclass(frozen=True)
class Embeddings:
    """A folder of embeddings; reading raises UserError if it is damaged. weights: the model's SHA-256."""

    folder: Path
    model: str
    weights: str
    dim: int
    mean_dtype: str = MEAN_DTYPES[0]
    resize: str = RESIZES[0]

    def corpora(self) -> dict[str, list[str]]:
        found = [read_json(file, None, _AGAIN) for file in sorted((self.folder / CORPORA).glob("*.json"))]
        return {content["data"]: content["shards"] for content in found}

    def add_corpus(self, data: str, names: Sequence[str]) -> None:
        digest = hashlib.sha256(data.encode("utf-8", "surrogateescape")).hexdigest()
        content = json.dumps({"data": data, "shards": list(names)}, indent=1)
        with writing(self.folder, _RESUMES):
            replace_text(self.folder / CORPORA / f"{digest[:16]}.json", content + "\n")

    def partitions(self, kind: str) -> list[Partition]:
        """The complete ones of the corpora, in the order of their names."""
        names = sorted({name for names in self.corpora().values() for name in names})
        return [part for name in names if (part := self.partition(kind, name))]

    def partition(self, kind: str, name: str) -> Partition | None:
        """None if it is not embedded."""
        if not self._file(kind, name).exists():
            return None
        u, about = self._arrays(kind, name, "u", "about")
        ends = float(u.min(initial=np.inf)), float(u.max(initial=0))
        return Partition(kind, name, len(u), json.loads(str(about)), ends)

    def count(self, kind: str) -> int | None:
        """Rows of a kind; None while it is incomplete."""
        done = {part.name: part.count for part in self.partitions(kind)}
        complete = done and all(done.keys() >= set(names) for names in self.corpora().values())
        return sum(done.values()) if complete else None

    def read(self, part: Partition) -> tuple[np.ndarray, np.ndarray]:
        """mean (n, D) of `mean_dtype` and u (n,) float32."""
        mean, u = self._arrays(part.kind, part.name, "mean", "u")
        if mean.shape != (part.count, self.dim) or mean.dtype != self.mean_dtype or u.shape != (part.count,):
            raise self._damaged(part.kind, part.name, f"{mean.dtype} of {mean.shape}")
        return mean, np.ascontiguousarray(u, dtype=np.float32)

    def read_items(self, part: Partition) -> pa.Table:
        """key, captions, shard, offset, size, url (and number, of captions) of every row."""
        path, schema = self._file(part.kind, part.name).with_suffix(".parquet"), item_schema(part.kind)
        try:
            table = pq.read_table(path).select(schema.names).cast(schema)
            if table.num_rows != part.count:
                raise ValueError("another number of rows")
        except Exception as error:  # pyarrow raises many types for a damaged file
            raise self._damaged(part.kind, part.name, f".parquet: {type(error).__name__}") from error
        return table

    def read_inputs(self, part: Partition) -> tuple[np.ndarray, np.ndarray]:
        """raw (n, D), the means before they are unit, and inputs (n, P) of the last projection. Raises UserError."""
        try:
            return tuple(self._arrays(part.kind, part.name, "raw", "inputs"))
        except UserError as error:
            raise UserError(
                f"{self.folder} has no inputs of the projections.", "Embed again with --inputs, into a new folder."
            ) from error

    def write(
        self, kind: str, name: str, mean: np.ndarray, u: np.ndarray, items: pa.Table, about: dict, **more: np.ndarray
    ) -> None:
        """Write a partition, each file atomically; `more`: as `read_inputs` gives them.

        Raises UserError: it cannot be written, as on a full disk.
        """
        file = self._file(kind, name)
        arrays = {key: np.asarray(x, dtype=self.mean_dtype) for key, x in {"mean": mean, **more}.items()}
        arrays["u"] = np.asarray(u, dtype=np.float32)
        arrays["about"] = np.array(json.dumps(about))

        def save(path: Path) -> None:
            with open(path, "wb") as opened:
                np.savez(opened, **arrays)

        with writing(self.folder, _RESUMES):
            replace_file(file.with_suffix(".parquet"), lambda path: pq.write_table(items, path, compression="zstd"))
            replace_file(file, save)

    def _file(self, kind: str, name: str) -> Path:
        return self.folder / kind / f"{name}.npz"

    def _arrays(self, kind: str, name: str, *keys: str) -> list[np.ndarray]:
        try:
            with np.load(self._file(kind, name), allow_pickle=False) as arrays:
                return [arrays[key] for key in keys]
        except Exception as error:  # numpy raises many types for a damaged zip
            raise self._damaged(kind, name, type(error).__name__) from error

    def _damaged(self, kind: str, name: str, why: str) -> UserError:
        return UserError(f"{self._file(kind, name)} is damaged ({why}).", _AGAIN)


def item_schema(kind: str) -> pa.Schema:
    """The columns of a partition's parquet file; `url` is where the image came from, null if unknown."""
    columns = {"key": pa.string(), "captions": pa.list_(pa.string()), "shard": pa.string()}
    columns |= {"offset": pa.int64(), "size": pa.int64(), "url": pa.string()}
    return pa.schema(columns | ({"number": pa.int32()} if kind == "text" else {}))


def open_embeddings(folder: str | Path) -> Embeddings:
    """The embeddings in a folder. Raises UserError: there are none, or they are damaged or of another version."""
    path = Path(folder) / NAME
    if not path.is_file():
        raise UserError(f"There are no embeddings in {folder}.", "Make them with `python -m tools.embed`.")
    return Embeddings(path.parent, **read_json(path, FORMAT, "Embed the data again, into another folder."))


def create_embeddings(
    folder: str | Path, model: str, weights: str, dim: int, mean_dtype: str | None = None, resize: str | None = None
) -> Embeddings:
    """A folder for embeddings, which may hold some of the same model and choices already. Raises UserError."""
    folder = Path(folder)
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if folder.is_file() or (NAME not in names and any(not name.startswith(f".{NAME}.") for name in names)):
        raise UserError(f"{folder} holds other files, and no embeddings.", "Name a new folder with --out.")
    held = open_embeddings(folder) if NAME in names else Embeddings(folder, model, weights, dim)
    asked = {"mean_dtype": mean_dtype or held.mean_dtype, "resize": resize or held.resize}
    made = Embeddings(folder, model, weights, dim, **asked)
    if NAME in names:
        same_model([held, made])
        return held
    about = {key: value for key, value in asdict(made).items() if key != "folder"}
    with writing(folder, _RESUMES):
        replace_text(folder / NAME, json.dumps({"format": FORMAT, **about}, indent=1) + "\n")
    return made


def same_model(several: Sequence[Embeddings]) -> None:
    """Refuse embeddings by different models, or stored or resized otherwise. Raises UserError, which names both."""
    first = several[0]
    for other in several[1:]:
        if replace(other, folder=first.folder, model=first.model) != first:
            by, instead = (
                f"by {one.model} ({one.weights[:12]}, {one.dim} dimensions, {one.mean_dtype}, --resize {one.resize})"
                for one in (first, other)
            )
            what = f"{first.folder} was embedded {by}, not {instead}."
            raise UserError(what, "Use one model and one way, and a folder for each.")


def read_json(path: Path, format: int | None, remedy: str) -> dict:
    """A small file with a JSON object, less its "format". Raises UserError: damaged, or of another format."""
    try:
        content = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not readable JSON.", remedy) from error
    if (found := content.pop("format", None)) != format:
        raise UserError(f"{path} has the format {found!r}, not {format}.", remedy)
    return content
