"""Checkpoints on disk: writing, finding, checking and pruning them. One process, no engine.

Tensors are written from their own memory without a copy; writing and hashing release Python's lock, so that training
continues during a write in a thread.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from probemb.errors import UserError
from probemb.files import flush, replace_text

FORMAT, VERSION = "probemb training checkpoint", 1
WEIGHTS, OPTIMIZER, RANDOM, STATE = "weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"
BEST = "best.json"  # in the run folder: the best checkpoint by a metric

logger = logging.getLogger(__name__)


class Damaged(UserError):
    """A checkpoint that is incomplete or changed."""

    def __init__(self, path: Path, reason: str):
        remedy = "Resume from another checkpoint: remove this one, or move it away."
        super().__init__(f"The checkpoint {path} is damaged: {reason}.", remedy)

    def __reduce__(self):
        return UserError, (self.what, self.remedy)


class Snapshot(NamedTuple):
    """A training state in the memory of rank 0.

    tensors   by file
    content   of state.json, "step" among it
    whole     {name: CPU tensor} of the module to be exported; optional
    """

    tensors: dict[str, dict[str, Tensor]]
    content: dict[str, Any]
    whole: dict[str, Tensor] | None = None

    def write(self, run_dir: Path | str) -> Path:
        """Write `run_dir`/checkpoints/step-N under a hidden name, flush it to disk, rename it; not collective.

        A kill at any moment leaves the checkpoints of earlier steps untouched. One of the same step is replaced.
        Raises UserError: it could not be written; nothing of it is left then.
        """
        target = Path(run_dir) / "checkpoints" / f"step-{self.content['step']}"
        partial, old = (target.with_name(f".{target.name}.{ending}") for ending in ("partial", "old"))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for left in target.parent.glob(".step-*"):  # of writes and deletions that were killed
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir()
            files = {name: _write_tensors(partial / name, entries) for name, entries in self.tensors.items()}
            content = {"format": FORMAT, "version": VERSION, **self.content, "files": files}
            content = json.loads(json.dumps(content))  # as it will be read, for the sum
            text = json.dumps({**content, "sha256": _sum_of(content)}, indent=1)
            (partial / STATE).write_text(text, encoding="utf-8")
            flush(partial / STATE)
            flush(partial)
            if target.exists():  # between these two renames, this one step has no checkpoint under its name
                target.rename(old)
            partial.rename(target)
            flush(target.parent)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"The checkpoint {target} could not be written: {error}.",
                "Make room, or make the folder writable, and continue with --resume; earlier checkpoints are complete.",
            ) from error
        shutil.rmtree(old, ignore_errors=True)
        return target


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, int | str]:
    """Write a safetensors file of CPU tensors; returns its {"bytes", "sha256"}. Raises OSError."""
    try:
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, path)
    except SafetensorError as error:  # a full disk, for example
        raise OSError(str(error)) from None
    path.chmod(0o644)  # safetensors makes it readable by its owner alone
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def read_state(path: Path | str) -> dict[str, Any]:
    """The `state` of a checkpoint, and its "step"; reads no tensors. Raises UserError: damaged, or another version."""
    content = read_content(Path(path))
    return {**content["state"], "step": content["step"]}


def read_content(path: Path) -> dict[str, Any]:
    """state.json, checked against its own sum and the files' sizes. Raises UserError: damaged, or another version."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        ours = content["format"] == FORMAT
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise Damaged(path, f"{STATE} is missing or cannot be read ({type(error).__name__})") from None
    if ours and content.get("version") != VERSION:
        raise UserError(
            f"The checkpoint {path} has format {content.get('version')!r}, and this program reads {VERSION}.",
            "Resume with the version of probemb that wrote it.",
        )
    if not ours or content.pop("sha256", None) != _sum_of(content):
        raise Damaged(path, f"{STATE} has been changed since it was written")
    for name in (WEIGHTS, OPTIMIZER, RANDOM):
        try:
            size, expected = (path / name).stat().st_size, content["files"][name]["bytes"]
        except (OSError, KeyError):
            raise Damaged(path, f"{name} is missing") from None
        if size != expected:
            raise Damaged(path, f"{name} has {size} bytes instead of {expected}")
    return content


