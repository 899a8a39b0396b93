"""Print answers and calibrations as tables."""

WANTED = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)  # precisions in the table of a calibration


def print_answer(answer: dict) -> None:
    """Print the answer as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from probemb.reports.text import printable
    from tools.search.scoring import SCORES

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    query = answer["query"]
    line = f"uncertainty of the query: {query['uncertainty']:.4g}"
    if len(query["parts"]) > 1:
        line += f" (its parts: {', '.join(format(part['uncertainty'], '.4g') for part in query['parts'])})"
    if answer["weight"] != 1:
        line += f"; ranked with the variances of the items times {answer['weight']:g}"
    console.print(line, highlight=False)
    if query["unknown_words"]:
        words = ", ".join(escape(printable(word)) for word in query["unknown_words"])
        console.print(f"the model does not know: {words}; the uncertainty says nothing about that", highlight=False)
    if answer["feasibility"] is not None:
        console.print(answer["feasibility"]["says"], highlight=False)
    score, exceeded = answer["score"], answer["limit"]
    if score["name"] != "u" and score["value"] is not None:
        console.print(f"{score['title']}: {score['value']:.4g} ({SCORES[score['name']][1]})", highlight=False)
        exceeded = score["limit"]
    if answer["refused"]:
        limit = f"refused: that is above {exceeded:.4g}; make the query more specific, or raise the limit"
        console.print(limit, highlight=False, soft_wrap=True)
        return
    if answer["more"]:
        line = f"more {answer['more']} than the query, by inclusion, among the {answer['looked_at']:,} closest"
        console.print(line, highlight=False)
    table = Table()
    for heading in ("rank", "match", "distance", "uncertainty", *(("inclusion",) if answer["more"] else ())):
        table.add_column(heading, justify="right")
    table.add_column("key", overflow="fold")
    table.add_column("caption", overflow="fold")
    for result in answer["results"]:
        match, n = result["match"], answer["gallery"]
        match = "" if match is None else f"{100 * match:.3g} %, {match * n:.3g} x"
        table.add_row(
            str(result["rank"]), match, f"{result['distance']:.4f}", f"{result['uncertainty']:.4g}",
            *((f"{result['inclusion']:.4g}",) if answer["more"] else ()),
            escape(printable(result["key"])), escape(printable((result["captions"] or [""])[0])),
        )  # fmt: skip
    if answer["results"]:
        console.print(table)
        if answer["results"][0]["match"] is not None:
            line = f"match: the probability of an item if exactly one of the {answer['gallery']:,} matches, in percent "
            console.print(f"{line}and as a multiple of the average item's", highlight=False, soft_wrap=True)
    else:
        wanted = f"result that is more {answer['more']}" if answer["more"] else "certain enough result"
        console.print(f"no {wanted} among the {answer['looked_at']:,} closest", highlight=False)


def print_calibration(calibration) -> None:
    """Print what each score gains, and thresholds for some precisions."""
    from rich.console import Console
    from rich.table import Table

    from probemb.metrics import highest_threshold
    from tools.search.scoring import SCORES

    console, title = Console(width=110), SCORES[calibration.score][0]
    gains = Table(title="what refusing by each score gains, 0 at random and 1 at best")
    gains.add_column("score")
    for parts in calibration.tests:
        gains.add_column(f"{parts} {calibration.kind}{'' if parts == 1 else 's'}", justify="right")
    for name in calibration.tests[1]:
        found = (tests[name] for tests in calibration.tests.values())
        gains.add_row(SCORES[name][0], *(f"{t['gain']:+.3f} ± {t['se']:.3f}, {t['verdict']}" for t in found))
    console.print(gains)
    heading = f"queries of {calibration.kind}s against {calibration.gallery:,} items of {calibration.data}, by {title}"
    table = Table(title=heading)
    for heading in ("parts", "queries", "precision of all", "for precision", "refuse above", "answered"):
        table.add_column(heading, justify="right")
    for parts, curve in calibration.curves.items():
        first = (str(parts), f"{curve.queries:,}", f"{curve.precision[-1]:.3f}")
        if calibration.doubt(parts):
            table.add_row(*first, "", "not promised", "")
            continue
        for wanted in WANTED:
            threshold = highest_threshold(curve, wanted)
            if threshold is not None:
                answered = curve.coverage[curve.threshold.index(threshold)]
                table.add_row(*first, f"{wanted:g}", f"{threshold:.4g}", f"{100 * answered:.0f} %")
                first = ("", "", "")
        if first[0]:
            table.add_row(*first, f"{WANTED[0]:g}", "out of reach", "")
    console.print(table)
    for parts in calibration.curves:
        if doubt := calibration.doubt(parts):
            console.print(f"{doubt}: --min-precision is refused for them.", highlight=False, soft_wrap=True)
    if calibration.tolerance is not None:
        print(f"all that fits is found best with the variances of the items times {calibration.tolerance:g} (--fits)")
