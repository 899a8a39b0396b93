"""Semantic continuity: do neighbours among the codes, and what lies between two codes, mean something similar?

    python -m tools.continuity --model runs/jwae --data data/flickr8k --split test
    python -m tools.continuity --model runs/jwae --model runs/vse --data data/scenes --split val --walks 12

Neighbours: of every image its nearest images, and how alike their captions are, beside random images (the floor) and
the most similar ones (the ceiling). Walks: from one image's code to another's in even steps, with the nearest image
and caption of each step, in between other than the ends; how alike those of consecutive steps are, and how the likeness
to the start turns into that to the end. Likeness of two images is the cosine of their captions' tf-idf, which no model
has seen as such; on the synthetic scenes it is the share of an image's captions that are true of the other. Writes
continuity.json and report.html. Source: Mahajan et al., jWAE, Fig. 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.data.captions.dataset import CaptionDataset
    from probemb.evaluation.embed_pairs import EmbeddedPairs

PROG = "python -m tools.continuity"
GENERATOR = "probemb tools.continuity"
OUTPUTS = ("continuity.json", "report.html")
MOST = 5000  # images


class Walk(NamedTuple):
    """From one image to another, S steps with both ends.

    start, end        rows of the images
    images, captions  (S,) rows of the nearest ones to each step's code
    cosines           (S,) of that image's code
    """

    start: int
    end: int
    images: list[int]
    captions: list[int]
    cosines: list[float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; wrong options are refused before a model is loaded."""
    parser = Parser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", default=[], help="a run, a model folder or a hub name; repeatable")
    parser.add_argument("--data", help="images with captions, as for zeroshot.retrieval")
    parser.add_argument("--images", help="folder of the images that the data names")
    parser.add_argument("--split", default="auto", help="auto: test of data with several splits, else all (auto)")
    parser.add_argument("--neighbours", type=int, default=5, help="of every image (5)")
    parser.add_argument("--walks", type=int, default=100, help="walks that are measured (100)")
    parser.add_argument("--shown", type=int, default=6, help="walks, and images with their neighbours, shown (6)")
    parser.add_argument("--steps", type=int, default=7, help="of a walk, with both ends (7)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of images (0)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (auto)")
    parser.add_argument("--out", type=Path, default=Path("continuity"), help="folder (continuity)")
    o = parser.parse_args(argv)
    for name, least in (("neighbours", 1), ("walks", 1), ("shown", 0), ("steps", 3)):
        if getattr(o, name) < least:
            raise UserError(f"--{name} is {getattr(o, name)}.", f"Give at least {least}.")
    if not o.model or not o.data:
        raise UserError("--model or --data is missing.", f"Name both: `{PROG} --model runs/x --data PATH`.")
    from probemb.cli.results import claim_files, write_json
    from probemb.data.captions.find import find_captions

    captions = chosen(find_captions(o.data, o.split, o.images), o.seed, o.neighbours)
    claim_files(o.out, OUTPUTS, GENERATOR)
    results, shown = [], []
    for name in o.model:
        result, parts = evaluate(name, captions, o)
        results.append(result)
        shown.append({"model": name, **parts})
        print(describe(result), flush=True)
    about = {"data": o.data, "split": captions.split, "images": len(captions), "seed": o.seed, "steps": o.steps}
    write_json(o.out / OUTPUTS[0], {"config": about | {"neighbours": o.neighbours}, "models": results}, GENERATOR)
    from probemb.reports.pages import write_page

    page = Path(__file__).with_name("continuity.html")
    write_page(
        o.out / OUTPUTS[1], page, GENERATOR, about=about, results=results, shown=shown, charts=chart(results),
        half_way=half_way,
    )  # fmt: skip
    print(f"\nwritten: {o.out / OUTPUTS[0]}, {o.out / OUTPUTS[1]}", flush=True)
    return 0


