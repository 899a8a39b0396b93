"""The analyses of `python -m zeroshot.analyses`; each function runs one from its options."""

import random
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from probemb.data.boxes import find_phrases
from probemb.data.captions.dataset import CaptionDataset
from probemb.data.failures import BadSample
from probemb.errors import UserError
from probemb.evaluation import analyses
from probemb.evaluation.embedding import Embedder, embed_pairs
from probemb.evaluation.rankings import RANKINGS
from probemb.evaluation.uncertainty import MEASURES, erase_pixels, erase_regions, erase_words, geometric_sigma
from probemb.gaussian import Gaussian
from probemb.models import check_images, networks_of
from probemb.reports.figures import PALETTE, RED, Chart
from probemb.reports.pages import Card, Cell, Figure, Page, Table, line_figure, picture_of
from probemb.reports.text import number, percent, plus_minus
from zeroshot.analyses import AlgebraConfig, ContinuityConfig, EllipsesConfig, UnionConfig
from zeroshot.command import CaptionConfig
from zeroshot.evaluations import runner

WALKS = {
    "walk": "to the embedding of an empty text",
    "walk-inclusion": "to a root between that and the caption that includes the image the most",
    "radius": "the closest within each radius around the embedding of an empty text",
}
LEVEL, GENERIC_LEVEL = 0.5, 0.99  # mass in an ellipse
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
MIXES = {"pixels": ("cutmix", "mixup"), "regions": ("cutmix",)}
STEPS = 7  # of a walk, with both ends; odd, so that one is half-way
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


def hierarchy(config: CaptionConfig) -> None:
    """Levels of captions. Raises UserError: images with different numbers of captions, or with one."""
    run, data = runner.start_analysis(config, "hierarchy")
    lengths = {len(texts) for texts in data.captions}
    if len(lengths) > 1 or lengths == {1}:
        what = f"{data.source} has images with {min(lengths)} to {max(lengths)} captions."
        raise UserError(what, "Name data with as many captions of every image, two or more, general to specific.")
    pairs = embed_pairs(run.embedder, data)
    texts = pairs.data.flat()
    root = run.embedder.texts([""], "root").mean[0]
    place = {text: n for n, text in enumerate(dict.fromkeys(texts))}
    numbers = torch.tensor([place[text] for text in texts])
    numbers_NL = numbers.view(len(pairs.images), -1)
    images, captions, u = pairs.images.mean, pairs.texts.mean, pairs.texts.uncertainty().view(numbers_NL.shape)
    roots = analyses.including_roots(pairs.images, pairs.texts, root)
    found = {
        "walk": analyses.hierarchy_walk(images, captions, numbers, root.expand_as(images)),
        "walk-inclusion": analyses.hierarchy_walk(images, captions, numbers, roots),
        "radius": analyses.within_radius(images, captions, numbers, root),
    }
    scores = {name: analyses.hierarchy_score(seen, numbers_NL) for name, seen in found.items()}
    levels = {"radius": (captions - root).norm(dim=-1).view(u.shape), "certainty": -u}
    correlation = {name: analyses.level_correlation(values) for name, values in levels.items()}
    mean_u, u_image = u.double().mean(0), float(pairs.images.uncertainty().double().mean())
    results = {
        "images": len(images),
        "captions": len(texts),
        "distinct": len(place),
        "rows": [{"walk": name, **row} for name, row in scores.items()],
        "uncertainty": mean_u,
        "u_image": u_image,
        "level_correlation": correlation,
    }
    title = f"{len(images):,} images, {len(place):,} distinct captions, percent"
    rows = [(f"{name}: {WALKS[name]}", *map(percent, row.values())) for name, row in scores.items()]
    blocks = [
        Table(("found", *scores["walk"]), rows, title),
        f"Kendall's tau with the level, mean over images: distance to the root {correlation['radius']:+.3f}, -u "
        f"{correlation['certainty']:+.3f}",
        f"mean u, general to specific: {', '.join(f'{u:.4g}' for u in mean_u.tolist())}; of the images {u_image:.4g}",
    ]
    page = Page("Captions from general to specific", f"{config.model} on {config.data}", [("Levels", blocks)])
    run.finish(results, page, pairs.bad, data.split)


