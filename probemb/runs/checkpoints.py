"""Checkpoints on disk: writing, finding, checking and pruning them. One process, no engine.

Tensors are written from their own memory without a copy; writing and hashing release Python's lock, so that training
continues during a write in a thread.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from probemb.errors import UserError
from probemb.files import file_sha256, flush, replace_text

WEIGHTS, OPTIMIZER, RANDOM, STATE = "weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"
BEST = "best.json"  # in the run folder: the best checkpoint by a metric


class Damaged(UserError):
    """A checkpoint that is incomplete or changed."""

    def __init__(self, path: Path, reason: str):
        remedy = "Resume from another checkpoint: remove this one, or move it away."
        super().__init__(f"The checkpoint {path} is damaged: {reason}.", remedy)

    def __reduce__(self):
        return UserError, (self.what, self.remedy)


class Snapshot(NamedTuple):
    """A training state in the memory of rank 0: tensors by file, state.json's content ("step" among it), and the CPU
    tensors of the module to be exported, if any.
    """

    tensors: dict[str, dict[str, Tensor]]
    content: dict
    whole: dict[str, Tensor] | None = None

    def write(self, run_dir: Path | str) -> Path:
        """Write `run_dir`/checkpoints/step-N under a hidden name, flush it to disk, rename it; one of the same step is
        replaced. Raises OSError, with the checkpoint's name; nothing of it is left then.
        """
        target = Path(run_dir) / "checkpoints" / f"step-{self.content['step']}"
        partial, old = (target.with_name(f".{target.name}.{ending}") for ending in ("partial", "old"))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for left in target.parent.glob(".step-*"):  # of writes that were killed
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir()
            files = {name: _write_tensors(partial / name, entries) for name, entries in self.tensors.items()}
            content = json.loads(json.dumps({**self.content, "files": files}))  # as it will be read, for the sum
            (partial / STATE).write_text(json.dumps({**content, "sha256": _sum_of(content)}, indent=1))  # ASCII
            flush(partial / STATE)
            flush(partial)
            if target.exists():  # between these two renames, this one step has no checkpoint under its name
                target.rename(old)
            partial.rename(target)
            flush(target.parent)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise OSError(error.errno, error.strerror or str(error), str(target)) from error
        shutil.rmtree(old, ignore_errors=True)
        return target


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, int | str]:
    try:
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, path)
    except SafetensorError as error:  # a full disk, for example
        raise OSError(str(error)) from None
    path.chmod(0o644)  # safetensors makes it readable by its owner alone
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def read_state(path: Path | str) -> dict:
    """The `state` of a checkpoint, and its "step"; reads no tensors. Raises Damaged."""
    content = read_content(Path(path))
    return {**content["state"], "step": content["step"]}


def read_content(path: Path, verify: bool = False) -> dict:
    """state.json, checked against its own sum and the files' sizes; `verify`: also their sums. Raises Damaged."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        own = content.pop("sha256")
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise Damaged(path, f"{STATE} is missing or cannot be read ({type(error).__name__})") from None
    if own != _sum_of(content):
        raise Damaged(path, f"{STATE} has been changed since it was written")
    for name, about in content["files"].items():
        try:
            if (size := (path / name).stat().st_size) != about["bytes"]:
                raise Damaged(path, f"{name} has {size} bytes instead of {about['bytes']}")
            if verify and file_sha256(path / name) != about["sha256"]:
                raise Damaged(path, f"the contents of {name} are not what was written")
        except OSError as error:
            raise Damaged(path, f"{name} is missing or cannot be read ({error.strerror})") from None
    return content


def _sum_of(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def find_checkpoint(run_dir: Path | str, tell: Callable[[str], object] = print) -> Path | None:
    """The newest checkpoint of a run whose files have their sums, or None if none was ever finished; not collective.

    `tell` gets a sentence for every newer one, which is damaged. Raises UserError: all are.
    """
    found = _finished(run_dir)
    for path in found.values():
        try:
            read_content(path, verify=True)
            return path
        except Damaged as error:
            tell(f"{error.what} It is skipped.")
    if found:
        raise UserError(f"Every checkpoint in {run_dir}/checkpoints is damaged.", "Restore one, or start a new run.")
    return None


def restore_replaced(run_dir: Path | str) -> None:
    """Give a checkpoint its name back whose replacement was killed between the two renames; no job writes the run."""
    for old in (Path(run_dir) / "checkpoints").glob(".step-*.old"):
        target = old.with_name(old.stem.removeprefix("."))
        if not target.exists():
            with suppress(OSError):  # another rank was quicker
                old.rename(target)


def remove_after(run_dir: Path | str, step: int) -> None:
    """Delete checkpoints after the step that a run resumes from: they are damaged, which `prune` would not see."""
    for number, path in _finished(run_dir).items():
        if number > step:
            shutil.rmtree(path)


def prune(run_dir: Path | str, keep: int, keep_every: int = 0, also: Collection[int] = ()) -> None:
    """Delete all but the newest `keep` whole checkpoints, multiples of `keep_every` (0: none), and `also` these."""
    found = _finished(run_dir)
    for step in superfluous(found, complete_steps(run_dir), keep, keep_every, also):
        try:
            shutil.rmtree(found[step])
        except OSError as error:
            print(f"warning: the old checkpoint {found[step]} could not be deleted: {error}.", flush=True)


def superfluous(
    steps: Iterable[int], whole: Collection[int], keep: int, keep_every: int = 0, also: Collection[int] = ()
) -> list[int]:
    """The `steps` that `prune` deletes; only those in `whole` count as kept."""
    old = [step for step in steps if sum(newer > step for newer in whole) >= keep]
    return [step for step in old if step not in also and not (keep_every and step % keep_every == 0)]


def complete_steps(run_dir: Path | str) -> list[int]:
    """Steps of the complete checkpoints, newest first; sizes are checked, sums are not."""
    found = []
    for step, path in _finished(run_dir).items():
        with suppress(Damaged):
            read_content(path)
            found.append(step)
    return found


def _finished(run_dir: Path | str) -> dict[int, Path]:
    """Checkpoints by their step, newest first."""
    paths = {path.name.removeprefix("step-"): path for path in (Path(run_dir) / "checkpoints").glob("step-*")}
    return {int(step): paths[step] for step in sorted(filter(str.isdecimal, paths), key=int, reverse=True)}


@dataclass
class Best:
    """The best step of a run by a metric's name in the log: the lowest loss, else the highest value."""

    metric: str
    step: int | None = None
    value: float = math.nan

    def add(self, step: int, value: float) -> bool:
        """Note a later step's value; returns whether it is the best so far. NaN never is."""
        better = value < self.value if self.metric.endswith("loss") else value > self.value
        if is_best := better or (self.step is None and not math.isnan(value)):
            self.step, self.value = step, value
        return is_best

    def write(self, run: Path) -> None:
        replace_text(run / BEST, json.dumps(asdict(self), indent=1) + "\n")


def read_best(run: Path) -> Best | None:
    """The best step that a run has marked; None without best.json, or if it is damaged."""
    try:
        content = json.loads((run / BEST).read_text(encoding="utf-8"))
        return Best(str(content["metric"]), int(content["step"]), float(content["value"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def best_until(run: Path, step: int) -> Best | None:
    """The best of a run that resumes from `step`, unless it is later or has no whole checkpoint."""
    best = read_best(run)
    return best if best and best.step <= step and best.step in complete_steps(run) else None
