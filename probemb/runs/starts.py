"""Starts of a run in a row that were asked to stop before their first step: a scheduler would repeat them forever."""

from contextlib import suppress
from pathlib import Path

from probemb.distributed import all_of, is_main
from probemb.errors import UserError
from probemb.files import replace_text

MAX_STARTS = 3
NAME = ".starts"  # "STEP COUNT": so many starts in a row stood at this step


def refuse_endless_starts(run: Path, first: int, step: int) -> None:
    """Count a start that was asked to stop at `step` and began at the step `first`; collective.

    Raises UserError on all ranks: it is the third in a row without a new step. The count begins again then.
    """
    found = _count(run / NAME, first, step) if is_main() else 0
    if all_of(found)[0] >= MAX_STARTS:
        raise UserError(
            f"{MAX_STARTS} starts in a row were asked to stop before they had made a step, so the run, at step {step}, "
            "does not ask for another.",
            "Give it more time (sbatch --time), or shorten what comes before the first step, and continue with "
            "--resume.",
        )


def refuse_idle_start(file: Path, before: int, now: int, what: str, remedy: str) -> None:
    """The same for work in pieces, by one process: `before` and `now` count the finished ones.

    Args:
        file: keeps the count of starts.
        what: a piece, such as "a shard".

    Raises:
        UserError: it is the third start in a row that finished none.
    """
    if _count(file, before, now) >= MAX_STARTS:
        raise UserError(f"{MAX_STARTS} starts in a row were asked to stop before they had finished {what}.", remedy)


def _count(file: Path, first: int, step: int) -> int:
    """Starts in a row without a step, this one included; kept in `file`, whose errors do not decide anything."""
    count = 0
    if step == first:
        with suppress(OSError, ValueError):
            at, before = map(int, file.read_text().split())
            count = before if at == step else 0
        count += 1
    with suppress(OSError):
        if 0 < count < MAX_STARTS:
            replace_text(file, f"{step} {count}\n")
        else:
            file.unlink(missing_ok=True)
    return count
