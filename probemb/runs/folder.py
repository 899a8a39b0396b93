"""Checks of a run folder before a run starts (checkpoint to resume from, files in the way, free space), and a limit on
starts without a step.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import nn

from probemb.distributed import all_of, is_main
from probemb.errors import UserError
from probemb.files import replace_text
from probemb.options import to_dict, with_absolute_paths
from probemb.runs.checkpoints import find_checkpoint, free_bytes, restore_replaced
from probemb.runs.lock import NAME as LOCK
from probemb.runs.lock import refuse_locked

BYTES_OF_CHECKPOINT, BYTES_OF_MODEL = 12, 4  # a parameter: a float32 weight and Adam's two moments; the weight
MAX_STARTS = 3


def newest_checkpoint(
    out: str | Path,
    resume: bool,
    tell: Callable[[str], object] | None = None,
    minutes: float = 0.0,
    trains: bool = True,
    fetch: Callable[[], object] = lambda: None,
) -> Path | None:
    """The checkpoint to resume from, or None for a new run; writes nothing, but a name that a kill took.

    With `resume`, every file of it has been compared with its sum, and `tell` gets a sentence about newer, damaged
    ones, or about the wait of up to `minutes` for an earlier start of this job to release the folder. `fetch` may put a
    checkpoint into the folder, once that is known to be a run's or empty; without `trains` there are never any.
    Raises UserError: a new run would overwrite something, such as the results of one whose checkpoints are gone, or
    another job writes the folder.
    """
    run = Path(out)
    refuse_locked(run, minutes if resume else 0.0, tell)
    restore_replaced(run)
    names = _names(run)
    saved, configured = find_checkpoint(run, tell=lambda line: None), _is_configured(run)
    begun = names <= {"checkpoints"} and all(path.name.startswith(".") for path in (run / "checkpoints").glob("*"))
    if not resume and (saved or configured):
        raise UserError(f"{run} already holds a run.", "Add --resume to continue it, or choose another --out.")
    if names and not (resume and (saved or configured or begun)):
        raise UserError(f"{run} holds something else than a run.", "Choose another --out.")
    if not resume:
        return None
    fetch()
    earlier = find_checkpoint(run, verify=True, tell=tell)
    logged = (run / "metrics.jsonl").exists() and not (run / "checkpoints").exists()
    if not earlier and trains and (logged or any(run.glob("model*/*"))):
        raise UserError(
            f"{run} holds a run without its checkpoints: starting again would overwrite its model and metrics.",
            "Put checkpoints/ back to continue it, or choose another --out.",
        )
    return earlier


def _names(run: Path) -> set[str]:
    """The names in a folder, without those left by an attempt that was killed before it started."""
    if not run.is_dir():
        return {run.name} if run.exists() else set()
    return {p.name for p in run.iterdir() if p.name not in (LOCK, "wandb") and not p.name.startswith(".config.yaml.")}


def _is_configured(run: Path) -> bool:
    """True if a folder has the config.yaml of a run."""
    try:
        return re.search(r"^out:", (run / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE) is not None
    except (OSError, ValueError):
        return False


def refuse_full_disk(out: str | Path, model: nn.Module, models: int = 1, average: bool = False) -> None:
    """Check that the disk has room for one more checkpoint and so many models. Raises UserError, which names both
    sizes.

    `model`: all that is trained; several networks count as one model. `average`: checkpoints have one of its weights.
    """
    n = sum(p.numel() for p in model.parameters())
    needed, free = n * (BYTES_OF_CHECKPOINT + (models + average) * BYTES_OF_MODEL), free_bytes(Path(out))
    if free < needed:
        what = "one model" if models == 1 else f"{models} models"
        raise UserError(
            f"The disk of {out} has {_size(free)} free, and one checkpoint and {what} of {n:,} parameters need "
            f"{_size(needed)}.",
            "Make room, or choose an --out on another disk.",
        )


def _size(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"


def _changes(before: dict, now: dict, free: tuple[str, ...] = (), prefix: str = "") -> list[tuple[str, object, object]]:
    """(dotted key, before, now) of the differences of nested dictionaries, without `free` keys and groups."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [(prefix, before, now)] if before != now else []
    keys = {name: f"{prefix}.{name}" if prefix else name for name in sorted({*before, *now})}
    pairs = [(key, before.get(name), now.get(name)) for name, key in keys.items() if key not in free]
    return [change for key, a, b in pairs for change in _changes(a, b, free, key)]


