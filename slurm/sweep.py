"""Several runs in one submission: finetuning methods, parts of an embedding, or a file with a line for each run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from probemb.errors import UserError, nearest

MAX_PARTS = 1000  # a job array has no more where nobody has changed Slurm's MaxArraySize


def argument_lists(
    stage: str,
    arguments: Sequence[str],
    methods: str | None = None,
    sweep: str | None = None,
    parts: int | None = None,
) -> list[list[str]]:
    """Arguments of every run of a submission: `arguments` alone, or with more behind them, which win.

    Args:
        stage: name of the stage.
        arguments: of all runs.
        methods: finetuning methods, separated by commas; each gets the folder of its name in --out.
        sweep: a file with one line of arguments for each run, as in a shell; lines beginning with # do not count.
        parts: runs that share the shards of the stage `embed`.

    Raises:
        UserError: methods that do not exist or have no --out, a file or line that cannot be used, parts of a stage that
            has none.
    """
    if parts is not None:
        return [[*arguments, "--part", part] for part in _parts(stage, arguments, parts, methods, sweep)]
    if methods is not None and sweep is not None:
        raise UserError("--methods and --sweep exclude each other.", "Write --method into the lines of the sweep.")
    if methods is not None:
        return [[*arguments, *more] for more in _of_methods(stage, arguments, methods)]
    if sweep is not None:
        return [[*arguments, *more] for more in _of_sweep(Path(sweep))]
    return [list(arguments)]


def _parts(stage: str, arguments: Sequence[str], parts: int, methods: str | None, sweep: str | None) -> list[str]:
    if stage != "embed":
        raise UserError(f"The stage {stage} has no parts.", "Leave --parts out, or submit the stage embed.")
    if methods is not None or sweep is not None:
        raise UserError("--parts excludes --methods and --sweep.", "Leave them out.")
    if not 1 <= parts <= MAX_PARTS:
        raise UserError(f"--parts is {parts}.", f"Give 1 to {MAX_PARTS:,}.")
    if _value("--part", arguments) is not None:
        raise UserError("--parts and the stage's own --part exclude each other.", "Leave one of them out.")
    return [f"{i}/{parts}" for i in range(1, parts + 1)]


def _of_methods(stage: str, arguments: Sequence[str], methods: str) -> list[list[str]]:
    from finetune.methods.registry import METHODS

    if stage != "finetune":
        raise UserError(f"The stage {stage} has no methods.", "Leave --methods out, or submit the stage finetune.")
    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    remedy = f"Choose from {', '.join(sorted(METHODS))}, separated by commas."
    for name in names:
        if name not in METHODS:
            raise UserError(f"There is no method '{name}'.{nearest(name, METHODS)}", remedy)
    if not names:
        raise UserError("--methods names none.", remedy)
    if _value("--method", arguments) is not None:
        raise UserError("--methods and the stage's own --method exclude each other.", "Leave one of them out.")
    out = _value("--out", arguments)
    if not out:
        raise UserError("Several methods need --out after `--`.", "Each method gets a folder of its own in it.")
    return [["--method", name, "--out", str(Path(out) / name)] for name in names]


def _of_sweep(path: Path) -> list[list[str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not a text in UTF-8"
        raise UserError(f"The list of a sweep, {path}, cannot be read: {why}.", "Name a text file.") from None
    found, folders = [], set()
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UserError(f"Line {number} of {path} cannot be read: {error}.", "Close the quotation.") from None
        out = _value("--out", words)
        if not out or out in folders:
            what = "names no --out" if not out else f"has the --out of another line, {out}"
            raise UserError(f"Line {number} of {path} {what}.", "Give each run of a sweep a folder of its own.")
        folders.add(out)
        found.append(words)
    if not found:
        raise UserError(f"{path} has no line of arguments.", "Write one for each run.")
    return found


def _value(option: str, words: Sequence[str]) -> str | None:
    """What the last `option` is set to, in either way of writing; None if it does not occur."""
    value = None
    for i, word in enumerate(words):
        if word == option:
            value = words[i + 1] if i + 1 < len(words) else ""
        elif word.startswith(f"{option}="):
            value = word[len(option) + 1 :]
    return value
