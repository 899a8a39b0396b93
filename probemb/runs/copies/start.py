"""A run's use of its copy before it starts: resume from it, or refuse another run's."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from probemb.errors import UserError
from probemb.files import flush
from probemb.runs.best import recorded_steps
from probemb.runs.checkpoints import (
    OPTIMIZER,
    RANDOM,
    STATE,
    WEIGHTS,
    Damaged,
    complete_steps,
    read_content,
    verify_files,
)
from probemb.runs.copies.store import CopyFailed, Store
from probemb.runs.folder import FETCHING

_BEGUN = ".fetch-begun"


def fetch_newest(store: Store, run: Path, tell: Callable[[str], object]) -> None:
    """Fetch the newest whole checkpoint of a copy, and the best one, into a run folder that has none.

    Several ranks of a machine may call it: the first one fetches, the others wait for it. What a fetch that failed or
    was killed has left is completed by the next one.

    Raises:
        UserError: the copy cannot be read, all its checkpoints are damaged, or the folder cannot be written.
    """
    if not lacks_fetch(run):
        return
    steps = _steps(store)
    if not steps:
        return
    folder = run / "checkpoints"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / FETCHING, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder.mkdir(parents=True, exist_ok=True)  # another rank, which fetched nothing, has removed it
            try:
                if lacks_fetch(run):
                    (folder / _BEGUN).touch()
                    _fetch(store, run, steps, tell)
                    (folder / _BEGUN).unlink()
            finally:
                if {path.name for path in folder.iterdir()} <= {FETCHING, _BEGUN}:  # nothing was fetched
                    shutil.rmtree(folder)
                    if not any(run.iterdir()):
                        run.rmdir()
    except CopyFailed as error:
        raise UserError(
            f"The remote copy {store} cannot be fetched ({error}).", "Try again, or start a new run elsewhere."
        ) from None
    except OSError as error:
        raise UserError(f"{run} cannot be written ({error.strerror or error}).", "Choose another --out.") from None


def lacks_fetch(run: Path) -> bool:
    """True if a run folder has no checkpoint yet, or a fetch has begun and not ended."""
    return not complete_steps(run) or (run / "checkpoints" / _BEGUN).exists()


def refuse_another_copy(store: Store, step: int | None, tell: Callable[[str], object]) -> None:
    """Check that the copy is this run's.

    Args:
        step: that the run resumes from; None for a new one.

    Raises:
        UserError: it holds a run, or later steps of this one, or cannot be reached or written by a new run.
    """
    try:
        there = store.steps()
        store.try_writing()
    except CopyFailed as error:
        if step is None:
            raise _unreachable(store, error) from None
        tell(f"The remote copy {store} cannot be reached or written ({error}); the run tries again.")
        return
    if there and step is None:
        raise UserError(
            f"The remote copy {store} already holds a run.", "Add --resume to continue it, or name another place."
        )
    if step is not None and there and there[0] > step:
        raise UserError(
            f"The remote copy {store} has step {there[0]}, and the run would resume from step {step}.",
            "Resume in an empty --out to continue from the copy, or name another place for this one.",
        )


def _steps(store: Store) -> list[int]:
    try:
        return store.steps()
    except CopyFailed as error:
        raise _unreachable(store, error) from None


def _unreachable(store: Store, error: CopyFailed) -> UserError:
    return UserError(
        f"The remote copy {store} cannot be reached or written ({error}).",
        "Check the address and the credentials, or try again.",
    )


def _fetch(store: Store, run: Path, steps: list[int], tell: Callable[[str], object]) -> None:
    here = complete_steps(run)  # of a fetch before, which did not end
    if here and here[0] > steps[0]:
        return  # the run went on without the copy
    for step in steps:
        try:
            if step not in here:
                _fetch_step(store, run, step)
        except Damaged as error:
            tell(f"{error.what} It is skipped.")
            continue
        tell(f"fetched step {step} from {store}")
        break
    else:
        raise UserError(f"Every checkpoint in {store} is damaged.", "Restore one, or start a new run elsewhere.")
    store.get_small(run)
    best = [one for one in recorded_steps(run) if one <= step and one in steps][-1:]
    for one in best:
        if one != step and one not in here:
            try:
                _fetch_step(store, run, one)
            except Damaged as error:
                tell(f"the best checkpoint, of step {one}, could not be fetched ({error})")


def _fetch_step(store: Store, run: Path, step: int) -> None:
    """Raises CopyFailed; Damaged; nothing is left then."""
    target = run / "checkpoints" / f"step-{step}"
    partial = target.with_name(f".{target.name}.fetched")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        store.get(step, partial, (WEIGHTS, OPTIMIZER, RANDOM, STATE))
        verify_files(partial, read_content(partial))
        for file in partial.iterdir():
            flush(file)
        flush(partial)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    flush(target.parent)
