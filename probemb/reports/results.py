"""Folders of results. A command replaces only files that it wrote itself."""

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from probemb.errors import UserError
from probemb.files import replace_text

FIGURES = "figures"  # folder of a page's figures


def results_folder(out: str | None, model: str, name: str, elsewhere: str) -> Path:
    """--out, or `name` in the model's run folder, or the folder `elsewhere` for a model that has none."""
    if out is not None:
        return Path(out)
    path = Path(model)
    if path.is_dir():
        if (path / "model").is_dir():
            return path / name
        if path.name == "model":
            return path.parent / name
    return Path(elsewhere)


def claim_files(folder: Path, names: Sequence[str], generator: str) -> None:
    """Check that `names` may be written into `folder`: absent, or written by `generator` before.

    A new page also needs a figures folder that is absent or empty. Raises UserError.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file.", "Name a folder.")
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        raise UserError(f"The folder {parent} cannot be written to.", "Name another folder with --out.")
    for name in names:
        file = folder / name
        if not file.exists():
            if file.suffix == ".html" and (used := folder / FIGURES).exists() and any(used.iterdir()):
                raise UserError(f"{used} holds files of another origin.", "Name another folder with --out.")
            continue
        ours = False
        if file.is_file():
            with open(file, "rb") as opened:
                ours = generator.encode() in opened.read(4096)
        if not ours:
            raise UserError(f"{file} exists and was not written by this command.", "Name another folder with --out.")


def write_json(file: Path, content: dict, generator: str) -> None:
    """Write JSON that begins with the `generator` and `provenance()`; numbers that are not finite become null."""
    plain = {"generator": generator, "written": provenance(), **finite(content)}
    replace_text(file, json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def provenance() -> dict:
    """date (UTC), command (without credentials in URLs), version, and models: the SHA-256 of each that was loaded."""
    from probemb import __version__

    digest = sys.modules.get("probemb.models.hub")  # of a command that loads models
    module = sys.modules["__main__"].__spec__
    start = ["python", "-m", module.name.removesuffix(".__main__")] if module else ["python", sys.argv[0]]
    words = [re.sub(r"(?<=://)[^/\s@]*@|\?\S*", "", word) if "://" in word else word for word in sys.argv[1:]]
    words = [re.sub(r"pipe:.*", "pipe:…", word, flags=re.S) for word in words]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "command": shlex.join([*start, *words]),
        "version": __version__,
        "models": digest.loaded_weights() if digest else {},
    }


def finite(value: Any) -> Any:
    """Nested plain values with tensors as lists and NaN and infinity as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
