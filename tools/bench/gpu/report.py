"""The outcomes as lines and as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tools.bench.gpu.running import Outcome


def tell(outcome: Outcome) -> None:
    """One line, as soon as a check has ended."""
    print(f"{outcome.name:<12} {outcome.ended:<8} {outcome.seconds:6.1f} s", flush=True)
    if not outcome.fine and outcome.output:
        print("\n".join(f"    {line}" for line in outcome.output.splitlines()), flush=True)


def show(outcomes: list[Outcome], about: dict) -> None:
    """The table, and what the checks found."""
    title = f"GPU check on {about['machine']}, {about['started']}{', reduced' * about['small']}"
    table = Table(title=title, title_justify="left")
    for name in ("check", "ended", "s", "found"):
        table.add_column(name, justify="right" if name == "s" else "left")
    for outcome in outcomes:
        table.add_row(outcome.name, outcome.ended, f"{outcome.seconds:.0f}", "\n".join(findings(outcome)))
    Console(width=None if Console().is_terminal else 160, soft_wrap=False, markup=False).print(table)
    passed = sum(outcome.fine for outcome in outcomes)
    print(f"{passed} of {len(outcomes)} in {about['seconds']:.0f} s")


def findings(outcome: Outcome) -> list[str]:
    """A check's values, what did not hold, and what was left out."""
    notes = outcome.notes
    lines = [f"{name}: {_plain(value)}" for name, value in notes.values.items()]
    lines += [f"NOT TRUE: {sentence}" for sentence, held in notes.claims if not held]
    return lines + [f"left out{f' {part}' if part else ''}: {reason}" for part, reason in notes.skipped.items()]


def _plain(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)
