"""From the trainings on photographs to tables and verdicts: plain numbers, nothing is trained or drawn here."""

from __future__ import annotations

from tools.claims.verdicts import Found, Get, Value, cell, compare, sign_of, value, verdict

NAMES = {
    "infonce": "InfoNCE",
    "vse": "VSE∞",
    "pcme": "PCME",
    "pcmepp": "PCME++",
    "pcmepp a=5": "PCME++, a = b = 5",
    "clip 1": "PCME++ with the CLIP loss, weight 1",
    "recipe": "recipe",
}
POINT = ("infonce", "vse", "decl", "ncr")
SHORT = {"infonce": "InfoNCE", "recipe": "recipe", "decl": "DECL", "ncr": "NCR"}
PARTS = {
    "pcmepp": "match loss, VIB",
    "with PP": "and PP",
    "with MSDA": "and MSDA",
    "without VIB": "match loss alone",
    "recipe": "match loss, VIB, CLIP loss",
}
LEVELS = (("0 %", "{}"), ("20 %", "{} noise 20%"), ("50 %", "{} noise 50%"))
PROBABILISTIC = {name: title for name, title in NAMES.items() if name not in POINT}
KS = (1, 5, 10)


def own(name: str) -> str:
    """The ranking of a variant: the cosine of point models, PCME's match probability, CSD of others."""
    variant = name.partition(" ")[0]
    return "mean" if variant in POINT else "match-probability" if variant == "pcme" else "csd"


def rsum(ranking: str) -> Get:
    """RSUM on the test split under a ranking, in percent; None if a variant has no such ranking."""
    return lambda found: found["retrieval"].get(ranking, {}).get("rsum")


def own_rsum(found: Found, name: str) -> Value | None:
    """RSUM of a variant by its own ranking."""
    return found.of(name, rsum(own(name)))


def recall(ranking: str, way: str, k: int) -> Get:
    """R@k of one direction, in [0, 1]."""
    return lambda found: found["retrieval"][ranking][way][f"r@{k}"]


def judge(found: Found, judged: dict | None) -> list[dict]:
    """The claims, each with "title", "claim", "head", "rows", "comparisons" and "notes".

    Args:
        judged: of `Judge.compare`; None without judgements, which leaves their claim out.
    """
    claims = [_methods(found), _parts(found), _noise(found), _refusal(found)]
    if judged is not None:
        claims += [_judged(found, judged), _other_scores(found)]
    return [*claims, _coco(found)] if "coco" in found.all("infonce")[0] else claims


def _or_dash(one: Value | None, factor: float = 100.0, digits: int = 1, sign: str = "") -> str:
    return "–" if one is None else cell(one, factor, digits, sign)


def _methods(found: Found) -> dict:
    rows = []
    for name, title in NAMES.items():
        others = [_or_dash(found.of(name, rsum(ranking)), 1) for ranking in ("mean", "tolerance")]
        recalls = [cell(found.of(name, recall(own(name), way, k))) for way in ("i2t", "t2i") for k in KS]
        rows.append([title, cell(own_rsum(found, name), 1), *others, *recalls])
    infonce = own_rsum(found, "infonce")
    goal = value([180.0] * len(infonce.numbers))
    pairs = [("recipe", "infonce"), ("pcmepp", "infonce"), ("recipe", "vse"), ("pcmepp", "vse"), ("pcmepp", "pcme"),
             ("pcmepp", "pcmepp a=5"), ("recipe", "pcmepp")]  # fmt: skip
    return {
        "title": "1. Methods",
        "claim": "PCME++ retrieves the labelled pairs better than InfoNCE, VSE∞ and PCME.",
        "head": ["method", "RSUM", "by the mean", "tolerance",
                 *(f"R@{k} {way}" for way in ("i→t", "t→i") for k in KS)],
        "rows": rows,
        "comparisons": [
            compare("InfoNCE's RSUM over 180", infonce, goal, factor=1.0),
            *(
                compare(f"RSUM: {NAMES[a]} over {NAMES[b]}", own_rsum(found, a), own_rsum(found, b), factor=1.0)
                for a, b in pairs
            ),
            compare(
                f"RSUM: {NAMES['recipe']} by tolerance over InfoNCE",
                found.of("recipe", rsum("tolerance")),
                infonce,
                factor=1.0,
            ),
        ],
        "notes": [
            "Own captions of the test images, in percent. RSUM and R@K by CSD, of PCME by the match probability, of "
            "point models by the cosine. Tolerance: squared distance of the means and λ times the gallery's u, λ of "
            "each direction chosen on validation images."
        ],
    }  # fmt: skip


def _halves(side: str, which: str, ranking: str = "csd") -> Get:
    return lambda one: one["refusal"][ranking][side][which]