def chosen(captions: CaptionDataset, seed: int, neighbours: int) -> CaptionDataset:
    """At most MOST images, drawn by the seed. Raises UserError: too few of them."""
    import numpy as np

    if len(captions.images) < neighbours + 2:
        raise UserError(f"{captions.source} has {len(captions)} images.", f"Give at least {neighbours + 2}.")
    if len(captions) <= MOST:
        return captions
    return captions.only(sorted(np.random.default_rng(seed).permutation(len(captions))[:MOST].tolist()))


def evaluate(name: str, captions: CaptionDataset, o) -> tuple[dict, dict]:
    """Measurements of a model, and what the page shows of it. Raises UserError: no one code an item."""
    import numpy as np

    from probemb.cli.device import choose_device
    from probemb.cli.progress import progress
    from probemb.evaluation.embed_pairs import embed_pairs
    from probemb.evaluation.embedding import Embedder
    from probemb.models import as_one, load_model, networks_of

    device = choose_device(o.device, "auto")
    loaded = [load_model(network, device.name) for network in networks_of(name)]
    model, first = as_one([one.model for one in loaded]), loaded[0]
    if model.n_embeddings > 1:
        raise UserError(f"{name} has {model.n_embeddings} embeddings an item.", "Name a model with one code an item.")
    if model.attention is not None:
        raise UserError(
            f"{name} compares the tokens of images and texts, and its single embeddings were not trained.",
            "Name a model with one code an item.",
        )
    embedder = Embedder(model, first.tokenizer, first.transforms.evaluate, device, workers=None, show=progress)
    pairs = embed_pairs(embedder, captions)
    likeness = likeness_of(captions, pairs.kept)
    near = nearest_images(pairs.images.mean, o.neighbours)
    rng = np.random.default_rng(o.seed)
    walks = [walk(pairs, *rng.choice(len(likeness), 2, replace=False).tolist(), o.steps) for _ in range(o.walks)]
    result = {"model": name, "neighbours": of_neighbours(likeness, near), "walks": of_walks(likeness, walks)}
    some = rng.choice(len(likeness), min(o.shown, len(likeness)), replace=False).tolist()
    return result, pictures_of(captions, pairs, near, walks[: o.shown], some)


def likeness_of(captions: CaptionDataset, kept: Sequence[int]) -> Tensor:
    """Similarity of the meanings of images, by their captions alone, (N, N) in [0, 1]."""
    import torch
    from torch.nn import functional as F

    if captions.scenes is not None:
        from probemb.evaluation.embed_pairs import exact_match

        true_NM = exact_match(captions, kept).float()
        owner = torch.tensor([row for row, i in enumerate(kept) for _ in captions.captions[i]])
        counts = torch.bincount(owner, minlength=len(kept))
        return torch.zeros(len(kept), len(kept)).index_add_(1, owner, true_NM).div_(counts).T.contiguous()
    from probemb.losses import caption_tfidf

    together = [" ".join(captions.captions[i]) for i in kept]
    rows = torch.from_numpy(caption_tfidf(together).dense(range(len(together))))
    return (F.normalize(rows, dim=1) @ F.normalize(rows, dim=1).T).clamp(0, 1)


def nearest_images(codes_ND: Tensor, k: int) -> Tensor:
    """The k nearest others of every code by the cosine, (N, k)."""
    from torch.nn import functional as F

    unit = F.normalize(codes_ND.float(), dim=1)
    cosines = unit @ unit.T
    return cosines.fill_diagonal_(-2).topk(k, 1).indices


def walk(pairs: EmbeddedPairs, start: int, end: int, steps: int) -> Walk:
    """Even steps on the straight line between two images' codes; what is nearest by the cosine.

    In between neither of both ends counts, nor its captions: half-way they are equally near, so that rounding would
    choose.
    """
    import torch
    from torch.nn import functional as F

    images, texts = (F.normalize(x.mean.float(), dim=1) for x in (pairs.images, pairs.texts))
    share = torch.linspace(0, 1, steps)[:, None]
    codes = F.normalize((1 - share) * images[start] + share * images[end], dim=1)
    to_images, to_texts = codes @ images.T, codes @ texts.T
    to_images[1:-1, [start, end]] = -2
    to_texts[1:-1, (pairs.owner == start) | (pairs.owner == end)] = -2
    best, of_texts = to_images.max(1), to_texts.argmax(1)
    return Walk(start, end, best.indices.tolist(), of_texts.tolist(), best.values.tolist())


