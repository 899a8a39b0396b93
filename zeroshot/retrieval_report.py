"""The report of `zeroshot.retrieval`: one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.data.failures import BadSample
from probemb.evaluation.rankings import TITLES
from probemb.files import replace_text
from probemb.reports.charts import (
    BLUE,
    GREY,
    ORANGE,
    Cloud,
    Curve,
    curves_chart,
    escape,
    line_chart,
    number,
    scatter_chart,
)
from probemb.reports.page import correlation, html_page, percent, signed, thumbnail
from zeroshot.config import RETRIEVAL_GENERATOR

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.data.captions.find import CaptionDataset
    from probemb.evaluation.embed_pairs import EmbeddedPairs

METRICS = {"r@1": "R@1", "r@5": "R@5", "r@10": "R@10", "r_precision": "R-P", "map_at_r": "mAP@R"}
SHOWN = "own captions: R@1"  # the metric of bins and curves that are drawn; the table has all
STYLE = """
td.left,th.left{text-align:left}td.how{color:#5d6875;font-size:.84rem;white-space:normal}
table.numbers td{padding:5px 10px}table.numbers th:last-child,table.numbers td:last-child{text-align:right}
table.numbers tr.new td{border-top:2px solid #d5dae1}
.examples{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:14px;margin:10px 0}
.examples figure{margin:0;min-width:0}.examples img{height:104px;max-width:100%;object-fit:cover;border-radius:6px;
border:3px solid #c9d0d8;display:block}.examples img.right{border-color:#4b9a6b}
.examples img.wrong{border-color:#cf7a5f}
.examples figcaption{font-size:.84rem;color:#5d6875;overflow-wrap:anywhere;margin-top:4px}
ul.captions{list-style:none;margin:6px 0;padding:0}
ul.captions li{display:grid;grid-template-columns:1fr 64px;gap:10px;font-size:.92rem;padding:3px 0 3px 10px;
border-left:3px solid #c9d0d8;margin-bottom:4px;overflow-wrap:anywhere}
ul.captions li.right{border-color:#4b9a6b}ul.captions li.wrong{border-color:#cf7a5f}
ul.captions code{font:inherit;font-size:.84rem;color:#5d6875;text-align:right}
.plane{max-width:680px}
@media(max-width:560px){table.numbers td:last-child,table.numbers th:last-child{display:table-cell}}
"""


def write_report(
    file: Path, results: dict, pairs: EmbeddedPairs, captions: CaptionDataset, per_query: dict[str, dict[str, Tensor]]
) -> None:
    """Write the page; `results` is what results.json holds."""
    replace_text(file, page(results, pairs, captions, per_query))


def page(results: dict, pairs: EmbeddedPairs, captions: CaptionDataset, per_query: dict[str, dict[str, Tensor]]) -> str:
    """The whole page as HTML text."""
    config, found = results["config"], results["uncertainty"]
    of = f" ({escape(config['split'])})" if config["split"] else ""
    body = [
        f"<h1>Image-text retrieval{' and uncertainty' if found else ''}</h1>",
        f'<p class="lead">{escape(" and ".join(results["models"]))} on {escape(config["data"])}{of}: '
        f"{results['images']:,} images, {results['captions']:,} captions"
        f"{'; similarities are the means of both models' if len(results['models']) > 1 else ''}</p>",
        _tiles(results["rows"]),
        _table(results["rows"], len(results["images_left_out"])),
    ]
    if found:
        body += [
            _bins(found["quality"]),
            _rejection(found["quality"]),
            _correlations(found["quality"], found.get("ambiguity_spearman")),
            _erased(found.get("erased")),
        ]
    body.append(_projection(results["projection"], captions, pairs, sized=bool(found)))
    if found:
        body.append(_examples(found["extremes"], pairs, captions, per_query))
    body.append(_method(uncertainty=bool(found)))
    return html_page(f"Retrieval: {Path(str(config['model'])).name}", "".join(body), RETRIEVAL_GENERATOR, STYLE)


def _tiles(rows: Sequence[dict]) -> str:
    first = rows[0]
    tiles = [
        (percent(first["i2t"]["r@1"]), "image → text", "R@1, %"),
        (percent(first["t2i"]["r@1"]), "text → image", "R@1, %"),
        (f"{first['rsum']:.1f}", "both directions", "RSUM, of 600"),
    ]
    for row in rows:
        if row["positives"] in ("COCO 1K", "ECCV Caption", "all true captions") and row["ranking"] == first["ranking"]:
            if row["positives"] == "COCO 1K":
                tiles.append((f"{row['rsum']:.1f}", "COCO 1K", "RSUM, of 600"))
            else:
                value = (row["i2t"]["map_at_r"] + row["t2i"]["map_at_r"]) / 2
                tiles.append((percent(value), row["positives"], "mAP@R, mean of both, %"))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><span>{escape(title)}</span><b>{value}</b><span>{unit}</span></div>'
            for value, title, unit in tiles
        )
        + "</div>"
    )


def _table(rows: Sequence[dict], n_bad: int) -> str:
    kinds = list(dict.fromkeys(row["positives"] for row in rows))
    parts = []
    for kind in kinds:
        body = []
        for row in (row for row in rows if row["positives"] == kind):
            for way, title in (("i2t", "image → text"), ("t2i", "text → image")):
                cells = "".join(f"<td>{percent(row[way][m]) if m in row[way] else ''}</td>" for m in METRICS)
                total = f"{row['rsum']:.1f}" if way == "t2i" and "rsum" in row else ""
                cost = f"{row['ms_per_query']:.3g}" if way == "t2i" else ""
                name = (TITLES[row["ranking"]], row["how"])
                new = ' class="new"' if way == "i2t" and body else ""
                body.append(
                    f'<tr{new}><td title="{escape(name[1])}">{escape(name[0]) if way == "i2t" else ""}</td>'
                    f'<td class="left">{title}</td>{cells}<td>{total}</td><td>{cost}</td></tr>'
                )
        heads = "".join(f"<th>{title}</th>" for title in METRICS.values())
        parts.append(
            f'<h4>Positives: {escape(kind)}</h4><div class="scroll"><table class="numbers"><thead><tr>'
            f'<th>ranked by</th><th class="left">direction</th>{heads}<th>RSUM</th><th>ms/query</th></tr></thead>'
            f"<tbody>{''.join(body)}</tbody></table></div>"
        )
    how = {row["ranking"]: row["how"] for row in rows}
    legend = "; ".join(f"<b>{escape(TITLES[name])}</b>: {escape(text)}" for name, text in how.items())
    bad = f" {n_bad} images could not be read and are left out." if n_bad else ""
    return (
        '<section><h2>Rankings</h2><p class="fine">In percent, but for RSUM. Time is that of ranking everything in '
        f"both directions, without building indexes, divided by the number of queries.{bad}</p>{''.join(parts)}"
        f'<p class="fine">{legend}.</p></section>'
    )


def _pair(charts: Sequence[str]) -> str:
    return f'<div class="pair">{"".join(charts)}</div>'


def _titled(title: str, chart: str, below: str = "") -> str:
    fine = f'<p class="fine">{below}</p>' if below else ""
    return f'<div><h4>{title}</h4><div class="scroll">{chart}</div>{fine}</div>'


SIDE_TITLES = {"images": "Images as queries", "captions": "Captions as queries"}


def _bins(quality: dict) -> str:
    charts = []
    for side, metrics in quality.items():
        bins = metrics[SHOWN]["bins"]
        if not bins:
            continue
        ys = [100 * y for y in bins["accuracy"]]
        notes = [
            f"{count} {side}, mean uncertainty {number(x)}: {y:.2f} %"
            for count, x, y in zip(bins["counts"], bins["uncertainty"], ys)
        ]
        chart = line_chart(
            bins["uncertainty"], ys, x_label=f"uncertainty of the {side}", y_label="R@1, %", points=True, notes=notes
        )
        charts.append(_titled(SIDE_TITLES[side], chart, correlation(bins)))
    if not charts:
        return ""
    return (
        "<section><h2>Uncertainty against recall</h2><p>Ten bins of equal count, from certain to uncertain queries. "
        f"Where uncertainty is informative, recall falls to the right.</p>{_pair(charts)}</section>"
    )


def _rejection(quality: dict) -> str:
    charts = []
    for side, metrics in quality.items():
        curve = metrics[SHOWN]["rejection"]
        if not curve:
            continue
        xs, ys = [100 * x for x in curve["refused"]], [100 * y for y in curve["score"]]
        lines = [
            Curve("uncertainty", xs, ys, BLUE),
            Curve("random", xs, [100 * curve["random"]] * len(xs), GREY, dashed=True),
        ]
        chart = curves_chart(lines, x_label="most uncertain queries refused, %", y_label="R@1 of the others, %")
        below = (
            f"Area under the curve {curve['area']:.3f}; at random {curve['random']:.3f}, at best {curve['oracle']:.3f}."
        )
        charts.append(_titled(SIDE_TITLES[side], chart, below))
    if not charts:
        return ""
    return (
        "<section><h2>Refusing the most uncertain queries</h2><p>What recall the other queries have. At best means "
        f"that wrong answers were refused first.</p>{_pair(charts)}</section>"
    )


def _correlations(quality: dict, ambiguity: float | None) -> str:
    body = []
    for side, metrics in quality.items():
        for i, (name, both) in enumerate(metrics.items()):
            if not both["bins"]:
                continue
            bins, curve = both["bins"], both["rejection"]
            values = [signed(bins["pearson"]), signed(bins["spearman"])]
            values += [f"{curve[key]:.3f}" for key in ("area", "random", "oracle")]
            cells = "".join(f"<td>{value}</td>" for value in values)
            new = ' class="new"' if i == 0 and body else ""
            body.append(f'<tr{new}><td>{side}</td><td class="left">{escape(name)}</td>{cells}</tr>')
    told = ""
    if ambiguity is not None:
        told = (
            "<p>Uncertainty of captions against their true ambiguity, the share of all images that a caption fits: "
            f"Spearman <b>{signed(ambiguity)}</b>.</p>"
        )
    return (
        f"<section><h2>Uncertainty against every metric</h2>{told}"
        '<div class="scroll"><table class="numbers"><thead><tr><th>queries</th><th class="left">metric</th>'
        "<th>Pearson, bins</th><th>Spearman, items</th><th>rejection area</th><th>at random</th><th>at best</th></tr>"
        f"</thead><tbody>{''.join(body)}</tbody></table></div></section>"
    )


def _erased(erased: dict | None) -> str:
    if not erased:
        return ""
    charts = []
    for what, title in (("pixels", "Images, a grey square over them"), ("words", "Captions, words left out")):
        values = erased[what]
        chart = line_chart(
            [100 * share for share in values["shares"]], values["uncertainty"], x_label=f"erased {what}, %",
            y_label="mean uncertainty", points=True,
        )  # fmt: skip
        below = f"{values['items']:,} items; Spearman {signed(values['spearman'])} over single items."
        charts.append(_titled(title, chart, below))
    return (
        "<section><h2>Uncertainty against what is erased</h2><p>Less to see or to read should mean more uncertainty."
        f"</p>{_pair(charts)}</section>"
    )


def _projection(found: dict, captions: CaptionDataset, pairs: EmbeddedPairs, sized: bool) -> str:
    texts = [text for i in pairs.kept for text in captions.captions[i]]
    every = [float(u) for side in ("images", "captions") for u in found[side]["uncertainty"]]
    low, high = min(every), max(every)
    clouds = []
    for side, colour in (("captions", ORANGE), ("images", BLUE)):
        part = found[side]
        points = []
        for row, x, y, u in zip(*(part[key].tolist() for key in ("rows", "x", "y", "uncertainty"))):
            told = texts[row] if side == "captions" else captions.images.places[pairs.kept[row]].name
            size, about = (3 + 5 * (u - low) / ((high - low) or 1), f": u = {number(u)}") if sized else (4, "")
            points.append((x, y, size, f"{told[:120]}{about}"))
        clouds.append(Cloud(side, points, colour))
    chart = scatter_chart(clouds, x_label="first direction", y_label="")
    return (
        f"<section><h2>Means in a plane</h2><p>{escape(found['method'])} of {len(clouds[1].points)} images and their "
        f"captions.{' A larger dot is more uncertain.' if sized else ''}</p>"
        f'<div class="scroll plane">{chart}</div></section>'
    )


def _examples(
    extremes: dict, pairs: EmbeddedPairs, captions: CaptionDataset, per_query: dict[str, dict[str, Tensor]]
) -> str:
    texts = [text for i in pairs.kept for text in captions.captions[i]]
    parts = []
    for which, title in (("most", "Most uncertain"), ("least", "Least uncertain")):
        u, right = pairs.images.uncertainty(), per_query["images"][SHOWN]
        figures = []
        for row in extremes["images"][which]:
            try:
                picture = captions.images.open(pairs.kept[row])
            except BadSample:  # readable a moment ago: the file has changed since
                continue
            verdict = "right" if bool(right[row]) else "wrong"
            name = captions.images.places[pairs.kept[row]].name
            figures.append(
                f"<figure>{thumbnail(picture, f'{name}: {verdict}', verdict)}<figcaption>u = {float(u[row]):#.4g}. "
                f"{escape(captions.captions[pairs.kept[row]][0])}</figcaption></figure>"
            )
        parts.append(f'<h4>{title} images</h4><div class="examples">{"".join(figures)}</div>')
    columns = []
    for which, title in (("most", "Most uncertain captions"), ("least", "Least uncertain captions")):
        u, right = pairs.texts.uncertainty(), per_query["captions"][SHOWN]
        items = "".join(
            f'<li class="{"right" if bool(right[row]) else "wrong"}"><span>{escape(texts[row])}</span>'
            f"<code>{float(u[row]):#.4g}</code></li>"
            for row in extremes["captions"][which]
        )
        columns.append(f'<div><h4>{title}</h4><ul class="captions">{items}</ul></div>')
    return (
        "<section><h2>Most and least uncertain</h2><p>Green: the first answer is right, red: it is not. Below an image "
        f"stands its first caption, as the data has it.</p>{''.join(parts)}{_pair(columns)}</section>"
    )


def _method(uncertainty: bool) -> str:
    told = (
        " u is the sum of an item's variances. Findings about uncertainty use the first ranking. The rejection area is "
        "the mean over every possible number of refused queries."
    )
    return (
        "<section><h2>How this was computed</h2><p><b>R@k</b>: share of queries "
        "with a match among the first k. <b>R-P</b>: share of matches among the first R, R the query's number of "
        "matches; under CxC it is RPC². <b>mAP@R</b>: mean over the first R ranks of the precision at each match. "
        "<b>RSUM</b>: R@1, R@5 and R@10 of both directions added up. COCO 1K is the mean of five folds. Plausible "
        "matches share their object labels but for 0, 1 or 2 (mean of the three); the variant pcme drops unlabelled "
        f"items from the rankings, eccv-caption keeps them.{told if uncertainty else ''}</p></section>"
    )
