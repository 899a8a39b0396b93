"""From the trainings to tables and verdicts on the variance: plain numbers, nothing is trained or drawn here."""

from __future__ import annotations

from tools.claims.verdicts import (
    Found,
    Get,
    cell,
    compare,
    sign_of,
    table,
    value,
)

NAMES = {
    "start": "before finetuning: CLIP + match",
    "recipe": "CLIP + match",
    "recipe frozen": "CLIP + match, variance heads frozen",
    "recipe with PP": "CLIP + match + PP",
    "recipe all true": "CLIP + match, every true match labelled",
    "match": "match",
    "match with PP": "match + PP",
    "all true": "match, every true match labelled",
    "recipe a=5": "CLIP + match, a = b = 5",
    "match a=5": "match, a = b = 5",
    "match with PP a=5": "match + PP, a = b = 5",
    "random match": "from random weights: match",
    "random all true": "from random weights: match, every true match labelled",
}
CLOSELY = ("start", "recipe", "recipe with PP")  # also swept, and ranked in other ways
RANKINGS = {
    "csd": "CSD",
    "mean": "mean",
    "tolerance": "tolerance",
    "inclusion": "inclusion",
    "log-likelihood": "log-likelihood",
}
WAYS = {"i2t": "i→t", "t2i": "t→i"}
KEPT = 0.8  # Spearman's correlation that a finetuning should keep


def spearman(found: dict) -> float | None:
    """Of the captions' u with their true ambiguity."""
    return found["spearman"]


def map_at_r(ranking: str, way: str) -> Get:
    """Of all true matches."""
    return lambda found: found["retrieval"][ranking]["true"][way]["map_at_r"]


def rsum(ranking: str) -> Get:
    """Of the own captions, in percent."""
    return lambda found: found["retrieval"][ranking]["own"]["rsum"]


def weight(way: str) -> Get:
    """The chosen weight of the gallery's u."""
    return lambda found: found["chosen_by"]["tolerance"][way]


def predictor(score: str, key: str, *path: str) -> Get:
    """A number of a row of the captions' predictors."""

    def get(found: dict) -> float | None:
        one = next(row for row in found["predictors"] if row["score"] == score)[key]
        for name in path:
            one = None if one is None else one[name]
        return one

    return get


def judge(found: Found) -> list[dict]:
    """The four claims, each with "title", "claim", "head", "rows", "comparisons" and "notes"."""
    return [_labels(found), _recipe(found), _rankings(found), _predictors(found)]


def _labels(found: Found) -> dict:
    rows = []
    for name, title in NAMES.items():
        halves = (cell(found.of(name, predictor("u", "halves", half))) for half in ("certain", "rest"))
        rows.append([title, cell(found.of(name, spearman), 1, 2, "+"), *halves])
    signs = (("start", 1), ("random match", -1), ("random all true", -1), ("match", -1), ("match with PP", -1),
             ("all true", -1), ("recipe all true", -1))  # fmt: skip
    one, every = (found.of(f"random {name}", spearman) for name in ("match", "all true"))
    return {
        "title": "1. What the variance comes to mean",
        "claim": "With one labelled match u follows a caption's ambiguity, with every true match labelled it runs "
        "against it; the match loss needs the CLIP loss beside it.",
        "head": ["trained with", "u and ambiguity", "R@1 t→i, certain half", "uncertain half"],
        "rows": rows,
        "comparisons": [
            *(
                sign_of(f"u {'follows' if sign > 0 else 'runs against'} ambiguity: {NAMES[name]}",
                        found.of(name, spearman), sign)
                for name, sign in signs
            ),
            compare("u and ambiguity, from random weights: own captions over every true match", one, every, "", 1.0),
            *(
                compare(f"u and ambiguity: {NAMES[a]} over {NAMES[b]}", *(found.of(x, spearman) for x in (a, b)), "", 1)
                for a, b in (("recipe", "recipe with PP"), ("recipe", "match"), ("recipe", "recipe frozen"))
            ),
        ],
        "notes": [
            "Spearman's correlation of the captions' u with the share of all images that they fit. R@1 by CSD, the "
            "caption's own image alone, in percent, of the half of the captions with the smaller u and of the other.",
        ],
    }  # fmt: skip


