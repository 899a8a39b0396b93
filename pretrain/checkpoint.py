"""Checkpoints that any ZeRO stage and any number of ranks can load; no pickles.

    checkpoints/step-N/
        weights.safetensors     NAME: parameters (float32) and buffers of the engine's module, whole
        optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME: Adam's moments (float32), whole
        random.safetensors      RANK.GENERATOR: random state of every rank
        state.json              everything else: the caller's state, step counts, sizes and SHA-256 of the files

A checkpoint appears under its name only when it is complete and on disk. The folder must be one that all ranks see.
Continuing at the same stage and number of ranks is exact to the bit on a CPU; otherwise only the order of sums differs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pretrain.engine_state import (
    MOMENTS,
    EngineState,
    choose_random_state,
    full_state_dict,
    random_state,
    set_random_state,
    shapes,
)
from probemb import distributed
from probemb.errors import UserError
from probemb.files import flush

__all__ = [
    "full_state_dict",
    "latest_checkpoint",
    "load_checkpoint",
    "prune_checkpoints",
    "read_state",
    "save_checkpoint",
]

FORMAT, VERSION = "probemb training checkpoint", 1
WEIGHTS, OPTIMIZER, RANDOM, STATE = "weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"
COUNTERS = "global_steps", "global_samples"  # of the engine
USE_ANOTHER = "Resume from another checkpoint: remove this one, or move it away."

logger = logging.getLogger(__name__)


class Damaged(UserError):
    """A checkpoint that is not whole."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"The checkpoint {path} is damaged: {reason}.", USE_ANOTHER)

    def __reduce__(self):
        return UserError, (self.what, self.remedy)


def save_checkpoint(engine, run_dir: Path | str, step: int, state: dict[str, Any]) -> Path:
    """Write `run_dir`/checkpoints/step-`step`; collective, between two optimizer steps.

    A kill at any moment leaves the checkpoints of earlier steps untouched. One of the same step is replaced.

    Args:
        state: what the caller wants back from `load_checkpoint`; anything JSON can hold, the same on all ranks.

    Raises:
        UserError: it could not be written (on all ranks).
    """
    json.dumps(state, allow_nan=False)  # raises on every rank alike, before any of them waits for another
    held = EngineState(engine)
    weights, moments, steps = full_state_dict(engine), held.moments(), held.steps()
    generators = _from_all(random_state())
    folder = Path(run_dir) / "checkpoints"
    target = folder / f"step-{step}"
    failure = None
    if distributed.is_main():
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "world_size": distributed.world_size(),
            "zero_stage": held.stage,
            "engine": {name: getattr(engine, name) for name in COUNTERS},
            "adam_steps": steps,
            "groups": [
                {"lr": float(g["lr"]), **{key: g[key] for key in ("betas", "eps", "weight_decay")}}
                for g in held.optimizer.param_groups
            ],
            "state": state,
        }
        rng = {f"{r}.{name}": t for r, one in enumerate(generators) for name, t in one.items()}
        # Names that share memory would be refused by safetensors; each parameter is stored under its first name.
        weights = {name: weights[name] for name in shapes(engine)}
        try:
            _write(target, {WEIGHTS: weights, OPTIMIZER: moments, RANDOM: rng}, content)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(_partial(target), ignore_errors=True)
            failure = UserError(
                f"The checkpoint {target} could not be written: {error}.",
                "Make room, or make the folder writable, and go on with --resume; checkpoints before are whole.",
            )
    _agree(failure)
    return target


def latest_checkpoint(run_dir: Path | str) -> Path | None:
    """The newest complete checkpoint of a run, or None if none was ever finished; not collective.

    What a killed write left is ignored. A checkpoint whose files are missing or cut is passed over, with a warning.

    Raises:
        UserError: there are checkpoints, and none of them is whole.
    """
    damaged = None
    for path in _finished(Path(run_dir)):
        try:
            _read_content(path)
            return path
        except Damaged as error:
            damaged = error
            if os.environ.get("RANK", "0") == "0":
                logger.warning("%s Taking the one before.", error.what)
    if damaged:
        raise UserError(
            f"No checkpoint in {Path(run_dir) / 'checkpoints'} is whole.", "Restore one, or begin a new run."
        )
    return None


def read_state(path: Path | str) -> dict[str, Any]:
    """The `state` that a checkpoint was saved with, and its "step"; not collective, reads no tensors.

    Raises:
        UserError: damaged, or of another version.
    """
    content = _read_content(Path(path))
    return {**content["state"], "step": content["step"]}