def _gain(side: str, ranking: str = "csd") -> Get:
    return lambda one: _halves(side, "certain", ranking)(one) - _halves(side, "all", ranking)(one)


def _acceptance(one: dict) -> float | None:
    return one.get("judged", {}).get("acceptance")


def _parts(found: Found) -> dict:
    rows = []
    for name, title in PARTS.items():
        numbers = [cell(found.of(name, rsum(ranking)), 1) for ranking in ("csd", "mean", "tolerance")]
        gain = cell(found.of(name, _gain("captions")), 100, 1, "+")
        rows.append([title, *numbers, gain, _or_dash(found.of(name, _acceptance), 1, 2, "+")])
    base = found.of("pcmepp", rsum("csd"))
    return {
        "title": "2. Pseudo-positives, mixed images, bottleneck, CLIP loss",
        "claim": "Each of PP, MSDA, VIB and the CLIP loss adds to the retrieval of PCME++.",
        "head": ["variant", "RSUM", "by the mean", "tolerance", "R@1 t→i, certain half", "u and acceptance"],
        "rows": rows,
        "comparisons": [
            *(
                compare(f"RSUM: {title}", found.of(name, rsum("csd")), base, factor=1.0)
                for name, title in (("with PP", "with PP over without"), ("with MSDA", "with MSDA over without"),
                                    ("recipe", "with the CLIP loss over without"))
            ),
            compare("RSUM: with VIB over without", base, found.of("without VIB", rsum("csd")), factor=1.0),
        ],
        "notes": [
            "R@1 of the certain half of the captions by u less that of all, in points. u and acceptance: Spearman of a "
            "caption's u with the share of judged images that people accept. MSDA mixes feature maps (manifold Mixup "
            "and CutMix)."
        ],
    }  # fmt: skip


def _noise(found: Found) -> dict:
    rows, comparisons = [], []
    for name, title in SHORT.items():
        cells = [own_rsum(found, form.format(name)) if found.has(form.format(name)) else None for _, form in LEVELS]
        rows.append([title, *(_or_dash(one, 1) for one in cells)])
    for label, form in LEVELS[1:]:
        comparisons += [
            compare(f"{label} wrong captions: recipe over {SHORT[name]}",
                    own_rsum(found, form.format("recipe")), own_rsum(found, form.format(name)), factor=1.0)
            for name in SHORT if name != "recipe"
        ]  # fmt: skip
    return {
        "title": "3. Noisy correspondence",
        "claim": "With 20 % and 50 % of the captions at wrong images PCME++ is ahead of InfoNCE, DECL and NCR.",
        "head": ["method", *(label for label, _ in LEVELS)],
        "rows": rows,
        "comparisons": comparisons,
        "notes": [
            "RSUM on the test split, whose captions are right, as are those of the validation split. NCR trains two "
            "networks and averages their similarities."
        ],
    }


def _refusal(found: Found) -> dict:
    rows, comparisons = [], []
    for name, title in PROBABILISTIC.items():
        halves = [
            cell(found.of(name, _halves(side, which)))
            for side in ("captions", "images")
            for which in ("all", "certain", "uncertain")
        ]
        rows.append([title, *halves, _or_dash(found.of(name, _acceptance), 1, 2, "+")])
        for side, way in (("captions", "t→i"), ("images", "i→t")):
            pair = (found.of(name, _halves(side, which)) for which in ("certain", "all"))
            comparisons.append(compare(f"{title}: R@1 {way} of the certain half over all", *pair))
        if found.of(name, _acceptance) is not None:
            what = f"{title}: u does not run against how many images people accept"
            comparisons.append(sign_of(what, found.of(name, _acceptance), 1))
    return {
        "title": "4. Refusal",
        "claim": "Refusing the uncertain half of the queries raises R@1 of those that are answered.",
        "head": ["method", *(f"{way} {which}" for way in ("t→i", "i→t") for which in ("all", "certain", "uncertain")),
                 "u and acceptance"],
        "rows": rows,
        "comparisons": comparisons,
        "notes": ["R@1 by CSD, in percent, of all queries, of the certain half by u, and of the other half."],
    }  # fmt: skip


def score(ranking: str, metric: str) -> Get:
    """A metric of the judged pairs; None where a model has no such ranking."""
    return lambda one: one["judged"].get(ranking, {}).get(metric)


