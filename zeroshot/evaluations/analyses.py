"""The analyses of `python -m zeroshot.analyses` and `zeroshot.hierarchy`; each function runs one from its options."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from probemb.data.boxes import find_phrases
from probemb.data.captions.find import CaptionDataset
from probemb.data.failures import BadSample
from probemb.errors import UserError
from probemb.evaluation.analyses.continuity import (
    half_way,
    likeness_of,
    nearest_images,
    of_neighbours,
    of_walks,
)
from probemb.evaluation.analyses.continuity import walk as walk_between
from probemb.evaluation.analyses.hierarchy import including_roots, level_correlation, score, walk, within_radius
from probemb.evaluation.analyses.plane import Ellipses, Plane, plane_of
from probemb.evaluation.analyses.plane import ellipses as ellipses_of
from probemb.evaluation.analyses.set_algebra import erasing, geometric_sigma, mixing
from probemb.evaluation.analyses.unions import (
    ITEMS,
    SIDES,
    TASKS,
    binary_selection,
    embed_triplets,
    union_uncertainty,
)
from probemb.evaluation.embed_pairs import embed_pairs
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.rankings import TITLES, fitting
from probemb.evaluation.uncertainty import MEASURES, erase_pixels, erase_regions, erase_words
from probemb.gaussian import Gaussian
from probemb.models import check_images, networks_of
from probemb.models.architectures import reads_regions
from probemb.reports.figures import PALETTE, RED, Chart
from probemb.reports.pages import Card, Cell, Figure, Page, Table, line_figure, picture_of
from probemb.reports.text import number, percent, plus_minus
from zeroshot.analyses import AlgebraConfig, ContinuityConfig, EllipsesConfig, UnionConfig
from zeroshot.command import CaptionConfig
from zeroshot.evaluations.runner import (
    claim,
    finish,
    left_out,
    open_analysis,
    open_captions,
    open_model,
    pair_options,
    pair_rankings,
    settings,
)

WALKS = {
    "walk": "to the embedding of an empty text",
    "walk-inclusion": "to a root between that and the caption that includes the image the most",
    "radius": "the closest within each radius around the embedding of an empty text",
}
LEVEL, GENERIC_LEVEL = 0.5, 0.99  # mass in an ellipse
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
ERASED_EXAMPLE = 0.3  # share erased of the examples
MIXES = {"pixels": ("cutmix", "mixup"), "regions": ("cutmix",)}  # the first is drawn
MOST_CODES = 5000  # images between which walks lead
MIXED = {
    "covers": "covers its own",
    "covers_other": "covers another's",
    "between": "lies between",
    "own_is_closest": "own is closest",
    "wider": "wider",
}
ERASED = {
    "sigma": "σ",
    "wider": "wider",
    "lies_in": "whole lies in it",
    "covers": "covers the whole",
    "covered": "is covered by it",
    "covers_other": "covers another",
}


# -------------------------------------------------------------------------------------------------------- hierarchy


def hierarchy(config: CaptionConfig) -> None:
    """Levels of captions. Raises UserError: images with different numbers of captions, or with one."""
    embedder, data, out = open_analysis(config, "hierarchy")
    lengths = {len(texts) for texts in data.captions}
    if len(lengths) > 1 or lengths == {1}:
        raise UserError(
            f"{data.source} has images with {min(lengths)} to {max(lengths)} captions.",
            "Name data with the same number of captions, two or more, for every image, general to specific.",
        )
    pairs = embed_pairs(embedder, data)
    texts = [text for i in pairs.kept for text in data.captions[i]]
    root = embedder.texts([""], "root").mean[0]
    place = {text: n for n, text in enumerate(dict.fromkeys(texts))}
    numbers = torch.tensor([place[text] for text in texts])
    numbers_NL = numbers.view(len(pairs.images), -1)
    images, captions, u = pairs.images.mean, pairs.texts.mean, pairs.texts.uncertainty().view(numbers_NL.shape)
    found = {
        "walk": walk(images, captions, numbers, root.expand_as(images)),
        "walk-inclusion": walk(images, captions, numbers, including_roots(pairs.images, pairs.texts, root)),
        "radius": within_radius(images, captions, numbers, root),
    }
    results = {
        **settings(config, embedder, data.split),
        "images": len(images), "captions": len(texts), "distinct": len(place), "images_left_out": left_out(pairs.bad),
        "rows": [{"walk": name, **score(seen, numbers_NL)._asdict()} for name, seen in found.items()],
        "uncertainty": u.double().mean(0),
        "u_image": float(pairs.images.uncertainty().double().mean()),
        "level_correlation": {
            "radius": level_correlation((captions - root).norm(dim=-1).view(u.shape)),
            "certainty": level_correlation(-u),
        },
    }  # fmt: skip
    table = Table(
        ("found", "precision", "recall", "any"),
        [
            (f"{row['walk']}: {WALKS[row['walk']]}", *(percent(row[key]) for key in ("precision", "recall", "any")))
            for row in results["rows"]
        ],
        f"{len(images):,} images, {len(place):,} distinct captions, percent",
    )
    correlation = results["level_correlation"]
    blocks = [
        table,
        f"Kendall's tau with the level, mean over images: distance to the root {correlation['radius']:+.3f}, -u "
        f"{correlation['certainty']:+.3f}",
        f"mean u from general to specific: {', '.join(f'{u:.4g}' for u in results['uncertainty'].tolist())}; of the "
        f"images {results['u_image']:.4g}",
    ]
    page = Page("Captions from general to specific", f"{config.model} on {config.data}", [("Levels", blocks)])
    finish(out, "hierarchy", results, page, blocks)


# ------------------------------------------------------------------------------------------------------------ union


def union(config: UnionConfig) -> None:
    """Crops A, B and their union C. Raises UserError."""
    if not config.areas:
        raise UserError("--areas names none.", "Give shares of the image, such as [0.1, 0.3, 0.5].")
    rankings = pair_rankings(config.rankings)
    if "attention" in rankings:
        raise UserError("The ranking attention compares tokens, which are not kept here.", "Choose csd, mean, ...")
    data = find_phrases(config.data, None, config.images, config.sample)
    out = claim(config, "union")
    embedder = open_model(config)
    model = embedder.model
    if reads_regions(model.config["architecture"]):
        raise UserError(f"{config.model} reads precomputed regions, no crops.", "Name a model of pixels.")
    check_images(model, data.images)
    own = "mean" if model.ranking == "attention" else model.ranking
    both = dict.fromkeys([own, *(["mean"] if model.n_embeddings == 1 else [])])
    rankings = fitting(rankings or list(both), model, given=True)
    found, bad = embed_triplets(embedder, data, sorted(set(config.areas)))
    options = pair_options(embedder, config.samples)
    results = {
        **settings(config, embedder),
        "probabilistic": model.probabilistic,
        "images_left_out": left_out(bad),
        "areas": [
            {
                "area": area,
                "triplets": len(one.triplets),
                "uncertainty": union_uncertainty(one) if model.probabilistic else None,
                "selection": [
                    {"ranking": name, "title": TITLES[name], **binary_selection(one, name, options)}
                    for name in rankings
                ],
            }
            for area, one in found.items()
        ],
    }
    tables = union_tables(results)
    figures = [union_figure(results["areas"], side) for side in SIDES] if model.probabilistic else []
    page = Page(
        "Crops and their union",
        f"{config.model} on {config.data}: crops A and B of an image, and C, the box around both, whose caption joins "
        "both with “and”",
        [
            ("Uncertainty", [figures, *tables[:-1]]),
            ("Binary selection", ["Right: the own one of A and C is closer than the other.", tables[-1]]),
        ],
    )
    finish(out, "union", results, page, tables)


def union_tables(results: dict) -> list[Table]:
    """Uncertainty of A, B and C by every measure, and binary selection, for every area."""
    tables, areas = [], results["areas"]
    if results["probabilistic"]:
        rows = [
            (f"{row['area']:.0%}", f"{row['triplets']:,}", measure, side,
             *(plus_minus(u[item], 1, 3) for item in (*ITEMS, "difference")), plus_minus(u["larger"], digits=1))
            for measure in MEASURES for row in areas for side in SIDES
            for u in [row["uncertainty"][measure][side]]
        ]  # fmt: skip
        headings = ("area", "triplets", "measure", "of", *ITEMS, "C - A", "C larger, %")
        tables.append(Table(headings, rows, "uncertainty, mean over the triplets; differences are paired", left=4))
    rows = [
        (f"{row['area']:.0%}", one["title"], *(plus_minus(one[task], digits=1) for task in (*TASKS, "mean")))
        for row in areas
        for one in row["selection"]
    ]
    title = "binary selection between A and C, percent; 50 by chance"
    return [*tables, Table(("area", "ranked by", *TASKS, "mean"), rows, title, left=2)]


def union_figure(areas: list[dict], side: str) -> Figure:
    """Mean log det of A, B and C against the area; probabilistic VSE++, Fig. 2."""
    curves = {}
    for item in ITEMS:
        values = [row["uncertainty"]["log-det"][side][item] for row in areas]
        spread = [one["se"] or 0.0 for one in values]
        curves[item] = [100 * row["area"] for row in areas], [one["value"] for one in values], spread
    return line_figure(side, "largest area of a crop, % of the image", "log det Σ, mean", curves, f"As {side}")


# ------------------------------------------------------------------------------------------------------ set algebra


def set_algebra(config: AlgebraConfig) -> None:
    """Mixing and erasing as operations on sets. Raises UserError."""
    embedder, captions, out = open_analysis(config, "set_algebra")
    rows, read = read_pixels(embedder, captions, config.inputs, config.seed)
    draw = torch.Generator().manual_seed(config.seed)
    pixels = embedder.model.normalized(torch.stack(read))
    texts = [captions.captions[row][0] for row in rows]
    side, erase_part = ("regions", erase_regions) if pixels.ndim == 3 else ("pixels", erase_pixels)
    partner = torch.arange(len(rows)).roll(1)
    with embedder.show("images, mixed and erased", len(rows) * (1 + len(MIXES[side]) + len(SHARES))) as advance:

        def embed(images: Tensor) -> Gaussian:
            return embedder.pixels(images.split(embedder.batch_size), advance)

        whole = embed(pixels)
        mixed = {name: embed(mix(pixels, pixels[partner], name)) for name in MIXES[side]}
        gone = [embed(erase_part(pixels, share, draw)) for share in SHARES]
    shorter = [[erase_words(text, share, draw) for text in texts] for share in SHARES]
    with embedder.show("captions, whole and erased", len(rows) * (1 + len(SHARES))) as advance:
        written, *unsaid = (embedder.tokens(embedder.tokenizer(some), advance) for some in (texts, *shorter))
    names = [captions.images.places[row].name for row in rows]
    results = {
        **settings(config, embedder, captions.split),
        "inputs": len(rows),
        "mixing": {name: mixing(g, whole, whole[partner]) for name, g in mixed.items()},
        "erasing": {side: erasing(whole, gone, SHARES), "words": erasing(written, unsaid, SHARES)},
        "whole": {what: float(geometric_sigma(g).mean()) for what, g in ((side, whole), ("words", written))},
    }
    tables = algebra_tables(results)
    n = min(config.examples, len(rows))
    plane, erased = plane_of(whole.mean), gone[SHARES.index(ERASED_EXAMPLE)]
    drawn = [
        example_figure(
            f"example-{i + 1}", f"{names[i]} and {names[j]}", plane,
            {"first": whole[[i]], "second": whole[[j]], "mixed": mixed["cutmix"][[i]], "erased": erased[[i]]},
        )
        for i, j in enumerate(partner[:n].tolist())
    ]  # fmt: skip
    page = Page(
        "Mixing and erasing as operations on sets",
        f"{config.model} on {config.data}: {len(rows)} images and captions",
        [
            ("Mixed images", [
                "Whether a mixed image covers the intersection (the normalised product) of both: the share of its mass "
                "in the central 90 % of the mixed image's own. Its own is the closest of all by chance for "
                f"{percent(results['mixing']['cutmix']['chance'])} %.", tables[0],
            ]),
            ("A part erased", [
                "Where erasing is inclusion, the erased item is wider, the whole lies in it, and it covers the whole.",
                [one for what in results["erasing"] for one in erased_figures(what, results)], *tables[1:],
            ]),
            ("Examples", ["Halves mixed, and 30 % erased; ellipses of 50 % of the mass.", drawn]),
        ],
    )  # fmt: skip
    finish(out, "set_algebra", results, page, tables)


def read_pixels(embedder: Embedder, captions: CaptionDataset, wanted: int, seed: int) -> tuple[list[int], list]:
    """The first readable ones of the images in an order drawn from the seed: their rows in the data, and pixels.

    Raises UserError: fewer than four can be read.
    """
    rows, pixels = [], []
    order = torch.randperm(len(captions), generator=torch.Generator().manual_seed(seed)).tolist()
    for row in order:
        if len(rows) == wanted:
            break
        try:
            pixels.append(embedder.transform(captions.images.open(row)))
            rows.append(row)
        except BadSample:
            continue
    if len(rows) < 4:  # so that each pair has another one beside it with no image in common
        raise UserError(f"{captions.source} has fewer than four images that can be read.", "Name other data.")
    return rows, pixels


def mix(first: Tensor, second: Tensor, how: str) -> Tensor:
    """Normalised images (N, 3, H, W), or regions (N, R, F), of both mixed.

    "mixup" is the mean of both; "cutmix" the left half of one and the right half of the other, or every other region.
    """
    if how == "mixup":
        return (first + second) / 2
    out, middle = first.clone(), first.shape[-1] // 2
    if first.ndim == 3:
        out[:, 1::2] = second[:, 1::2]
    else:
        out[..., middle:] = second[..., middle:]
    return out


def algebra_tables(results: dict) -> list[Table]:
    """Mixing and erasing, in percent but for σ."""

    def cells(row: dict, keys: Sequence[str]) -> list[str]:
        return [
            number(row[key]) if key == "sigma" else plus_minus({"value": row[key], "se": row[f"{key}_se"]}, digits=1)
            for key in keys
        ]

    title = f"mixed images against the intersection of both, {results['inputs']} pairs, percent"
    rows = [(name, *cells(row, list(MIXED))) for name, row in results["mixing"].items()]
    tables = [Table(("mixed by", *MIXED.values()), rows, title)]
    for what, rows in results["erasing"].items():
        title = f"erased {what}, percent; σ of the whole: {number(results['whole'][what])}"
        rows = [(f"{row['share']:.0%}", *cells(row, list(ERASED))) for row in rows]
        tables.append(Table(("erased", *ERASED.values()), rows, title))
    return tables


def erased_figures(what: str, results: dict) -> list[Figure]:
    """σ against the share that is erased (PCME Fig. 7), and coverage of the whole by the erased and the reverse."""
    rows = results["erasing"][what]
    xs = [100 * row["share"] for row in rows]
    sigma = {"": ([0.0, *xs], [results["whole"][what], *(row["sigma"] for row in rows)])}
    names = {
        "covers": "whole, by the erased", "covered": "erased, by the whole", "covers_other": "another, by the erased"
    }  # fmt: skip
    covered = {name: (xs, [100 * row[key] for row in rows]) for key, name in names.items()}
    return [
        line_figure(f"sigma-{what}", f"erased {what}, %", "geometric mean of σ", sigma),
        line_figure(f"coverage-{what}", f"erased {what}, %", "mass that is covered, %", covered),
    ]


def example_figure(slug: str, title: str, plane: Plane, items: dict[str, Gaussian]) -> Figure:
    """Two images, their mix, and the first one with a part erased, as ellipses of 50 %."""
    chart = Chart(slug, x_label="first direction", y_label="second direction")
    for (name, one), colour in zip(items.items(), PALETTE):
        chart.ellipses(ellipse_rows(ellipses_of(one, plane), [name]), name, colour, dashed=name in ("mixed", "erased"))
    return Figure(chart, title)


# --------------------------------------------------------------------------------------------------------- ellipses


def ellipses(config: EllipsesConfig) -> None:
    """Some groups of images and captions in a plane, with projected covariances. Raises UserError."""
    embedder, captions, out = open_analysis(config, "ellipses")
    groups = choose_groups(config, captions)
    rows = [row for some in groups.values() for row in some]
    group_of = [name for name, some in groups.items() for _ in some]
    data = captions.only(rows)
    pairs = embed_pairs(embedder, data)
    plane = plane_of(Gaussian.cat([pairs.images, pairs.texts]).mean)
    texts = [text for i in pairs.kept for text in data.captions[i]]
    sides = {
        "images": (pairs.images, [data.images.places[i].name for i in pairs.kept], [group_of[i] for i in pairs.kept]),
        "captions": (pairs.texts, texts, [group_of[pairs.kept[i]] for i in pairs.owner.tolist()]),
    }
    shapes = {side: ellipses_of(g, plane, LEVEL) for side, (g, _, _) in sides.items()}
    results = {
        **settings(config, embedder, data.split),
        "groups": list(groups),
        "dimensions": pairs.images.shape[1],
        "variance_in_plane": plane.share,
        "level": LEVEL,
        **{
            side: {"labels": labels, "groups": names, "sigma": geometric_sigma(g), **vars(shapes[side])}
            for side, (g, labels, names) in sides.items()
        },
        "generic": None,
    }
    lines: list[str] = []
    drawn = {side: ellipse_figure(side, results, shapes[side]) for side in SIDES}
    if config.generic is not None:
        one = embedder.tokens(embedder.tokenizer([config.generic]))
        shape, sigma = ellipses_of(one, plane, GENERIC_LEVEL), float(geometric_sigma(one)[0])
        wider = float((geometric_sigma(pairs.texts) < sigma).double().mean())
        results["generic"] = {"text": config.generic, "sigma": sigma, "wider_than_captions": wider, **vars(shape)}
        for figure in drawn.values():
            figure.chart.ellipses(ellipse_rows(shape, [config.generic]), "generic caption, 99 %", RED, wide=True)
        lines = [f"generic caption: σ {number(sigma)}, larger than {wider:.0%} of the captions have"]
    table = sigma_table(results)
    page = Page(
        "Embeddings in a plane",
        f"{config.model} on {config.data}: {len(groups)} groups, each item as the ellipse that holds "
        f"{percent(LEVEL)} % of its mass, in the plane of the means' two largest principal components",
        [("Ellipses", [list(drawn.values()), *lines]), ("Geometric mean of σ", [table])],
    )
    finish(out, "ellipses", results, page, [table, *lines])


def choose_groups(config: EllipsesConfig, captions: CaptionDataset) -> dict[str, list[int]]:
    """Rows of the images of every group: classes, or single images, drawn from the seed. Raises UserError."""
    draw = random.Random(config.seed)
    names = captions.classes or [place.name for place in captions.images.places]
    of: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        of.setdefault(name, []).append(row)
    if len(of) < 2:
        raise UserError(f"{captions.source} has fewer than two groups of images.", "Name other data or another split.")
    chosen = draw.sample(sorted(of), min(config.groups, len(of)))
    return {name: draw.sample(of[name], min(config.per_group, len(of[name]))) for name in sorted(chosen)}


def sigma_table(results: dict) -> Table:
    """Numbers and mean σ of every group."""
    rows = []
    for name in results["groups"]:
        row = [name[:40]]
        for side in SIDES:
            sigma = [float(s) for s, of in zip(results[side]["sigma"], results[side]["groups"]) if of == name]
            row += [str(len(sigma)), number(sum(sigma) / len(sigma)) if sigma else ""]
        rows.append(row)
    title = f"geometric mean of σ; {percent(results['variance_in_plane'])} % of the means' variance lies in the plane"
    return Table(("group", "images", "σ of images", "captions", "σ of captions"), rows, title)


def ellipse_rows(found: Ellipses, notes: Sequence[str]) -> list[tuple]:
    """Arguments of `Chart.ellipses`."""
    columns = found.centre.tolist(), found.radii.tolist(), found.angle.tolist()
    return [(*centre, *radii, angle, note) for centre, radii, angle, note in zip(*columns, notes)]


def ellipse_figure(side: str, results: dict, shapes: Ellipses) -> Figure:
    """Every item's ellipse in the colour of its group."""
    groups, labels = results[side]["groups"], results[side]["labels"]
    chart = Chart(f"ellipses-of-{side}", x_label="first direction", y_label="second direction")
    for name, colour in zip(results["groups"], PALETTE):
        if mine := [i for i, group in enumerate(groups) if group == name]:
            chart.ellipses(ellipse_rows(shapes[mine], [f"{name}: {labels[i][:120]}" for i in mine]), name[:24], colour)
    return Figure(chart, side.capitalize())


