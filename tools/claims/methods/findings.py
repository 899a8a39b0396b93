"""From the results of all methods to tables, verdicts and charts: plain numbers, nothing is trained here."""

from __future__ import annotations

from collections.abc import Sequence

from probemb.evaluation.benchmarks import OWN, TRUE
from probemb.reports.figures import BLUE, GOLD, GREEN, GREY, INK, ORANGE, PURPLE, Chart
from tools.claims.methods.variants import PAPERS, VARIANTS
from tools.claims.verdicts import Found, Get, Value, cell, compare

COLOURS = dict(zip(PAPERS, (BLUE, ORANGE, GREEN, PURPLE), strict=True))
MARKERS = dict(zip(PAPERS, "osD^", strict=True))
# What each paper says: better variant, worse variant. In place of VSE++, which takes the hardest negatives from its
# first step on and hardly learns from random weights in a few epochs, stands "vse": the same loss after an epoch with
# all negatives, as all others with the hardest ones begin.
SAYS: dict[str, list[tuple[str, str]]] = {
    "pcmepp": [("pcmepp", "infonce"), ("pcmepp", "vse"), ("pcmepp", "pcme"), ("pcmepp", "pcmepp-mu"),
               ("pcmepp-clip", "infonce"), ("pcmepp-clip", "vse"), ("pcmepp-clip", "pcme"),
               ("pcmepp-clip", "pcmepp-mu clip")],
    "pcme": [("vse", "vse0"), ("pcme", "vse0"), ("pcme", "vse"), ("pcme", "pvse K=1"), ("pcme", "pvse K=2"),
             ("pcme", "pvse K=4"), ("pvse K=2", "pvse K=1")],
    "prob": [("prob-vsepp", "vse"), ("prob-vsepp min-KL", "vse"), ("prob-vsepp", "prob-vsepp KL"),
             ("prob-vsrn", "vsrn")],
    "jwae": [("jwae-mse", "mse"), ("jwae-mse", "mmd-mse"), ("jwae-mh", "vse"), ("jwae-mh", "vae-mh"),
             ("scan t2i", "vse"), ("jwae-scan", "scan t2i")],
}  # fmt: skip


def extract(results: dict) -> dict:
    """The numbers of a results.json: positives -> metrics under the method's own ranking, and the uncertainty."""
    first = results["rows"][0]["ranking"]
    found: dict = {"ranking": first, "retrieval": {}, "ms_per_query": {}}
    for row in results["rows"]:
        if row["ranking"] == first:
            found["retrieval"][row["positives"]] = {way: row[way] for way in ("i2t", "t2i", "rsum")}
        found["ms_per_query"][row["ranking"]] = row["ms_per_query"]
    judged = results["judgements"] or {"rows": [], "acceptance": None}
    for row in judged["rows"]:
        if row["ranking"] == first:
            found["average_precision"] = row["average_precision"]["value"]
    if judged["acceptance"]:
        found["acceptance"] = judged["acceptance"]["spearman"]["value"]
    if results["uncertainty"]:
        if "ambiguity_spearman" in results["uncertainty"]:
            found["ambiguity"] = results["uncertainty"]["ambiguity_spearman"]
        for side, key in (("images", "u_i2t"), ("captions", "u_t2i")):
            bins = results["uncertainty"]["quality"][side][f"{OWN}: R@1"]["bins"]
            found[key] = bins and bins["spearman"]
    return found


def _own(way: str, metric: str, positives: str = OWN) -> Get:
    return lambda one: one["retrieval"][positives][way][metric] if positives in one["retrieval"] else None


def _rsum(one: dict) -> float:
    return one["retrieval"][OWN]["rsum"]


def _step(one: dict) -> float | None:
    return None if one["step"] is None else 1000 * one["step"]


def judge(found: Found, variants: Sequence[str]) -> list[dict]:
    """A table of all variants, then what each paper says."""
    there = [name for name in variants if found.has(name)]
    exact = any(TRUE in one["retrieval"] for name in there for one in found.all(name))
    return [
        _table(found, there, exact),
        *(_paper(found, paper, there, exact) for paper in PAPERS if _of(paper, there)),
    ]


def _of(paper: str, there: Sequence[str]) -> list[tuple[str, str]]:
    return [pair for pair in SAYS[paper] if set(pair) <= set(there)]


def _columns(exact: bool) -> list[tuple[str, Get, float, int, str]]:
    columns: list[tuple[str, Get, float, int, str]] = [
        ("RSUM", _rsum, 1.0, 1, ""),
        ("R@1 i→t", _own("i2t", "r@1"), 100.0, 1, ""),
        ("R@1 t→i", _own("t2i", "r@1"), 100.0, 1, ""),
    ]
    if exact:
        columns += [(f"mAP@R {arrow}", _own(way, "map_at_r", TRUE), 100.0, 1, "")
                    for way, arrow in (("i2t", "i→t"), ("t2i", "t→i"))]  # fmt: skip
        columns.append(("u and ambiguity", lambda one: one.get("ambiguity"), 1.0, 2, "+"))
    else:
        columns += [
            ("AP of judged pairs", lambda one: one.get("average_precision"), 1.0, 3, ""),
            ("u and acceptance", lambda one: one.get("acceptance"), 1.0, 2, "+"),
        ]
    columns += [
        ("u and R@1 i→t", lambda one: one.get("u_i2t"), 1.0, 2, "+"),
        ("u and R@1 t→i", lambda one: one.get("u_t2i"), 1.0, 2, "+"),
        ("ms a step", _step, 1.0, 0, ""),
    ]
    return columns


