"""What both commands of this stage need around the mathematics: device, precision, progress, and output files."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probemb.errors import UserError, nearest
from probemb.files import replace_text

if TYPE_CHECKING:
    import torch

    from zeroshot.config import ImagenetConfig, RetrievalConfig

GENERATOR = "probemb zeroshot"  # marks our own files, so that nobody else's are replaced
LINE_EVERY = 10.0  # seconds between progress lines where there is no terminal


@dataclass(frozen=True)
class Placement:
    """Where and in which precision the model runs."""

    device: str
    autocast: torch.dtype | None
    precision: str


def place(device: str, precision: str) -> Placement:
    """Resolve --device and --precision ("auto": bf16 on a GPU that has it, fp32 elsewhere).

    Raises:
        UserError: an unknown name, or a GPU that is not there.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"There is no device '{device}'.", "Say --device cpu, cuda or cuda:1.") from error
    if kind not in ("cpu", "cuda"):
        raise UserError(f"--device {device} is not supported.", "Say --device cpu, cuda or cuda:1.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {device} was asked for, but torch sees no GPU here.", "Say --device cpu.")
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"--device {device} was asked for, but there are {torch.cuda.device_count()} GPUs, counted from 0.",
            "Name one of them.",
        )
    known = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision == "auto":
        precision = "bf16" if kind == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if precision not in known:
        raise UserError(
            f"There is no precision '{precision}'.{nearest(precision, known)}", "Say --precision auto, fp32 or bf16."
        )
    return Placement(device, known[precision], precision)


def check_numbers(config: ImagenetConfig | RetrievalConfig) -> None:
    """Refuse numbers out of range, before anything is read.

    Raises:
        UserError: names the option.
    """
    for name in ("batch_size", "text_batch_size", "k"):
        value = getattr(config, name, None)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}.", "Give a whole number from 1 on.")
    if config.workers is not None and config.workers < 0:
        raise UserError(f"--workers is {config.workers}.", "Give 0 or more.")
    if not getattr(config, "temperature", 1.0) > 0:
        raise UserError(f"--temperature is {config.temperature}.", "Give a number above 0.")
    if not 0 <= config.max_bad <= 1:
        raise UserError(f"--max-bad is {config.max_bad}.", "Give a share between 0 and 1.")


def loader_workers(wanted: int | None, n_images: int, device: str) -> int:
    """Processes that decode images. By default none for a small set, else at most 8 and, beside a CPU model, half of
    the cores."""
    if wanted is not None:
        return wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if n_images < 512:
        return 0
    return min(8, cores if device.startswith("cuda") else cores // 2)


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr: a bar in a terminal, elsewhere a line every ten seconds. Yields `advance(n)`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    started = time.monotonic()
    if console.is_terminal:
        columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(title, total=total)
            yield lambda n: bar.advance(task, n)
        return
    done, told = 0, started

    def advance(n: int) -> None:
        nonlocal done, told
        done += n
        now = time.monotonic()
        if now - told >= LINE_EVERY:
            told = now
            left = (now - started) / max(done, 1) * (total - done)
            print(f"{title}: {done:,} of {total:,}, about {left:.0f} s left", file=sys.stderr, flush=True)

    yield advance
    print(f"{title}: {done:,} in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def results_folder(out: str | None, model: str, name: str) -> Path:
    """--out, or `name` in the model's run folder, or ./zeroshot-results for a model that has none."""
    if out is not None:
        return Path(out)
    path = Path(model)
    if path.is_dir():
        if (path / "model").is_dir():
            return path / name
        if path.name == "model":
            return path.parent / name
    return Path("zeroshot-results") / name if name != "zeroshot" else Path("zeroshot-results")


def claim_files(folder: Path, names: Sequence[str]) -> None:
    """Make sure that `names` may be written into `folder`: absent, or written by this stage before.

    Raises:
        UserError: the folder is a file, cannot be written to, or holds files of somebody else under those names.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file.", "Name a folder.")
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        raise UserError(f"The folder {parent} cannot be written to.", "Name another folder with --out.")
    for name in names:
        file = folder / name
        if not file.exists():
            continue
        ours = False
        if file.is_file():
            with open(file, "rb") as opened:
                ours = GENERATOR.encode() in opened.read(4096)
        if not ours:
            raise UserError(f"{file} exists and was not written by this command.", "Name another folder with --out.")


def write_json(file: Path, content: dict) -> None:
    """JSON without NaN: what is not a finite number becomes null. The first key says who wrote it."""
    plain = {"generator": GENERATOR, **finite(content)}
    replace_text(file, json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


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