# ------------------------------------------------------------------------------------------------------- continuity


def continuity(config: ContinuityConfig) -> None:
    """Neighbours among the codes, and walks between codes. Raises UserError: too few images, no one code an item."""
    captions, draw = open_captions(config), np.random.default_rng(config.seed)
    if len(captions.images) < config.neighbours + 2:
        raise UserError(f"{captions.source} has {len(captions)} images.", f"Give at least {config.neighbours + 2}.")
    if len(captions) > MOST_CODES:
        captions = captions.only(sorted(draw.permutation(len(captions))[:MOST_CODES].tolist()))
    out = claim(config, "continuity")
    embedder = open_model(config, networks_of(config.model))
    model = embedder.model
    if model.n_embeddings > 1 or model.attention is not None:
        raise UserError(f"{config.model} has no one code an item.", "Name a model that compares single embeddings.")
    pairs = embed_pairs(embedder, captions)
    likeness, near = likeness_of(captions, pairs.kept), nearest_images(pairs.images.mean, config.neighbours)
    draw = np.random.default_rng(config.seed)
    ends = [draw.choice(len(likeness), 2, replace=False).tolist() for _ in range(config.walks)]
    walks = [walk_between(pairs, *both, config.steps) for both in ends]
    some = draw.choice(len(likeness), min(config.shown, len(likeness)), replace=False).tolist()
    results = {
        **settings(config, embedder, captions.split),
        "images": len(likeness),
        "images_left_out": left_out(pairs.bad),
        "neighbours": of_neighbours(likeness, near),
        "walks": of_walks(likeness, walks),
    }
    by, walked = results["neighbours"], results["walks"]
    row = [
        *(f"{by[key]:.3f}" for key in ("likeness", "random", "most")), f"{walked['images']:.1f}",
        "" if walked["consecutive"] is None else f"{walked['consecutive']:.3f}", f"{half_way(walked['cosine']):.3f}",
    ]  # fmt: skip
    headings = (f"{by['k']} neighbours", "random", "most similar", "images a walk", "in a row", "half-way")
    table = Table(headings, [row], "likeness of images by their captions", left=0)
    curves = {f"to the {end}": (range(config.steps), walked[f"to_{end}"]) for end in ("start", "end")}
    figure = line_figure("walks", "step of the walk", "likeness of the nearest image", curves)
    texts = [text for i in pairs.kept for text in captions.captions[i]]

    def card(images: Sequence[int], said: Sequence[str] = ()) -> Card:
        places = [pairs.kept[row] for row in images]
        pictures = [one for i in places for one in picture_of(captions.images, i, captions.captions[i][0])]
        return Card("", pictures, [Cell(text) for text in said])

    page = Page(
        "Semantic continuity",
        f"{config.model} on {config.data}, {len(likeness):,} images",
        [
            ("Likeness", [
                "Likeness of images is that of their captions. Half-way: cosine of the nearest image.", table, [figure],
            ]),
            ("Walks", [[card(one.images, [texts[i] for i in one.captions]) for one in walks[: config.shown]]]),
            ("Images and their neighbours", [[card([row, *near[row].tolist()]) for row in some]]),
        ],
    )  # fmt: skip
    finish(out, "continuity", results, page, [table])