def union(config: UnionConfig) -> None:
    """Crops A, B and their union C. Raises UserError."""
    data = find_phrases(config.data, None, config.images, config.sample)
    run = runner.start(config, "union")
    model = run.embedder.model
    check_images(model, data.images)
    rankings, options = runner.pair_rankings(config.rankings, run.embedder, tokens=False)
    found, bad = analyses.embed_triplets(run.embedder, data, sorted(set(config.areas)))
    areas = [
        {
            "area": area,
            "triplets": len(embedded.triplets),
            "uncertainty": analyses.union_uncertainty(embedded) if model.probabilistic else None,
            "selection": [
                {"ranking": name, "title": RANKINGS[name].title, **analyses.binary_selection(embedded, name, options)}
                for name in rankings
            ],
        }
        for area, embedded in found.items()
    ]
    tasks = (*analyses.TASKS, "mean")
    rows = [
        (f"{row['area']:.0%}", one["title"], *(plus_minus(one[task], digits=1) for task in tasks))
        for row in areas
        for one in row["selection"]
    ]
    title = "binary selection between A and C, percent (right: its own is closer); 50 by chance"
    about = "crops A and B of an image, and C, the box around both, whose caption joins both with “and”"
    sections = [("Binary selection", [Table(("area", "ranked by", *tasks), rows, title, left=2)])]
    if model.probabilistic:
        sections = [("Uncertainty", [union_table(areas), [union_figure(areas, s) for s in analyses.SIDES]]), *sections]
    page = Page("Crops and their union", f"{config.model} on {config.data}: {about}", sections)
    run.finish({"probabilistic": model.probabilistic, "areas": areas}, page, bad)


def union_table(areas: list[dict]) -> Table:
    """Uncertainty of A, B and C by every measure, for every area."""
    rows = [
        (f"{row['area']:.0%}", f"{row['triplets']:,}", measure, side,
         *(plus_minus(u[item], 1, 3) for item in (*analyses.ITEMS, "difference")), plus_minus(u["larger"], digits=1))
        for measure in MEASURES for row in areas for side in analyses.SIDES
        for u in [row["uncertainty"][measure][side]]
    ]  # fmt: skip
    headings = ("area", "triplets", "measure", "of", *analyses.ITEMS, "C - A", "C larger, %")
    return Table(headings, rows, "uncertainty, mean over the triplets; differences are paired", left=4)


def union_figure(areas: list[dict], side: str) -> Figure:
    """Mean log det of A, B and C against the area; probabilistic VSE++, Fig. 2."""
    curves, xs = {}, [100 * row["area"] for row in areas]
    for item in analyses.ITEMS:
        values = [row["uncertainty"]["log-det"][side][item] for row in areas]
        curves[item] = xs, [one["value"] for one in values], [one["se"] or 0.0 for one in values]
    return line_figure(side, "largest area of a crop, % of the image", "log det Σ, mean", curves, f"As {side}")


def set_algebra(config: AlgebraConfig) -> None:
    """Mixing and erasing as operations on sets. Raises UserError."""
    run, captions = runner.start_analysis(config, "set_algebra")
    embedder = run.embedder
    rows, read = read_pixels(embedder, captions, config.inputs)
    draw = torch.Generator().manual_seed(0)
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
    mixes = {name: analyses.mixing(g, whole, whole[partner]) for name, g in mixed.items()}
    erased = {side: analyses.erasing(whole, gone, SHARES), "words": analyses.erasing(written, unsaid, SHARES)}
    sigma = {what: float(geometric_sigma(g).mean()) for what, g in ((side, whole), ("words", written))}
    title = f"mixed images against the intersection of both, {len(rows)} pairs, percent"
    chance = percent(mixes["cutmix"]["chance"])
    tables = [
        shares_table(f"erased {what}, percent; σ of the whole: {number(sigma[what])}", ERASED,
                     {f"{row['share']:.0%}": row for row in erased[what]})
        for what in erased
    ]  # fmt: skip
    page = Page(
        "Mixing and erasing as operations on sets",
        f"{config.model} on {config.data}: {len(rows)} images and captions",
        [
            ("Mixed images", [
                "Whether a mixed image covers the intersection (the normalised product) of both: the share of its mass "
                "in the central 90 % of the mixed image's own. Its own is the closest of all by chance for "
                f"{chance} %.", shares_table(title, MIXED, mixes),
            ]),
            ("A part erased", [
                "Where erasing is inclusion, the erased item is wider, the whole lies in it, and it covers the whole.",
                *tables,
            ]),
        ],
    )  # fmt: skip
    results = {"inputs": len(rows), "mixing": mixes, "erasing": erased, "whole": sigma}
    run.finish(results, page, split=captions.split)


