"""Set algebra of embeddings: what mixing and erasing do to mean and variance.

    python -m zeroshot.set_algebra --model runs/pcme --data data/flickr8k --split test
    python -m zeroshot.set_algebra --model runs/scenes --data data/scenes --split val      # nested captions are known

Does the embedding of a mixed image cover the intersection of the two images', and does an image lie in the same image
with a part erased? Measures against unrelated images, σ against the share of erased pixels and words, and examples as
ellipses. Prints tables and writes results.json and report.html. Source: PCME §4.4, Figures 7 and 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config, to_dict
from zeroshot.config import AlgebraConfig
from zeroshot.opening import OUTPUTS, Opened, open_analysis, read_pixels

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.evaluation.analyses.plane import Ellipses
    from probemb.gaussian import Gaussian

PROG = "python -m zeroshot.set_algebra"
DESCRIPTION = "What mixing and erasing of images and captions do to their embeddings; writes results.json, report.html."
GENERATOR = "probemb set algebra"
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
ERASED_EXAMPLE = 0.3  # share erased of the examples
MIXES = {"pixels": ("cutmix", "mixup"), "regions": ("cutmix",)}  # the first is drawn
MOST_NESTED = 600  # captions that are compared with each other


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; wrong options are refused before the model is loaded."""
    config = parse_config(AlgebraConfig, PROG, DESCRIPTION, argv)
    opened = open_analysis(config, "set_algebra", GENERATOR)
    from probemb.cli.results import write_json
    from zeroshot.reports.set_algebra import print_tables, write_report

    results = measure(config, opened)
    print_tables(results)
    opened.out.mkdir(parents=True, exist_ok=True)
    write_json(opened.out / OUTPUTS[0], results, GENERATOR)
    write_report(opened.out / OUTPUTS[1], results, GENERATOR)
    print(f"\nwritten: {opened.out / OUTPUTS[0]}, {opened.out / OUTPUTS[1]}", flush=True)
    return 0


def measure(config: AlgebraConfig, opened: Opened) -> dict:
    """Everything that results.json holds."""
    import torch

    from probemb.evaluation.analyses.set_algebra import erasing, mixing
    from probemb.evaluation.uncertainty import erase_pixels, erase_regions, erase_words

    embedder, captions = opened.embedder, opened.captions
    rows, read = read_pixels(opened, config.inputs, config.seed)
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
    return {
        "config": to_dict(config) | {"split": captions.split},
        "inputs": len(rows),
        "mixing": {name: mixing(g, whole, whole[partner]) for name, g in mixed.items()},
        "erasing": {side: erasing(whole, gone, SHARES), "words": erasing(written, unsaid, SHARES)},
        "whole": {side: sigma(whole), "words": sigma(written)},
        "nested": nested_captions(opened, rows),
        "examples": examples(
            config.examples, rows, captions.images.places, whole, partner, mixed["cutmix"],
            gone[SHARES.index(ERASED_EXAMPLE)],
        ),
    }  # fmt: skip


def mix(first: Tensor, second: Tensor, how: str) -> Tensor:
    """Normalised images (N, 3, H, W), or regions (N, R, F), of both mixed.

    "mixup" is the mean of both; "cutmix" the left half of one and the right half of the other, or every other region.
    """
    if how == "mixup":
        return (first + second) / 2
    if first.ndim == 3:
        out = first.clone()
        out[:, 1::2] = second[:, 1::2]
        return out
    out, middle = first.clone(), first.shape[-1] // 2
    out[..., middle:] = second[..., middle:]
    return out


def sigma(g: Gaussian) -> float:
    """Mean of the geometric mean of σ."""
    from probemb.evaluation.analyses.set_algebra import geometric_sigma

    return float(geometric_sigma(g).mean())


def nested_captions(opened: Opened, rows: Sequence[int]) -> dict | None:
    """`nested` of scenes' captions; None for other data."""
    from probemb.evaluation.analyses.set_algebra import nested
    from probemb.evaluation.embed_pairs import exact_match

    captions = opened.captions
    if captions.scenes is None:
        return None
    texts = [(text, row) for row in rows for text in captions.captions[row]][:MOST_NESTED]
    few = captions.only(list(dict.fromkeys(row for _, row in texts)))
    match = exact_match(few, range(len(few)))[:, : len(texts)]
    embedder = opened.embedder
    return nested(embedder.texts([text for text, _ in texts], "nested captions"), match)


def examples(
    n: int, rows: Sequence[int], places: Sequence, whole: Gaussian, partner: Tensor, mixed: Gaussian, erased: Gaussian
) -> list[dict]:  # fmt: skip
    """The first pairs and what became of them, as ellipses of 50 % in the plane of the whole images."""
    from probemb.evaluation.analyses.plane import ellipses, plane_of

    plane, found = plane_of(whole.mean), []
    for i in range(min(n, len(rows))):
        j = int(partner[i])
        shapes = {"first": whole[[i]], "second": whole[[j]], "mixed": mixed[[i]], "erased": erased[[i]]}
        drawn = {name: ellipses(g, plane) for name, g in shapes.items()}
        found.append(
            {
                "names": [places[rows[i]].name, places[rows[j]].name],
                "variance_in_plane": plane.share,
                **{name: as_dict(one) for name, one in drawn.items()},
            }
        )
    return found


def as_dict(one: Ellipses) -> dict:
    """The only one of these ellipses, for JSON."""
    return {"centre": one.centre[0].tolist(), "radii": one.radii[0].tolist(), "angle": float(one.angle[0])}


if __name__ == "__main__":
    run_command(main)