def _recipe(found: Found) -> dict:
    columns = (
        ("RSUM, CSD", rsum("csd"), 1.0),
        ("RSUM, mean", rsum("mean"), 1.0),
        *((f"mAP@R {arrow}, {RANKINGS[r]}", map_at_r(r, way), 100.0)
          for way, arrow in WAYS.items() for r in ("csd", "mean", "tolerance")),
        *((f"λ {arrow}", weight(way), 1.0) for way, arrow in WAYS.items()),
    )  # fmt: skip
    rows = [[title, *(cell(found.of(name, get), factor) for _, get, factor in columns)]
            for name, title in NAMES.items()]  # fmt: skip
    kept = found.of("recipe", spearman)
    goal = None if kept is None else value([KEPT] * len(kept.numbers))
    unlike = [(f"mAP@R {arrow} by tolerance", map_at_r("tolerance", way), 100.0) for way, arrow in WAYS.items()]
    unlike.append(("RSUM by CSD", rsum("csd"), 1.0))
    return {
        "title": "2. What a finetuning keeps",
        "claim": "Finetuned with the CLIP and the match loss from the start's a and b, without pseudo-positives, u "
        "still tells ambiguity and no retrieval is lost.",
        "head": ["trained with", *(title for title, _, _ in columns)],
        "rows": rows,
        "comparisons": [
            *(
                compare(f"{NAMES[name]}: u and ambiguity over {KEPT}", found.of(name, spearman), goal, "", 1.0)
                for name in ("recipe", "recipe frozen", "recipe a=5")
            ),
            *(
                compare(f"{NAMES[name]}: {what} over the start", *(found.of(x, get) for x in (name, "start")),
                        "points" if factor == 100 else "", factor)
                for name in ("recipe", "recipe frozen", "recipe a=5", "recipe with PP", "match")
                for what, get, factor in unlike
            ),
        ],
        "notes": [
            "RSUM of the own captions, mAP@R of all true matches, in percent. Tolerance: squared distance of the means "
            "plus λ times the gallery's u, λ of each direction chosen on validation scenes; 1 is CSD, 0 the mean, "
            "below 0 a large u brings an item closer.",
        ],
    }  # fmt: skip


def _rankings(found: Found) -> dict:
    columns = [(f"{arrow}, {title}", map_at_r(name, way)) for way, arrow in WAYS.items() for name, title in
               RANKINGS.items()]  # fmt: skip
    comparisons = []
    for name in ("start", "recipe"):
        best = found.of(name, map_at_r("tolerance", "i2t"))
        comparisons += [
            compare(f"mAP@R i→t, {NAMES[name]}: tolerance over {RANKINGS[other]}", best,
                    found.of(name, map_at_r(other, "i2t")))
            for other in RANKINGS if other != "tolerance"
        ]  # fmt: skip
        both = (found.of(name, map_at_r(ranking, "t2i")) for ranking in ("tolerance", "csd"))
        comparisons.append(compare(f"mAP@R t→i, {NAMES[name]}: tolerance over CSD", *both))
    return {
        "title": "3. The variance as a tolerance",
        "claim": "Who wants all that fits finds it with the gallery's u as a tolerance, not as a distance.",
        "head": ["mAP@R", *(title for title, _ in columns)],
        "rows": table(found, {name: NAMES[name] for name in CLOSELY}, columns),
        "comparisons": comparisons,
        "notes": ["mAP@R of all true matches, in percent. λ of the tolerance is chosen on validation scenes."],
    }


def _predictors(found: Found) -> dict:
    first = found.all("start")[0]["predictors"]
    variants = {"start": "start", "recipe": "CLIP + match", "recipe with PP": "with PP", "match": "match"}
    rows = [
        [row["title"], *(cell(found.of(name, predictor(row["score"], key, "value")), 1, 2, "+")
                         for key in ("ambiguity", "r@1") for name in variants)]
        for row in first
    ]  # fmt: skip
    u = found.of("recipe", predictor("u", "ambiguity", "value"))
    return {
        "title": "4. What the scores of a caption know",
        "claim": "u tells the true ambiguity of a caption better than any score of its neighbours.",
        "head": ["score of a caption", *(f"{what}: {title}" for what in ("ambiguity", "R@1") for title in
                                         variants.values())],
        "rows": rows,
        "comparisons": [
            compare(f"CLIP + match, ambiguity: u over {row['title']}", u,
                    found.of("recipe", predictor(row["score"], "ambiguity", "value")), "", 1.0)
            for row in first if row["score"] != "u"
        ],
        "notes": [
            "Spearman's correlation with the true ambiguity (a good score is positive) and with R@1 by CSD, the own "
            "image alone (a good score is negative). The scores are those of `zeroshot.retrieval`.",
        ],
    }  # fmt: skip
