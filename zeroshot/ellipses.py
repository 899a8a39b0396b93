"""Embeddings in a plane, each as the ellipse that holds half of its mass.

    python -m zeroshot.ellipses --model runs/pcme-cub --data data/cub --generic "this bird has unk unk unk"
    python -m zeroshot.ellipses --model runs/x --data data/flickr8k --split test --groups 6

Draws images and captions of some classes, or of some images where the data has no classes: in two dimensions the space
itself, else the plane of the means' two largest principal components, with projected covariances. A generic caption is
drawn with its region of 99 %. Prints a table and writes results.json and report.html. Source: PCME §4.4, Figure 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config, to_dict
from probemb.errors import UserError
from zeroshot.config import EllipsesConfig
from zeroshot.opening import OUTPUTS, Opened, open_analysis

if TYPE_CHECKING:
    from probemb.evaluation.analyses.plane import Ellipses

PROG = "python -m zeroshot.ellipses"
DESCRIPTION = "Images and captions of some classes as ellipses in a plane; writes results.json and report.html."
GENERATOR = "probemb ellipses"
LEVEL, GENERIC_LEVEL = 0.5, 0.99


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; wrong options are refused before the model is loaded."""
    config = parse_config(EllipsesConfig, PROG, DESCRIPTION, argv)
    opened = open_analysis(config, "ellipses", GENERATOR)
    from probemb.cli.results import write_json
    from zeroshot.reports.ellipses import print_table, write_report

    results = measure(config, opened)
    print_table(results)
    opened.out.mkdir(parents=True, exist_ok=True)
    write_json(opened.out / OUTPUTS[0], results, GENERATOR)
    write_report(opened.out / OUTPUTS[1], results, GENERATOR)
    print(f"\nwritten: {opened.out / OUTPUTS[0]}, {opened.out / OUTPUTS[1]}", flush=True)
    return 0


def choose(config: EllipsesConfig, opened: Opened) -> dict[str, list[int]]:
    """Rows of the images of every group: classes, or single images, drawn from the seed. Raises UserError."""
    import random

    captions, draw = opened.captions, random.Random(config.seed)
    names = captions.classes or [place.name for place in captions.images.places]
    of: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        of.setdefault(name, []).append(row)
    if len(of) < 2:
        raise UserError(f"{captions.source} has fewer than two groups of images.", "Name other data or another split.")
    chosen = draw.sample(sorted(of), min(config.groups, len(of)))
    return {name: draw.sample(of[name], min(config.per_group, len(of[name]))) for name in sorted(chosen)}


def measure(config: EllipsesConfig, opened: Opened) -> dict:
    """Everything that results.json holds."""
    from probemb.evaluation.analyses.plane import ellipses, plane_of
    from probemb.evaluation.analyses.set_algebra import geometric_sigma
    from probemb.evaluation.embed_pairs import embed_pairs
    from probemb.gaussian import Gaussian

    groups = choose(config, opened)
    rows = [row for some in groups.values() for row in some]
    group_of = [name for name, some in groups.items() for _ in some]
    data = opened.captions.only(rows)
    pairs = embed_pairs(opened.embedder, data)
    plane = plane_of(Gaussian.cat([pairs.images, pairs.texts]).mean)
    texts = [text for i in pairs.kept for text in data.captions[i]]
    sides = {
        "images": (pairs.images, [data.images.places[i].name for i in pairs.kept], [group_of[i] for i in pairs.kept]),
        "captions": (pairs.texts, texts, [group_of[pairs.kept[i]] for i in pairs.owner.tolist()]),
    }
    found = {
        side: {
            "labels": labels,
            "groups": names,
            "sigma": geometric_sigma(g),
            **as_dict(ellipses(g, plane, LEVEL)),
        }
        for side, (g, labels, names) in sides.items()
    }
    return {
        "config": to_dict(config) | {"split": data.split},
        "groups": list(groups),
        "dimensions": pairs.images.shape[1],
        "variance_in_plane": plane.share,
        "level": LEVEL,
        **found,
        "generic": generic(config.generic, opened, plane, pairs) if config.generic is not None else None,
    }


def generic(text: str, opened: Opened, plane, pairs) -> dict:
    """The generic caption's ellipse, how many captions and images have their mean in it, and how wide it is."""
    from probemb.evaluation.analyses.plane import ellipses
    from probemb.evaluation.analyses.set_algebra import geometric_sigma

    one = opened.embedder.tokens(opened.embedder.tokenizer([text]))
    shape = ellipses(one, plane, GENERIC_LEVEL)
    shares = {
        f"{side}_inside": float(shape.holds((g.mean.double() - plane.origin) @ plane.axes).double().mean())
        for side, g in (("captions", pairs.texts), ("images", pairs.images))
    }
    wider = float((geometric_sigma(one) > geometric_sigma(pairs.texts)).double().mean())
    return {
        "text": text, "level": GENERIC_LEVEL, "sigma": geometric_sigma(one), "wider_than_captions": wider, **shares,
        **as_dict(shape),
    }  # fmt: skip


def as_dict(shapes: Ellipses) -> dict:
    """For JSON."""
    return {"centre": shapes.centre, "radii": shapes.radii, "angle": shapes.angle}


if __name__ == "__main__":
    run_command(main)