def of_neighbours(likeness: Tensor, near: Tensor) -> dict:
    """Mean likeness of an image to its neighbours, beside all other images and the k most similar ones."""
    n, k = near.shape
    others = likeness.clone().fill_diagonal_(-1)
    return {
        "k": k,
        "likeness": likeness.gather(1, near).mean().item(),
        "random": (likeness.sum() - likeness.diagonal().sum()).item() / (n * (n - 1)),
        "most": others.topk(k, 1).values.mean().item(),
    }


def of_walks(likeness: Tensor, walks: Sequence[Walk]) -> dict:
    """Means over walks.

    "consecutive": likeness of the nearest images of two steps in a row that differ; "to_start" and "to_end", (S,): of
    the nearest image of each step to both ends; "images": different ones met on a walk; "cosine", (S,): of the nearest
    image, low in between where codes leave holes.
    """
    import torch

    steps = [(a, b) for one in walks for a, b in zip(one.images, one.images[1:]) if a != b]
    return {
        "walks": len(walks),
        "consecutive": sum(float(likeness[a, b]) for a, b in steps) / len(steps) if steps else None,
        "to_start": torch.stack([likeness[one.start, one.images] for one in walks]).mean(0).tolist(),
        "to_end": torch.stack([likeness[one.end, one.images] for one in walks]).mean(0).tolist(),
        "images": sum(len(set(one.images)) for one in walks) / len(walks),
        "cosine": torch.tensor([one.cosines for one in walks]).mean(0).tolist(),
    }


def half_way(values: Sequence[float]) -> float:
    """The value of the middle step, or the mean of both middle ones."""
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2


def describe(result: dict) -> str:
    """The numbers of a model as lines of text."""
    near, walks = result["neighbours"], result["walks"]
    consecutive = "none" if walks["consecutive"] is None else f"{walks['consecutive']:.3f}"
    return (
        f"{result['model']}\n"
        f"  likeness of an image to its {near['k']} neighbours {near['likeness']:.3f} (random {near['random']:.3f}, "
        f"at most {near['most']:.3f})\n"
        f"  walks: {walks['images']:.1f} different images, likeness of consecutive ones {consecutive}, cosine of the "
        f"nearest image half-way {half_way(walks['cosine']):.3f}"
    )


def chart(results: Sequence[dict]) -> list:
    """Likeness of the nearest image to both ends along the walks, a chart for each model."""
    from probemb.reports.figures import BLUE, ORANGE, Chart

    charts = []
    for number, one in enumerate(results, 1):
        drawn = Chart(f"walks-{number}", x_label="step of the walk", y_label="likeness of the nearest image")
        steps = range(len(one["walks"]["to_start"]))
        for end, colour in (("start", BLUE), ("end", ORANGE)):
            drawn.line(steps, one["walks"][f"to_{end}"], f"to the {end}", colour, points=True)
        charts.append(drawn)
    return charts


def pictures_of(
    captions: CaptionDataset, pairs: EmbeddedPairs, near: Tensor, walks: Sequence[Walk], some: Sequence[int]
) -> dict:
    """Walks and neighbours as pictures with their captions, for the page."""
    from probemb.data.failures import BadSample
    from probemb.reports.pages import thumbnail

    texts = [text for i in pairs.kept for text in captions.captions[i]]

    def picture(row: int) -> dict:
        index = pairs.kept[row]
        try:
            source = thumbnail(captions.images.open(index))
        except BadSample:
            source = ""
        return {"src": source, "note": captions.captions[index][0], "kind": ""}

    return {
        "walks": [
            [{**picture(image), "caption": texts[text]} for image, text in zip(one.images, one.captions)]
            for one in walks
        ],
        "neighbours": [[picture(row), *(picture(other) for other in near[row].tolist())] for row in some],
    }


if __name__ == "__main__":
    run_command(main)
