"""Arguments of the runs of a job array: finetuning methods, parts of an embedding, or the lines of a file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from probemb.errors import UserError, nearest

MAX_PARTS = 1000  # Slurm's default MaxArraySize


def argument_lists(
    stage: str,
    arguments: Sequence[str],
    methods: str | None = None,
    sweep: str | None = None,
    parts: int | None = None,
) -> list[list[str]]:
    """Arguments of every run of a submission: `arguments`, followed by the run's own, which take precedence.

    Args:
        methods: finetuning methods, separated by commas; each gets the folder of its name in --out.
        sweep: a file with one line of arguments for each run, as in a shell; comments start with #.
        parts: runs that share the shards of the stage `embed`.

    Raises:
        UserError: unknown methods or no --out, an unusable file or line, or parts of another stage.
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
    from finetune.methods import METHODS

    if stage != "finetune":
        raise UserError(f"The stage {stage} has no methods.", "Leave --methods out, or submit the stage finetune.")
    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    remedy = f"Choose from {', '.join(sorted(METHODS))}, separated by commas."
    for name in names:
        if name not in METHODS:
            raise UserError(f"There is no method '{name}'.{nearest(name, METHODS)}", remedy)
    if not names:
        raise UserError("--methods is empty.", remedy)
    if _value("--method", arguments) is not None:
        raise UserError("--methods and the stage's own --method exclude each other.", "Leave one of them out.")
    out = _value("--out", arguments)
    if not out:
        raise UserError("Several methods need --out after `--`.", "Each method gets its own folder in it.")
    return [["--method", name, "--out", str(Path(out) / name)] for name in names]


def _of_sweep(path: Path) -> list[list[str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
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
    """The value of the last `--option VALUE` or `--option=VALUE`; None if there is none."""
    value = None
    for i, word in enumerate(words):
        if word == option:
            value = words[i + 1] if i + 1 < len(words) else ""
        elif word.startswith(f"{option}="):
            value = word[len(option) + 1 :]
    return value
