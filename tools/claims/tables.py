"""Claims as text: for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def text_tables(claims: Sequence[dict]) -> list[str]:
    """Lines for a terminal."""
    lines = []
    for claim in claims:
        lines += ["", claim["title"], f"  {claim['claim']}"]
        table = [claim["head"], *claim["rows"]]
        widths = [max(len(row[i]) for row in table) for i in range(len(claim["head"]))]
        for row in table:
            cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in
                     enumerate(zip(row, widths))]  # fmt: skip
            lines.append("    " + "  ".join(cells).rstrip())
        lines += [f"  {one['verdict']:<17}  {one['what']}: {one['text']}" for one in claim["comparisons"]]
        lines += [f"  {note}" for note in claim["notes"]]
    return lines


def markdown_tables(claims: Sequence[dict]) -> list[str]:
    """Lines of Markdown."""
    lines = []
    for claim in claims:
        lines += [f"### {claim['title']}", f"Claim: {claim['claim']}", ""]
        lines += ["| " + " | ".join(claim["head"]) + " |", "|---" + "|---:" * (len(claim["head"]) - 1) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in claim["rows"]]
        lines += ["", *(f"- {one['verdict']}: {one['what']}, {one['text']}" for one in claim["comparisons"])]
        lines += ["", *(f"{note}" for note in claim["notes"]), ""]
    return lines[:-1]
