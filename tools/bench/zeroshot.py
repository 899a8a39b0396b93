"""Zero-shot evaluation with every filter and all K against the `all` filter alone, from images and class names.

    python -m tools.bench.zeroshot                                # random weights, synthetic images, 192 classes
    python -m tools.bench.zeroshot --model RUN --data data/imagenet/val

Nothing is cached: each repeat embeds every prompt and image again, like a first evaluation.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from probemb.cli.command import Parser, run_command


def main() -> None:
    parser = Parser(prog="python -m tools.bench.zeroshot", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a run, a folder or a hub name (default: ViT-Tiny-64, random weights)")
    parser.add_argument("--data", help="labelled images (default: 1,000 synthetic ones)")
    parser.add_argument("--classes", help="a class-name file (default: the one beside the data)")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        measure(options, Path(scratch))


def measure(options: argparse.Namespace, scratch: Path) -> None:
    """Load everything once, then time both variants in turn."""
    from probemb.cli.device import choose_device
    from probemb.data.labelled.images import find_images, resolve_classes
    from probemb.evaluation.embedding import Embedder
    from tools.bench.timing import report, time_in_turn
    from zeroshot.filtering.filters import FILTERS
    from zeroshot.filtering.outcome import Task, evaluate
    from zeroshot.filtering.prompts import read_templates

    device = choose_device("auto", "auto")
    model, tokenizer, transforms = load(options.model, device.name)
    embedder = Embedder(model, tokenizer, transforms.evaluate, device)
    images = find_images(options.data or synthetic_images(scratch))
    classes, labels = resolve_classes(images, options.classes)
    templates = read_templates(None)
    task = Task(images, labels, classes, templates)

    def variant(filters: list[str]):
        return lambda: evaluate(embedder, task, filters)

    variants = {"all": variant(["all"]), "every filter, every K": variant(list(FILTERS))}
    seconds = time_in_turn(variants, options.repeats)
    parts = {
        name: {f"{part} s": f"{spent:.2f}" for part, spent in run().seconds.items()} for name, run in variants.items()
    }
    title = f"zero-shot, {len(images):,} images, {len(classes):,} classes x {len(templates)} prompts"
    report(title, seconds, "all", "at most 1.2 times the `all` filter alone", parts)


def load(name: str | None, device: str):
    """The named model, or one with random weights: its speed is the same."""
    from probemb.models import create_model, create_tokenizer, create_transforms, load_model

    if name:
        return load_model(name, device=device)
    model = create_model("ViT-Tiny-64").to(device).eval()
    return model, create_tokenizer(model), create_transforms(model)


def synthetic_images(scratch: Path) -> str:
    """1,000 labelled images of the synthetic world, as shards."""
    from tools.make_scenes import Plan, make

    make(Plan(train=0, val=0), scratch / "scenes", workers=1)
    return str(scratch / "scenes" / "classes")


if __name__ == "__main__":
    run_command(main)
