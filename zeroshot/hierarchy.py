"""Captions of an image from general to specific: does a model order them, and does a walk to a root find them?

    python -m zeroshot.hierarchy --model runs/prolip --data hierarcaps_test.csv --images data/coco/val2014

Takes HierarCaps' table, or other data with the same number of captions for every image, in this order. Prints a
table and writes results.json. Source: HierarCaps (ECCV 2024), ProLIP §4.
"""

from __future__ import annotations

from collections.abc import Sequence

from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config, to_dict
from probemb.errors import UserError
from zeroshot.config import AnalysisConfig
from zeroshot.opening import OUTPUTS, Opened, open_analysis

PROG = "python -m zeroshot.hierarchy"
DESCRIPTION = "Captions from general to specific: how well a model orders and finds them; writes results.json."
GENERATOR = "probemb hierarchy"
WALKS = {
    "walk": "to the embedding of an empty text",
    "walk-inclusion": "to a root between that and the caption that includes the image the most",
    "radius": "the closest within each radius around the embedding of an empty text",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; wrong data is refused before the model is loaded."""
    config = parse_config(AnalysisConfig, PROG, DESCRIPTION, argv)
    opened = open_analysis(config, "hierarchy", GENERATOR)
    from probemb.cli.results import write_json

    results = {"config": to_dict(config), **measure(opened)}
    print_results(results)
    opened.out.mkdir(parents=True, exist_ok=True)
    write_json(opened.out / OUTPUTS[0], results, GENERATOR)
    print(f"\nwritten: {opened.out / OUTPUTS[0]}", flush=True)
    return 0


def measure(opened: Opened) -> dict:
    """The content of results.json. Raises UserError: images with different numbers of captions, or with one."""
    import torch

    from probemb.evaluation.analyses.hierarchy import including_roots, level_correlation, score, walk, within_radius
    from probemb.evaluation.embed_pairs import embed_pairs

    lengths = {len(texts) for texts in opened.captions.captions}
    if len(lengths) > 1 or lengths == {1}:
        raise UserError(
            f"{opened.captions.source} has images with {min(lengths)} to {max(lengths)} captions.",
            "Name data with the same number of captions, two or more, for every image, general to specific.",
        )
    pairs = embed_pairs(opened.embedder, opened.captions)
    texts = [text for i in pairs.kept for text in opened.captions.captions[i]]
    root = opened.embedder.texts([""], "root").mean[0]
    number = {text: n for n, text in enumerate(dict.fromkeys(texts))}
    numbers = torch.tensor([number[text] for text in texts])
    numbers_NL = numbers.view(len(pairs.images), -1)
    images, captions, u = pairs.images.mean, pairs.texts.mean, pairs.texts.uncertainty().view(numbers_NL.shape)
    found = {
        "walk": walk(images, captions, numbers, root.expand_as(images)),
        "walk-inclusion": walk(images, captions, numbers, including_roots(pairs.images, pairs.texts, root)),
        "radius": within_radius(images, captions, numbers, root),
    }
    return {
        "images": len(images), "captions": len(texts), "distinct": len(number),
        "images_left_out": [{"name": name, "reason": reason} for name, reason in pairs.bad],
        "rows": [{"walk": name, **score(seen, numbers_NL)._asdict()} for name, seen in found.items()],
        "uncertainty": u.double().mean(0),
        "u_image": float(pairs.images.uncertainty().double().mean()),
        "level_correlation": {
            "radius": level_correlation((captions - root).norm(dim=-1).view(u.shape)),
            "certainty": level_correlation(-u),
        },
    }  # fmt: skip


def print_results(results: dict) -> None:
    """A table and two lines."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{results['images']:,} images, {results['distinct']:,} distinct captions, percent")
    for heading in ("found", "precision", "recall", "any"):
        table.add_column(heading, justify="left" if heading == "found" else "right")
    for row in results["rows"]:
        table.add_row(f"{row['walk']}: {WALKS[row['walk']]}", *(f"{100 * row[key]:.2f}" for key in
                      ("precision", "recall", "any")))  # fmt: skip
    Console(width=120).print(table)
    correlation = results["level_correlation"]
    print(
        f"Kendall's tau with the level, mean over images: distance to the root {correlation['radius']:+.3f}, -u "
        f"{correlation['certainty']:+.3f}\nmean u from general to specific: "
        f"{', '.join(f'{u:.4g}' for u in results['uncertainty'].tolist())}; of the images {results['u_image']:.4g}"
    )


if __name__ == "__main__":
    run_command(main)
