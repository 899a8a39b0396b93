"""Atomic replacement of files: after a crash there is the old or the new one; SHA-256."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from probemb.errors import UserError


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, flush it to disk, and rename it; makes missing folders.

    Raises OSError, and whatever `write` raises; `path` is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    aside = Path(name)
    try:
        write(aside)
        aside.chmod(0o644)
        flush(aside)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    flush(path.parent)


def replace_text(path: Path, text: str) -> None:
    """`replace_file` with a text; lone surrogates become question marks."""
    replace_file(path, lambda aside: aside.write_text(text, encoding="utf-8", errors="replace"))


@contextmanager
def writing(path: Path, remedy: str = "Free some space, or choose another --out.") -> Iterator[None]:
    """Raises UserError in place of OSError: `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}).", remedy) from error


def flush(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: str | os.PathLike) -> str:
    """In hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