def load_checkpoint(engine, path: Path | str) -> dict[str, Any]:
    """Put an engine back to where `save_checkpoint` found it; collective, before the first or between two steps.

    Restores weights, buffers, Adam's moments and counts, learning rates, the engine's counters, and random states.
    Betas, eps and weight decay stay the engine's: they are configuration. A rank that the checkpoint does not have gets
    random states drawn from rank 0's and its own number.

    Returns:
        what `read_state` returns.

    Raises:
        UserError: damaged, of another version, or of another model; on all ranks, and nothing is changed.
    """
    path = Path(path)
    held = EngineState(engine)
    with ExitStack() as stack:
        failure = content = None
        try:
            content = _read_content(path)
            if distributed.is_main():
                _verify(path, content)
            weights, moments = (stack.enter_context(_open(path, name)) for name in (WEIGHTS, OPTIMIZER))
            ours = shapes(engine)
            _check_shapes(path, ours, _shapes_in(weights))
            _check_shapes(
                path, {f"{m}.{name}": ours[name] for name in held.stepped for m in MOMENTS}, _shapes_in(moments)
            )
            steps = {name: int(content["adam_steps"][name]) for name in held.stepped}
            rates = [float(group["lr"]) for group in content["groups"]]
            if len(rates) != len(held.optimizer.param_groups):
                raise _another_model(path, [f"it has {len(rates)} parameter groups"])
            counters = {name: int(content["engine"][name]) for name in COUNTERS}
            generators = choose_random_state(load_file(path / RANDOM), int(content["world_size"]))
        except UserError as error:
            failure = error
        except (OSError, SafetensorError) as error:
            failure = Damaged(path, str(error))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            failure = Damaged(path, f"{STATE} is not as it was written ({error!r})")
        _agree(failure)

        held.load(weights.get_tensor, moments.get_tensor, steps)
    for group, rate in zip(held.optimizer.param_groups, rates):
        group["lr"] = rate
    for name, value in counters.items():
        setattr(engine, name, value)
    set_random_state(generators)
    distributed.barrier()
    return {**content["state"], "step": content["step"]}


def prune_checkpoints(run_dir: Path | str, keep: int) -> None:
    """Delete all but the newest `keep` whole checkpoints; rank 0 does it, the others return at once."""
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    if not distributed.is_main():
        return
    kept = 0
    for path in _finished(Path(run_dir)):
        if kept == keep:
            gone = path.with_name(f".{path.name}.deleted")  # a half-deleted one must not look like a checkpoint
            try:
                path.rename(gone)
                shutil.rmtree(gone)
            except OSError as error:  # no reason to stop training
                logger.warning("The old checkpoint %s could not be deleted: %s.", path, error)
            continue
        try:
            _read_content(path)
            kept += 1
        except UserError:
            continue  # not deleted: someone may want to look at it


def _finished(run_dir: Path) -> list[Path]:
    """All step-N, newest first."""
    folder = run_dir / "checkpoints"
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _write(target: Path, tensors: dict[str, dict[str, Tensor]], content: dict[str, Any]) -> None:
    """Write aside, flush to disk, rename."""
    partial, old = _partial(target), target.with_name(f".{target.name}.old")
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(".step-*"):  # of writes and deletions that were killed
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()
    files = {}
    for name, entries in tensors.items():
        save_file(entries, partial / name)
        files[name] = {"bytes": (partial / name).stat().st_size, "sha256": _sha256(partial / name)}
        flush(partial / name)
    content = json.loads(json.dumps({**content, "files": files}))  # as it will be read, which is what the sum is of
    text = json.dumps({**content, "sha256": _sha256_of(content)}, indent=1)
    (partial / STATE).write_text(text, encoding="utf-8")
    flush(partial / STATE)
    flush(partial)
    if target.exists():  # between these two renames, this one step has no checkpoint under its name
        target.rename(old)
    partial.rename(target)
    flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _sha256_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_content(path: Path) -> dict[str, Any]:
    """state.json, after a look at whether it is itself and the files have their sizes."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Damaged(path, f"it has no {STATE}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(path, f"{STATE} cannot be read ({type(error).__name__})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Damaged(path, f"{STATE} is not that of a {FORMAT}")
    if content.get("version") != VERSION:
        raise UserError(
            f"The checkpoint {path} has format {content.get('version')!r}, and this program reads {VERSION}.",
            "Resume with the version of probemb that wrote it.",
        )
    if content.pop("sha256", None) != _sha256_of(content):
        raise Damaged(path, f"{STATE} has been changed since it was written")
    for name in (WEIGHTS, OPTIMIZER, RANDOM):
        try:
            size, expected = (path / name).stat().st_size, content["files"][name]["bytes"]
        except (OSError, KeyError, TypeError):
            raise Damaged(path, f"{name} is missing") from None
        if size != expected:
            raise Damaged(path, f"{name} has {size} bytes instead of {expected}")
    return content


def _verify(path: Path, content: dict[str, Any]) -> None:
    for name in (WEIGHTS, OPTIMIZER, RANDOM):
        if _sha256(path / name) != content["files"][name]["sha256"]:
            raise Damaged(path, f"the contents of {name} are not what was written")


def _open(path: Path, name: str):
    return safe_open(path / name, framework="pt", device="cpu")


def _shapes_in(file) -> dict[str, tuple[int, ...]]:
    return {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}


def _check_shapes(path: Path, ours: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]]) -> None:
    """Names and shapes of the engine against those in a file."""

    def differences() -> Iterator[str]:
        for name, shape in ours.items():
            if name not in theirs:
                yield f"{name!r} is missing"
            elif theirs[name] != shape:
                yield f"{name!r} is {theirs[name]} instead of {shape}"
        yield from (f"{name[:100]!r} is unknown" for name in theirs if name not in ours)

    found = list(differences())
    if found:
        raise _another_model(path, found)


def _another_model(path: Path, differences: list[str]) -> UserError:
    more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
    return UserError(
        f"The checkpoint {path} is a checkpoint of another model: {', '.join(differences[:3])}{more}.",
        "Resume with the model that the run was begun with (config.yaml in its folder), or begin a new run.",
    )


def _from_all(mine: Any) -> list[Any]:
    """Every rank's object, in rank order."""
    if distributed.world_size() == 1:
        return [mine]
    everyone = [None] * distributed.world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _agree(failure: UserError | None) -> None:
    """If any rank failed, all raise the first one's error; none goes on alone."""
    for error in _from_all(failure):
        if error is not None:
            raise error