def read_pixels(embedder: Embedder, captions: CaptionDataset, wanted: int) -> tuple[list[int], list]:
    """Some images in a drawn order: the rows of those that can be read, and their pixels. Raises UserError: too few."""
    rows, pixels = [], []
    for row in torch.randperm(len(captions), generator=torch.Generator().manual_seed(0))[:wanted].tolist():
        with suppress(BadSample):
            pixels.append(embedder.transform(captions.images.open(row)))
            rows.append(row)
    if len(rows) < 4:  # so that each pair has another one beside it with no image in common
        raise UserError(f"Fewer than four images of {captions.source} can be read.", "Raise --inputs, or name others.")
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


def shares_table(title: str, columns: dict[str, str], rows: dict[str, dict]) -> Table:
    """Shares of the rows with their standard errors, in percent; σ as it is."""

    def cell(row: dict, key: str) -> str:
        return plus_minus({"value": row[key], "se": row[f"{key}_se"]}, digits=1) if key != "sigma" else number(row[key])

    cells = [(name, *(cell(row, key) for key in columns)) for name, row in rows.items()]
    return Table(("", *columns.values()), cells, title)


def ellipses(config: EllipsesConfig) -> None:
    """Some groups of images and captions in a plane, with projected covariances. Raises UserError."""
    run, captions = runner.start_analysis(config, "ellipses")
    groups = choose_groups(config, captions)
    rows = [row for some in groups.values() for row in some]
    group_of = [name for name, some in groups.items() for _ in some]
    data = captions.only(rows)
    pairs = embed_pairs(run.embedder, data)
    plane = analyses.plane_of(Gaussian.cat([pairs.images, pairs.texts]).mean)
    group_of = [group_of[i] for i in pairs.kept]
    sides = {
        "images": (pairs.images, [place.name for place in pairs.data.images.places], group_of),
        "captions": (pairs.texts, pairs.data.flat(), [group_of[i] for i in pairs.owner.tolist()]),
    }
    results = {
        "groups": list(groups),
        "dimensions": pairs.images.shape[1],
        "variance_in_plane": plane.share,
        "level": LEVEL,
    }
    figures, lines = [], [f"{percent(plane.share)} % of the variance of the means lies in the plane"]
    for side, (gaussian, labels, names) in sides.items():
        shapes, sigma = analyses.ellipses(gaussian, plane, LEVEL), geometric_sigma(gaussian)
        results[side] = {"labels": labels, "groups": names, "sigma": sigma, **shapes._asdict()}
        chart = Chart(f"ellipses-of-{side}", x_label="first direction", y_label="second direction")
        for name, colour in zip(groups, PALETTE):
            if members := [i for i, group in enumerate(names) if group == name]:
                notes = [f"{name}: {labels[i][:120]}" for i in members]
                chart.ellipses(ellipse_rows(shapes, members, notes), name[:24], colour)
        figures.append(Figure(chart, side.capitalize()))
        lines.append(f"{side}: mean σ {number(float(sigma.mean()))}")
    results["generic"] = None
    if config.generic is not None:
        generic = run.embedder.texts([config.generic], "generic caption")
        shape, sigma = analyses.ellipses(generic, plane, GENERIC_LEVEL), float(geometric_sigma(generic)[0])
        wider = float((geometric_sigma(pairs.texts) < sigma).double().mean())
        results["generic"] = {"text": config.generic, "sigma": sigma, "wider_than_captions": wider, **shape._asdict()}
        for figure in figures:
            figure.chart.ellipses(ellipse_rows(shape, [0], [config.generic]), "generic caption, 99 %", RED)
        lines.append(f"generic caption: σ {number(sigma)}, larger than {wider:.0%} of the captions have")
    page = Page(
        "Embeddings in a plane",
        f"{config.model} on {config.data}: {len(groups)} groups, each item as the ellipse that holds "
        f"{percent(LEVEL)} % of its mass, in the plane of the means' two largest principal components",
        [("Ellipses", [figures, *lines])],
    )
    run.finish(results, page, pairs.bad, data.split)