def refuse_another_run(
    config, state: dict, identity: dict, earlier: Path, free: tuple[str, ...], digest: tuple[str, str, str]
) -> list[str]:
    """Refuse to resume with other data, another model or another recipe, unless `config.allow_changes` is set.

    Args:
        state: of the checkpoint `earlier`: its "config", and "data", the identity of its data.
        identity: settings and data that the batches depend on.
        free: keys of the configuration, and groups of them, that may change.
        digest: key of the data sum in `identity`, its name in messages, and the key of the paths in `config.data`.

    Returns the changes, "KEY: BEFORE -> NOW" each. Raises UserError, which names them.
    """
    before, now = (with_absolute_paths(one, config) for one in (state["config"], to_dict(config)))
    changed = _changes(before, now, free)
    known = {key for key, _, _ in changed}
    sum_key, called, path_key = digest
    for key, old, new in _changes(state["data"], identity):
        if key == sum_key:  # two sums say little: name the paths too
            paths = [one["data"][path_key] for one in (before, now)]
            paths = [path if isinstance(path, str) else " ".join(path) for path in paths]
            old, new = (f"{value} ({path})" for value, path in zip((old, new), paths))
        if key not in known:
            changed.append((called if key == sum_key else f"data.{key}", old, new))
    found = [f"{key}: {old} -> {new}" for key, old, new in changed]
    may_allow = hasattr(config, "allow_changes")
    if found and not (may_allow and config.allow_changes):
        raise UserError(
            f"The run is not the one that {earlier} belongs to: {'; '.join(found)}.",
            "Resume with the settings in the run folder's config.yaml (--config) and the same data, "
            f"{'pass --allow-changes, ' if may_allow else ''}or start a new run with another --out.",
        )
    return found


def remove_leftovers(run: Path) -> None:
    """Remove files that a killed attempt was writing, under our temporary names and under safetensors' own."""
    models = ("model", "model-best", "model-second", "model-swa", "model-swa-second")
    for pattern in (
        ".config.yaml.*",
        ".metrics.jsonl.*",
        *(f"{name}/{mark}" for name in models for mark in (".*.*", ".tmp*")),
    ):
        for left in run.glob(pattern):
            left.unlink(missing_ok=True)


def refuse_endless_starts(run: Path, first: int, step: int) -> None:
    """Count a start that was asked to stop at `step` and began at the step `first`: a scheduler would repeat it
    forever; collective.

    Raises UserError on all ranks: it is the third in a row without a new step. The count begins again then.
    """
    count = count_start(run / ".starts", first, step) if is_main() else 0
    if all_of(count)[0] >= MAX_STARTS:
        raise UserError(
            f"{MAX_STARTS} starts in a row were asked to stop before they had made a step, so the run, at step {step}, "
            "does not ask for another.",
            "Give it more time (sbatch --time), or shorten what comes before the first step, and continue with "
            "--resume.",
        )


def count_start(file: Path, first: int, now: int) -> int:
    """Starts in a row, this one included, that ended where they had begun; kept in `file`, "POSITION COUNT", whose
    errors do not decide anything. After `MAX_STARTS` the count begins again.
    """
    count = 0
    if now == first:
        with suppress(OSError, ValueError):
            at, before = map(int, file.read_text().split())
            count = before if at == now else 0
        count += 1
    with suppress(OSError):
        if 0 < count < MAX_STARTS:
            replace_text(file, f"{now} {count}\n")
        else:
            file.unlink(missing_ok=True)
    return count
