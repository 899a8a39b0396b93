"""Metadata for each gallery row, in parquet files from which single rows are read.

    items/00000.parquet, items/00001.parquet, …    65,536 rows each, in groups of 1,024, in the order of the gallery

A row's number gives its file and group, so that looking one up reads one group. The files are mapped or read when they
are opened, so rows stay the same if the folder is replaced or removed.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow

ROWS_PER_FILE = 1 << 16
ROWS_PER_GROUP = 1 << 10
_CACHED_GROUPS = 64


class ItemsWriter:
    """Writes tables one after another; `close` writes the last rows. Raises OSError."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True)
        self.folder, self.count, self._waiting, self._files = folder, 0, [], 0

    def add(self, table: pyarrow.Table) -> None:
        self._waiting.append(table)
        self.count += table.num_rows
        while self.count - self._files * ROWS_PER_FILE >= ROWS_PER_FILE:
            self._write(ROWS_PER_FILE)

    def close(self) -> None:
        if self.count > self._files * ROWS_PER_FILE:
            self._write(ROWS_PER_FILE)

    def _write(self, rows: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.concat_tables(self._waiting)
        path = self.folder / f"{self._files:05d}.parquet"
        pq.write_table(table.slice(0, rows), path, row_group_size=ROWS_PER_GROUP, compression="zstd")
        self._waiting = [table.slice(rows)]
        self._files += 1


class Items:
    """The metadata of gallery rows, `items[i]` -> dict. Raises UserError: a file cannot be opened."""

    def __init__(self, folder: Path, count: int, memory_map: bool = True):
        self.folder, self.count = folder, count
        self._files = [self._bytes(folder / f"{n:05d}.parquet", memory_map) for n in range(-(-count // ROWS_PER_FILE))]
        self._group = lru_cache(_CACHED_GROUPS)(self._read_group)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict:
        """key, captions (list), shard (path of the tar), offset and size of the image's bytes in it, url (not in older
        indexes); for a gallery of captions also number, the caption's index within its image.

        Raises IndexError, UserError.
        """
        if not 0 <= i < self.count:
            raise IndexError(i)
        file, row = divmod(int(i), ROWS_PER_FILE)
        group, row = divmod(row, ROWS_PER_GROUP)
        rows = self._group(file, group)
        if row >= len(rows):
            raise UserError(f"{self.folder} has fewer rows than its index says.", "Rebuild the index.")
        return dict(rows[row])

    def _bytes(self, path: Path, memory_map: bool) -> np.ndarray:
        """The bytes of a file without an open descriptor, of which a process has few."""
        import numpy as np
        import torch

        try:
            if not memory_map:
                return np.fromfile(path, np.uint8)
            return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8).numpy()
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path} cannot be read ({type(error).__name__}).", "Rebuild the index.") from error

    def _read_group(self, file: int, group: int) -> list[dict]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(pa.BufferReader(self._files[file])) as opened:
                rows = opened.read_row_group(group)
                if "key" not in rows.column_names:
                    raise ValueError("no key")
                return rows.to_pylist()
        except Exception as error:  # pyarrow raises many types for a damaged file
            path = self.folder / f"{file:05d}.parquet"
            raise UserError(f"{path} cannot be read ({type(error).__name__}).", "Rebuild the index.") from error
