"""The plots of the page: lengths of queries, feasibility, and uncertainty against quality."""

from __future__ import annotations

from collections.abc import Sequence

from probemb.data.compositions.queries import KINDS
from probemb.reports.figures import BLUE, GOLD, GREEN, GREY, INK, ORANGE, PURPLE, Chart
from tools.claims.composed.findings import RIVALS, auc, average, of_kind, papers_score
from tools.claims.composed.variants import VARIANTS
from tools.claims.verdicts import Found

COLOURS = dict(zip(("mpc", *RIVALS), (BLUE, ORANGE, GREEN, PURPLE, GREY, GOLD)))


def charts(found: Found, claims: list[dict], variants: Sequence[str]) -> list[list[Chart]]:
    """Lengths for Fig. 4, bins of uncertainty for the last table; none for the others."""
    of = {"5.": _length_charts, "6.": _feasible_chart, "8.": _bins_chart}
    names = [name for name in COLOURS if name in variants and found.has(name)]
    return [of[one["title"][:2]](found, names) if one["title"][:2] in of else [] for one in claims]


def _length_charts(found: Found, names: Sequence[str]) -> list[Chart]:
    drawn = []
    for kind in KINDS:
        chart = Chart(f"lengths-{kind}", x_label=f"parts of a query ({kind})", y_label="R@10, %")
        for name in names:
            means = [found.of(name, of_kind(f"seen {k}", kind, "r@10")) for k in (2, 3, 4)]
            if None not in means:
                chart.line(
                    [2, 3, 4], [100 * one.mean for one in means], VARIANTS[name].title, COLOURS[name], points=True
                )
        drawn.append(chart)
    return drawn  # fmt: skip


def _feasible_chart(found: Found, names: Sequence[str]) -> list[Chart]:
    """A point for every seed."""
    chart = Chart("feasible", x_label="R-P of unseen pairs, % (a point is a seed)", y_label="AUC of the paper's score")
    for name in names:
        points = [
            (100 * x, y, 4, f"{VARIANTS[name].title}, seed {i}")
            for i, one in enumerate(found.all(name))
            if (x := average("unseen 2", "r_precision")(one)) is not None
            and (y := auc(papers_score(name))(one)) is not None
        ]
        if points:
            chart.cloud(points, VARIANTS[name].title, COLOURS[name], "o")
    return [chart]


def _bins_chart(found: Found, names: Sequence[str]) -> list[Chart]:
    chart = Chart("bins", x_label="bin, from certain to uncertain", y_label="R-Precision of seen pairs, %")
    shades = {"mpc": BLUE, "pcme-addition": ORANGE, "mpc-mlp": INK}
    for name, colour in shades.items():
        held = [one["bins"]["accuracy"] for one in found.all(name)] if found.has(name) else []
        if held and all(len(one) == len(held[0]) for one in held):
            means = [100 * sum(column) / len(column) for column in zip(*held)]
            chart.line(list(range(1, len(means) + 1)), means, VARIANTS[name].title, colour, points=True)
    return [chart]
