"""The table of what each score of a query knows, on the console and on the page of `zeroshot.retrieval`."""

from __future__ import annotations

from probemb.evaluation.predictors import ABOUT

SIDES = {"captions": "text → image", "images": "image → text"}
OUTCOMES = {"ambiguity": "true ambiguity", "accepted_share": "people's yes", "r@1": "R@1"}


def outcomes(found: dict) -> dict[str, str]:
    """The outcomes that are known for some score, key -> heading."""
    rows = [row for side in SIDES for row in found[side]]
    return {key: title for key, title in OUTCOMES.items() if any(row[key] for row in rows)}


def explain(found: dict) -> dict:
    """Values for predictors.html: headings, and the definitions of the scores that the table has."""
    titles = {row["score"]: row["title"] for side in SIDES for row in found[side]}
    return {
        "sides": SIDES,
        "outcomes": outcomes(found),
        "first": first(found),
        "about": {title: ABOUT[name] for name, title in titles.items()},
    }


def print_predictors(found: dict) -> None:
    """One line for each score and direction, and the warning."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=132)
    title = "what each score of a query knows: Spearman, R@1 in percent, gain of refusing (0 at random, 1 at best)"
    table = Table(title=title)
    for heading in ("queries", "score, high if doubtful"):
        table.add_column(heading)
    for heading in (*outcomes(found).values(), "certain half", "the rest", "gain"):
        table.add_column(heading, justify="right")
    for side, direction in SIDES.items():
        for i, row in enumerate(found[side]):
            parts, last = row["halves"], i + 1 == len(found[side])
            halves = [f"{100 * parts[key]:.1f}" for key in ("certain", "rest")] if parts else ["", ""]
            table.add_row(
                "" if i else direction, row["title"], *(estimate(row[key]) for key in outcomes(found)), *halves,
                estimate(row["gain"]), end_section=last,
            )  # fmt: skip
    console.print(table)
    console.print(f"match probability: {found['match_probability']}{first(found)}", highlight=False, soft_wrap=True)
    if found["warning"]:
        console.print(found["warning"], highlight=False, soft_wrap=True, markup=False)


def first(found: dict) -> str:
    """A sentence on the predicted and the actual share of closest images that match; "" without a match probability."""
    one = found["match_of_first"]
    if one is None:
        return ""
    return (
        f"; if exactly one image of the gallery matches, a caption's closest image does with a mean probability of "
        f"{one['mean']:.1%}, and {one['right']:.1%} are right"
    )


def estimate(value: dict | None) -> str:
    """A value with its standard error; "" for None."""
    return f"{value['value']:+.3f}±{value['se']:.3f}" if value else ""
