"""From a model, images and class names to an `Outcome`: embed every prompt and image once, then score all filters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from probemb.cli.device import Placement, loader_workers
from probemb.cli.progress import silent
from probemb.data.image_loader import ImageBatches, in_both
from probemb.data.labelled.classes import Classes
from probemb.data.labelled.images import LabelledImages
from probemb.errors import UserError
from probemb.evaluation.classification import encode_images, prompt_texts
from probemb.gaussian import Gaussian
from zeroshot.evaluation import Evaluation, SelectionData, evaluate_embeddings
from zeroshot.filters import FilterOptions, Selection
from zeroshot.prompts import embed_texts


@dataclass(frozen=True)
class Outcome:
    """An evaluation with what it was made from.

    Attributes:
        evaluation: the numbers.
        images: embeddings of the images that could be read, Gaussian (N, D).
        labels: (N,) their classes; places: (N,) their indices in the data.
        bad: (name, reason) of the images that were left out.
        cache: what became of the prompt cache, and a message about it.
        seconds: spent on "text", "images", "selection images" and "filters".
    """

    evaluation: Evaluation
    images: Gaussian
    labels: torch.Tensor
    places: list[int]
    bad: list[tuple[str, str]]
    cache: tuple[str, str]
    seconds: dict[str, float]


def evaluate(
    model: torch.nn.Module,
    tokenizer,
    transform,
    images: LabelledImages,
    labels: Sequence[int],
    classes: Classes,
    templates: Sequence[str],
    filters: Sequence[str],
    *,
    options: FilterOptions | None = None,
    selection: Selection | None = None,
    select_images: tuple[LabelledImages, Sequence[int]] | None = None,
    placement: Placement | None = None,
    batch_size: int = 64,
    text_batch_size: int = 256,
    workers: int | None = 0,
    max_bad: float = 0.05,
    cache: str | Path | None = None,
    show=None,
) -> Outcome:
    """Embed every prompt and every image once, then score all filters.

    Args:
        transform: PIL image -> (3, H, W); labels: index into `classes` for each of `images`.
        filters: names in FILTERS, in the order of the rows.
        select_images: images with labels to choose K on, for selection "train".
        show: context manager (title, total) -> advance, as `probemb.cli.progress.progress`; None is silent.

    Raises:
        UserError: too many unreadable images, folds that are not possible, embeddings that are not finite, images that
            are both evaluated and chosen on.
    """
    if select_images is not None and (known := in_both(select_images[0], images)):
        raise UserError(
            f"{len(known):,} of the images in {select_images[0].source} are also evaluated (such as {known[0]}).",
            "Choose K on other images, or on parts of these with --select-on folds:5.",
        )
    show = show or silent
    options, selection = options or FilterOptions(), selection or Selection("oracle")
    placement = placement or Placement("cpu", None, "fp32")
    seconds: dict[str, float] = {}
    clock = time.monotonic()

    def lap(what: str) -> None:
        nonlocal clock
        now = time.monotonic()
        seconds[what], clock = now - clock, now

    texts = prompt_texts(classes.names, templates)
    with show("prompts", len(texts)) as advance:
        embedded = embed_texts(
            model, tokenizer, texts, cache=cache, batch_size=text_batch_size, device=placement.device,
            autocast=placement.autocast, progress=advance,
        )  # fmt: skip
    prompts = _shaped(embedded.gaussian, len(classes), len(templates))
    lap("text")

    def embed(found: LabelledImages, marks: Sequence[int], title: str):
        return _embed_images(model, transform, found, marks, title, placement, batch_size, workers, max_bad, show)

    gaussian, kept_labels, places, bad = embed(images, labels, "images")
    lap("images")
    select_data: SelectionData | None = None
    if select_images is not None:
        other, other_labels, _, _ = embed(*select_images, "choosing")
        select_data = SelectionData(other.mean.to(placement.device), other_labels)
        lap("selection images")
    evaluation = evaluate_embeddings(
        gaussian.mean.to(placement.device), kept_labels, [images.places[i].name for i in places],
        prompts.to(placement.device), filters, options=options, selection=selection, select_data=select_data,
    )  # fmt: skip
    lap("filters")
    return Outcome(evaluation, gaussian, kept_labels, places, bad, (embedded.cache, embedded.message), seconds)


def _shaped(gaussian: Gaussian, n_classes: int, n_prompts: int) -> Gaussian:
    shape = (n_classes, n_prompts, gaussian.shape[-1])
    return Gaussian(gaussian.mean.reshape(shape), gaussian.log_var.reshape(shape))


def _embed_images(model, transform, images, labels, title, placement, batch_size, workers, max_bad, show):
    batches = ImageBatches(
        images, transform, batch_size, loader_workers(workers, len(images), placement.device), max_bad
    )
    with show(title, len(images)) as advance:
        gaussian = encode_images(
            model.encode_image, batches, device=placement.device, autocast=placement.autocast, progress=advance
        )
    kept = torch.tensor([int(labels[i]) for i in batches.kept], dtype=torch.int64)
    return gaussian, kept, batches.kept, batches.bad