def _judged(found: Found, judged: dict) -> dict:
    columns = [(ranking, metric) for ranking, metric in (
        ("mean", "average_precision"), ("csd", "average_precision"), ("mean", "average_precision_halves"),
        ("tolerance", "average_precision_halves"), ("mean", "roc_auc"), ("csd", "roc_auc"),
        ("tolerance", "roc_auc_halves"))]  # fmt: skip
    rows = [[title, *(_or_dash(found.of(name, score(*column)), 1, 3) for column in columns)]
            for name, title in NAMES.items()]  # fmt: skip
    comparisons = []
    for name, rankings in judged.items():
        comparisons += [
            _interval(f"AP: {NAMES[name]} by {ranking} over InfoNCE", one) for ranking, one in rankings.items()
        ]
    return {
        "title": "5. What people say",
        "claim": "A probabilistic model orders judged pairs better than InfoNCE.",
        "head": ["method", "AP, mean", "AP, CSD", "AP of halves, mean", "AP of halves, tolerance", "AUC, mean",
                 "AUC, CSD", "AUC of halves, tolerance"],
        "rows": rows,
        "comparisons": comparisons,
        "notes": [
            "Pairs of a test image and a caption of another one; right is what a majority accepts. The weights of the "
            "tolerance are cross-fitted: chosen on the judgements of one half of the images, measured on the other. "
            "Comparisons are of the means of both halves and over the seeds, with 95 % intervals of the paired "
            "bootstrap over images and captions."
        ],
    }  # fmt: skip


def _other_scores(found: Found) -> dict:
    halves = "average_precision_halves"
    titles = {"tolerance": "tolerance", "mean": "mean", "csd": "CSD", "inclusion": "inclusion",
              "log-likelihood": "log-likelihood", "u": "u of the caption alone"}  # fmt: skip
    probabilistic = [name for name in NAMES if found.of(name, score("u", halves)) is not None]
    best = found.of("recipe", score("tolerance", halves))
    return {
        "title": "6. Other scores of judged pairs",
        "claim": "As a tolerance the variance orders judged pairs better than in any other way.",
        "head": ["AP of halves", *titles.values()],
        "rows": [[NAMES[name], *(cell(found.of(name, score(ranking, halves)), 1, 3) for ranking in titles)]
                 for name in probabilistic],
        "comparisons": [compare(f"recipe: tolerance over {title}", best, found.of("recipe", score(ranking, halves)),
                                "points of AP")
                        for ranking, title in titles.items() if ranking != "tolerance"],
        "notes": [
            "As in 5. The match probability of PCME++ orders pairs as CSD does. u of the caption knows nothing of the "
            "image; it tells how much of the order is between captions."
        ],
    }  # fmt: skip


def _interval(what: str, one: dict[str, float]) -> dict:
    """A comparison whose verdict follows from a bootstrap interval."""
    text = f"{one['value']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]".replace("-", "\N{MINUS SIGN}")
    return {"what": what, "verdict": verdict(one["low"], one["high"]), "difference": one["value"], "text": text, **one}


def _coco(found: Found) -> dict:
    truths = found.all("infonce")[0]["coco"]["mean"]
    columns: list[tuple[str, str, str, str | None]] = [("RSUM", "own", "rsum", None)]
    shown = (("cxc", "CxC", "r@1", "R@1"), ("cxc", "CxC", "r_precision", "RPC²"), ("eccv", "ECCV", "map_at_r", "mAP@R"))
    for truth, title, metric, label in shown:
        if truth in truths:
            columns += [(f"{title} {label} {arrow}", truth, metric, way) for way, arrow in
                        (("i2t", "i→t"), ("t2i", "t→i"))]  # fmt: skip

    def get(ranking: str, truth: str, metric: str, way: str | None) -> Get:
        def of(one: dict) -> float | None:
            if ranking not in one["coco"]:
                return None
            values = one["coco"][ranking][truth]
            return values[metric] if way is None else values[way][metric]

        return of

    def row(name: str, ranking: str) -> list[str]:
        return [_or_dash(found.of(name, get(ranking, *one[1:])), 1 if one[3] is None else 100) for one in columns]

    rows = [[title, *row(name, own(name))] for name, title in NAMES.items()]
    rows += [[f"{NAMES[name]}, tolerance", *row(name, "tolerance")] for name in ("pcmepp", "recipe")]
    infonce, whole = found.of("infonce", get("mean", "own", "rsum", None)), ("own", "rsum", None)
    return {
        "title": "7. COCO images that nothing was trained on",
        "claim": "The order of the methods is the same on other photographs.",
        "head": ["method", *(one[0] for one in columns)],
        "rows": rows,
        "comparisons": [
            compare(f"RSUM: {NAMES[name]} over InfoNCE", found.of(name, get("csd", *whole)), infonce, factor=1.0)
            for name in ("recipe", "pcmepp")
        ],
        "notes": ["Own captions, and the matches of CxC and ECCV Caption that fall inside these images."],
    }
