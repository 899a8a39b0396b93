"""Judgements of people on the console and as charts of the page."""

from __future__ import annotations

from probemb.evaluation.rankings import TITLES
from probemb.reports.figures import BLUE, GREY, ORANGE, Chart
from probemb.reports.text import between

HEADINGS = {"average_precision": "AP", "roc_auc": "ROC AUC", "average_precision_halves": "AP, mean of halves"}
DRAWN = 20  # pairs of a bin that is drawn; the share of fewer says little
CALIBRATED = {"raw": "the model's own", "refitted": "refitted"}


def print_judgements(found: dict) -> None:
    """Tables of every ranking and of the comparison, and lines on calibration and acceptance."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=132)
    title = (
        f"people's judgements, {found['pairs']:,} pairs that are not the caption's own image, "
        f"{found['accepted']:,} accepted; intervals of 95 %"
    )
    versus = f"AP − that of {TITLES[found['reference']]}"
    rows = {row["ranking"]: row for row in found["rows"]}
    against = {name: row["difference"] for name, row in rows.items()}
    titles = {name: row["title"] for name, row in rows.items()}
    console.print(_table(title, titles, rows, against, versus))
    if found["compared"]:
        reference = found["compared"]["reference"]
        others = {name: row[reference] for name, row in found["compared"]["differences"].items()}
        title = f"difference from {' and '.join(found['compared']['models'])} by {TITLES[reference]}"
        console.print(_table(title, titles, others))
    print("\n".join(describe(found)))


def _table(title: str, titles: dict[str, str], rows: dict[str, dict], against: dict | None = None, versus: str = ""):
    from rich.table import Table

    table = Table(title=title)
    table.add_column("ranked by")
    for heading in HEADINGS.values():
        table.add_column(heading, justify="right")
    if against:
        table.add_column(versus, justify="right")
    for name, row in rows.items():
        cells = [between(row.get(metric), signed=against is None) for metric in HEADINGS]
        if against:
            cells.append(between(against[name].get("average_precision_halves"), signed=True))
        table.add_row(titles[name], *cells)
    return table


def describe(found: dict) -> list[str]:
    """Results that are not in the table, as lines of text."""
    lines = [f"{found['not_in_the_data']:,} judged pairs are not in the data"] if found["not_in_the_data"] else []
    if tolerance := found["tolerance"]:
        chosen = "; ".join(
            f"captions {one['i2t']:g}, images {one['t2i']:g} on {one['images']} images" for one in tolerance["chosen"]
        )
        best = tolerance["oracle"]["best"]
        lines.append(f"tolerance, cross-fitted: weights of u, chosen by AP on the other half of the images: {chosen}")
        lines.append(
            f"tolerance, an oracle: AP {best['average_precision']:.3f} over all pairs with weights chosen on them: "
            f"captions {best['i2t']:g}, images {best['t2i']:g}"
        )
    for name, both in (found["calibration"] or {}).items():
        if name == "constant":
            lines.append(f"the mean share of yes, {both['share']:.3f}, for every pair: Brier score {both['brier']:.4f}")
            continue
        parts = [f"{CALIBRATED[key]} ECE {both[key]['ece']:.4f}, Brier score {both[key]['brier']:.4f}"
                 for key in CALIBRATED if both[key]]  # fmt: skip
        lines.append(f"match probability ({name}) against the share of yes: {'; '.join(parts)}")
    if acceptance := found["acceptance"]:
        lines.append(
            f"uncertainty of captions against the share of their judged images that people accept: Spearman "
            f"{between(acceptance['spearman'], signed=True)} over {acceptance['captions']:,} captions"
        )
    return lines


def reliability_charts(calibration: dict) -> list[tuple[str, Chart, dict]]:
    """For each kind of match probability its title, chart and numbers."""
    charts = []
    for name, both in calibration.items():
        if name == "constant":
            continue
        chart = Chart(
            f"reliability-{name.replace(' ', '-')}", x_label="match probability", y_label="share of people who say yes"
        )
        chart.line([0, 1], [0, 1], "calibrated", GREY, dashed=True)
        for key, colour in (("raw", BLUE), ("refitted", ORANGE)):
            if both[key]:
                columns = (both[key][column] for column in ("predicted", "observed", "counts"))
                bins = [row for row in zip(*columns) if row[2] >= DRAWN]
                if not bins:
                    continue
                xs, ys, counts = zip(*bins)
                notes = [f"{CALIBRATED[key]}: {n:,} pairs, predicted {x:.3f}, observed {y:.3f}" for x, y, n in
                         zip(xs, ys, counts)]  # fmt: skip
                chart.line(xs, ys, CALIBRATED[key], colour, points=True, notes=notes)
        charts.append((name, chart, both))
    return charts


def section(found: dict) -> dict:
    """Values of the template judgements.html."""
    return {
        "found": found,
        "headings": HEADINGS,
        "drawn": DRAWN,
        "titles": {row["ranking"]: row["title"] for row in found["rows"]},
        "charts": reliability_charts(found["calibration"] or {}),
        "lines": describe(found),
    }