def _cell(one: Value | None, factor: float, digits: int, sign: str) -> str:
    return "–" if one is None else cell(one, factor, digits, sign)


def _table(found: Found, there: Sequence[str], exact: bool) -> dict:
    columns = _columns(exact)
    ordered = sorted(there, key=lambda name: list(PAPERS).index(VARIANTS[name].paper))
    rows = [
        [VARIANTS[name].title, *(_cell(found.of(name, get), *form) for _, get, *form in columns)] for name in ordered
    ]
    return {
        "title": "1. All methods",
        "claim": "The papers' retrieval methods, trained alike and ranked by their own similarity.",
        "head": ["method", *(column[0] for column in columns)],
        "rows": rows,
        "comparisons": [],
        "notes": [
            "Test images. Retrieval in percent, RSUM the sum of recall at 1, 5 and 10 of own captions in both "
            "directions. u and R@1: Spearman over single queries of u with a hit, below 0 where uncertain ones fail. "
            "A step's time is the run's own log, beside other trainings. VSE∞ is VSE++ after an epoch with all "
            "negatives, as all others with the hardest ones begin here (VSRN after two), and what the claims below "
            "mean by VSE++; the row VSE++ has the hardest ones from its first step. The match loss by CSD is PCME++ "
            "without pseudo-positives and mixed images, from a = b = 13. "
            + (
                "What reads pixels starts from towers that the CLIP loss alone has trained, both forms of VSRN, which "
                "read regions, from random weights, so that they compare with each other alone."
                if exact
                else "Towers with random weights then hardly learn."
            )
        ],
    }


def _paper(found: Found, paper: str, there: Sequence[str], exact: bool) -> dict:
    metrics: list[tuple[str, Get, float, str]] = [("RSUM", _rsum, 1.0, "points")]
    if exact:
        metrics += [(f"mAP@R {arrow}", _own(way, "map_at_r", TRUE), 100.0, "points")
                    for way, arrow in (("i2t", "i→t"), ("t2i", "t→i"))]  # fmt: skip
    else:
        metrics.append(("AP of judged pairs", lambda one: one.get("average_precision"), 100.0, "points"))
    pairs = _of(paper, there)
    comparisons, rows = [], []
    for better, worse in pairs:
        title = f"{VARIANTS[better].title} over {VARIANTS[worse].title}"
        told = [compare(f"{label}: {title}", found.of(better, get), found.of(worse, get), unit, factor)
                for label, get, factor, unit in metrics]  # fmt: skip
        comparisons += told
        rows.append([title, *(one["text"] for one in told)])
    return {
        "title": f"{list(PAPERS).index(paper) + 2}. {PAPERS[paper]}",
        "claim": "; ".join(f"{VARIANTS[a].title} is ahead of {VARIANTS[b].title}" for a, b in pairs) + ".",
        "head": ["comparison", *(label for label, *_ in metrics)],
        "rows": rows,
        "comparisons": comparisons,
        "notes": [],
    }


def charts(found: Found, claims: list[dict], variants: Sequence[str]) -> list[list[Chart]]:
    """All methods by both recalls, and their validation; the papers' comparisons have none."""
    there = [name for name in variants if found.has(name)]
    recall = Chart("recall", x_label="R@1 image to text, % (a point is a seed)", y_label="R@1 text to image, %")
    for paper, title in PAPERS.items():
        points = [
            (100 * _own("i2t", "r@1")(one), 100 * _own("t2i", "r@1")(one), 4, f"{VARIANTS[name].title}, seed {i}")
            for name in there
            if VARIANTS[name].paper == paper
            for i, one in enumerate(found.all(name))
        ]
        if points:
            recall.cloud(points, title, COLOURS[paper], MARKERS[paper])
    validation = Chart("validation", x_label="epoch", y_label="validation RSUM, mean of the seeds")
    shades = (BLUE, ORANGE, GREEN, PURPLE, GREY, GOLD, INK)
    best = sorted(there, key=lambda name: -found.of(name, lambda one: max(one["validation"])).mean)[: len(shades)]
    for name, colour in zip(best, shades):
        curves = list(zip(*(one["validation"] for one in found.all(name))))
        means = [sum(column) / len(column) for column in curves]
        validation.line(list(range(1, len(means) + 1)), means, VARIANTS[name].title, colour)
    return [[recall, validation], *([] for _ in claims[1:])]
