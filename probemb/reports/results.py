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
    run = Path(model).parent if Path(model).name == "model" else Path(model)
    return run / name if (run / "model").is_dir() else Path(elsewhere)


def claim_files(folder: Path, names: Sequence[str], generator: str) -> None:
    """Check that `names` may be written into `folder`: absent, or written by `generator` before. A new page also needs
    a figures folder that is absent or empty. Raises UserError."""
    remedy, taken = "Name another folder with --out.", None
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file.", "Name a folder.")
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        raise UserError(f"The folder {parent} cannot be written to.", remedy)
    for file in (folder / name for name in names):
        if not file.exists():
            used = folder / FIGURES
            taken = used if file.suffix == ".html" and used.exists() and any(used.iterdir()) else None
        elif not file.is_file() or generator.encode() not in file.read_bytes()[:4096]:
            taken = file
        if taken:
            raise UserError(f"{taken} exists and was not written by this command.", remedy)


def write_json(file: Path, content: dict, generator: str) -> None:
    """Write JSON that begins with the `generator` and `provenance()`; numbers that are not finite become null."""
    plain = {"generator": generator, "written": provenance(), **finite(content)}
    replace_text(file, json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def provenance() -> dict:
    """date (UTC), command (without credentials in URLs), version, and models: the SHA-256 of each that was loaded."""
    from probemb import __version__

    digest = sys.modules.get("probemb.models.load")  # of a command that loads models
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