def choose_groups(config: EllipsesConfig, captions: CaptionDataset) -> dict[str, list[int]]:
    """Rows of the images of every group: classes, or single images, drawn. Raises UserError."""
    draw, of = random.Random(0), {}
    for row, name in enumerate(captions.classes or [place.name for place in captions.images.places]):
        of.setdefault(name, []).append(row)
    if len(of) < 2:
        raise UserError(f"{captions.source} has fewer than two groups of images.", "Name other data or another split.")
    chosen = draw.sample(sorted(of), min(config.groups, len(of)))
    return {name: draw.sample(of[name], min(config.per_group, len(of[name]))) for name in sorted(chosen)}


def ellipse_rows(found: analyses.Ellipses, rows: Sequence[int], notes: Sequence[str]) -> list[tuple]:
    """Arguments of `Chart.ellipses` for some of the ellipses."""
    columns = (column[rows].tolist() for column in found)
    return [(*centre, *radii, angle, note) for centre, radii, angle, note in zip(*columns, notes)]


def continuity(config: ContinuityConfig) -> None:
    """Neighbours among the codes, and walks between codes. Raises UserError: too few images, no one code an item."""
    captions, draw = runner.open_captions(config), np.random.default_rng(0)
    if len(captions.images) < config.neighbours + 2:
        raise UserError(f"{captions.source} has {len(captions)} images.", f"Give at least {config.neighbours + 2}.")
    if len(captions) > MOST_CODES:
        captions = captions.only(sorted(draw.permutation(len(captions))[:MOST_CODES].tolist()))
    run = runner.start(config, "continuity", networks_of(config.model))
    if run.embedder.model.n_embeddings > 1 or run.embedder.model.attention is not None:
        raise UserError(f"{config.model} has no one code an item.", "Name a model that compares single embeddings.")
    pairs = embed_pairs(run.embedder, captions)
    data, likeness = pairs.data, analyses.likeness_of(pairs.data)
    near = analyses.nearest_images(pairs.images.mean, config.neighbours)
    draw = np.random.default_rng(0)
    ends = [draw.choice(len(likeness), 2, replace=False).tolist() for _ in range(config.walks)]
    walks = [analyses.walk_between(pairs, *both, STEPS) for both in ends]
    some = draw.choice(len(likeness), min(config.shown, len(likeness)), replace=False).tolist()
    by, walked = analyses.of_neighbours(likeness, near), analyses.of_walks(likeness, walks)
    row = [
        *(f"{by[key]:.3f}" for key in ("likeness", "random", "most")), f"{walked['images']:.1f}",
        "" if walked["consecutive"] is None else f"{walked['consecutive']:.3f}",
        f"{walked['cosine'][STEPS // 2]:.3f}",
    ]  # fmt: skip
    headings = (f"{by['k']} neighbours", "random", "most similar", "images a walk", "in a row", "half-way, cosine")
    table = Table(headings, [row], "likeness of images by their captions", left=0)
    curves = {f"to the {end}": (range(STEPS), walked[f"to_{end}"]) for end in ("start", "end")}
    figure = line_figure("walks", "step of the walk", "likeness of the nearest image", curves)
    texts = data.flat()

    def card(images: Sequence[int], said: Sequence[str] = ()) -> Card:
        pictures = [one for i in images for one in picture_of(data.images, i, data.captions[i][0])]
        return Card("", pictures, [Cell(text) for text in said])

    page = Page(
        "Semantic continuity",
        f"{config.model} on {config.data}, {len(likeness):,} images",
        [
            ("Likeness", [table, [figure]]),
            ("Walks", [[card(one.images, [texts[i] for i in one.captions]) for one in walks[: config.shown]]]),
            ("Images and their neighbours", [[card([row, *near[row].tolist()]) for row in some]]),
        ],
    )
    results = {"images": len(likeness), "neighbours": by, "walks": walked}
    run.finish(results, page, pairs.bad, captions.split)