def verify_files(path: Path, content: dict[str, Any]) -> None:
    """Compare every file with its sum. Raises Damaged."""
    for name in (WEIGHTS, OPTIMIZER, RANDOM):
        try:
            is_whole = _sha256(path / name) == content["files"][name]["sha256"]
        except OSError as error:
            raise Damaged(path, f"{name} cannot be read ({error.strerror})") from None
        if not is_whole:
            raise Damaged(path, f"the contents of {name} are not what was written")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sum_of(content: dict[str, Any]) -> str:
    """The sum of state.json's content without the sum itself."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def find_checkpoint(
    run_dir: Path | str, verify: bool = False, tell: Callable[[str], object] | None = None
) -> Path | None:
    """The newest complete checkpoint of a run, or None if none was ever finished; not collective.

    `verify`: also compare every file with its sum, not its size alone; `tell`: gets a sentence for every newer one that
    is skipped. Raises UserError: all checkpoints are damaged, or one has another version.
    """
    found = _finished(run_dir)
    for path in found:
        try:
            content = read_content(path)
            if verify:
                verify_files(path, content)
            return path
        except Damaged as error:
            (tell or logger.warning)(f"{error.what} It is skipped.")
    if found:
        raise UserError(f"Every checkpoint in {found[0].parent} is damaged.", "Restore one, or start a new run.")
    return None


def restore_replaced(run_dir: Path | str) -> None:
    """Give a checkpoint its name back whose replacement was killed between the two renames; no job writes the run."""
    for old in (Path(run_dir) / "checkpoints").glob(".step-*.old"):
        target = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if not target.exists():
            with suppress(OSError):  # another rank was quicker
                old.rename(target)


def set_aside_after(run_dir: Path | str, step: int) -> None:
    """Hide the checkpoints after the step that a run resumes from: they are damaged, and `prune`, which compares no
    sums, would keep them in place of new ones. The next write deletes them. Raises OSError.
    """
    for path in _finished(run_dir):
        if _step(path) > step:
            gone = path.with_name(f".{path.name}.damaged")
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)


def prune(run_dir: Path | str, keep: int, keep_every: int = 0, also: Collection[int] = ()) -> None:
    """Delete complete checkpoints, except the newest `keep`, those whose step is a multiple of `keep_every` (0: none),
    and `also` those of these steps. A damaged one counts for none, and goes when it is older.

    One that cannot be deleted is logged and does not stop training.
    """
    found = {_step(path): path for path in _finished(run_dir)}
    for step in superfluous(found, complete_steps(run_dir), keep, keep_every, also):
        gone = found[step].with_name(f".step-{step}.deleted")  # a half-deleted one must not look like a checkpoint
        try:
            found[step].rename(gone)
            shutil.rmtree(gone)
        except OSError as error:
            logger.warning("The old checkpoint %s could not be deleted: %s.", found[step], error)


def superfluous(
    steps: Iterable[int], whole: Collection[int], keep: int, keep_every: int = 0, also: Collection[int] = ()
) -> list[int]:
    """The `steps` that `prune` deletes; `whole`: those whose checkpoints are complete, which alone count as kept."""
    old = [step for step in steps if sum(newer > step for newer in whole) >= keep]
    return [step for step in old if step not in also and not (keep_every and step % keep_every == 0)]


def complete_steps(run_dir: Path | str) -> list[int]:
    """Steps of the complete checkpoints, newest first; sizes are checked, sums are not."""
    found = []
    for path in _finished(run_dir):
        with suppress(UserError):
            read_content(path)
            found.append(_step(path))
    return found


def _finished(run_dir: Path | str) -> list[Path]:
    """All step-N, newest first."""
    found = [p for p in (Path(run_dir) / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def free_bytes(folder: Path) -> int:
    """Free space on the disk of a folder, which need not exist yet."""
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free


# -------------------------------------------------------------------------------------------------------- best


@dataclass
class Best:
    """The steps that were the best of the run when they were evaluated, by a metric's name in the log.

    `values`, by step, are each better than the one before: lower for a loss, else higher. The last is the best.
    """

    metric: str
    values: dict[int, float] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The best step so far."""
        return next(reversed(self.values), None)

    def add(self, step: int, value: float) -> bool:
        """Note the value of a later step, if it is the best so far; returns whether it is. NaN never is."""
        sign = -1 if self.metric.endswith("loss") else 1
        is_best = sign * value > (sign * self.values[self.step] if self.values else float("-inf"))
        if is_best:
            self.values[step] = value
        return is_best

    def write(self, run: Path) -> None:
        """Write best.json. Raises OSError."""
        steps = [{"step": step, "value": value} for step, value in self.values.items()]
        replace_text(run / BEST, json.dumps({"metric": self.metric, "steps": steps}, indent=1) + "\n")


def read_best(run: Path) -> Best | None:
    """The best of a run; None without best.json, or if it is damaged."""
    try:
        content = json.loads((run / BEST).read_text(encoding="utf-8"))
        return Best(str(content["metric"]), {int(one["step"]): float(one["value"]) for one in content["steps"]})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def best_until(run: Path, step: int) -> Best | None:
    """The best of a run that resumes from `step`, without later steps and those that have no whole checkpoint."""
    if best := read_best(run):
        complete = complete_steps(run)
        best.values = {s: value for s, value in best.values.items() if s <= step and s in complete}
    return best if best and best.values else None
