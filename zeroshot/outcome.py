"""Zero-shot evaluation of a model: embed every prompt and image once, then score all filters."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from probemb.data.image_loader import in_both
from probemb.data.labelled.classes import Classes
from probemb.data.labelled.images import LabelledImages
from probemb.data.labelled.prompts import prompt_texts
from probemb.errors import UserError
from probemb.evaluation.embedding import Embedder
from probemb.gaussian import Gaussian
from zeroshot.evaluation import Evaluation, SelectionData, evaluate_embeddings
from zeroshot.filters import FilterOptions, Selection
from zeroshot.prompts import embed_prompts


@dataclass(frozen=True)
class Outcome:
    """An evaluation with its embeddings and labels.

    Attributes:
        evaluation: the numbers.
        images: embeddings of the images that could be read, Gaussian (N, D).
        labels: (N,) their classes; places: (N,) their indices in the data.
        bad: (name, reason) of the images that were left out.
        cache: state of the prompt cache (see `PromptEmbeddings`), and a message about it.
        seconds: spent on "text", "images", "selection images" and "filters".
    """

    evaluation: Evaluation
    images: Gaussian
    labels: torch.Tensor
    places: list[int]
    bad: list[tuple[str, str]]
    cache: tuple[str, str]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Task:
    """The images to classify, and the classes to choose from.

    Attributes:
        images: N labelled images; labels: for each the index of its class.
        classes: C classes; templates: P prompt templates.
    """

    images: LabelledImages
    labels: Sequence[int]
    classes: Classes
    templates: Sequence[str]


def evaluate(
    embedder: Embedder,
    task: Task,
    filters: Sequence[str],
    *,
    options: FilterOptions = FilterOptions(),  # noqa: B008 - frozen
    selection: Selection = Selection("oracle"),  # noqa: B008 - frozen
    select_images: tuple[LabelledImages, Sequence[int]] | None = None,
    cache: str | Path | None = None,
) -> Outcome:
    """Embed every prompt and every image once, then score all filters.

    Args:
        filters: names in FILTERS, in the order of the rows.
        select_images: images with labels to choose K on, for selection "train".
        cache: folder of cached prompt embeddings, or None.

    Raises:
        UserError: too many unreadable images, folds that are not possible, embeddings that are not finite, images that
            are both evaluated and chosen on.
    """
    images = task.images
    if select_images is not None and (known := in_both(select_images[0], images)):
        raise UserError(
            f"{len(known):,} of the images in {select_images[0].source} are also evaluated (such as {known[0]}).",
            "Choose K on other images, or on parts of these with --select-on folds:5.",
        )
    device, seconds = embedder.device.name, {}
    with timed(seconds, "text"):
        prompts = embed_prompts(embedder, prompt_texts(task.classes.names, task.templates), cache)
    with timed(seconds, "images"):
        gaussian, kept, bad = embedder.images(images)
        labels = torch.tensor([int(task.labels[i]) for i in kept])
    select_data: SelectionData | None = None
    if select_images is not None:
        with timed(seconds, "selection images"):
            other, rows, _ = embedder.images(select_images[0], "choosing")
            select_data = SelectionData(other.mean.to(device), torch.tensor([int(select_images[1][i]) for i in rows]))
    with timed(seconds, "filters"):
        evaluation = evaluate_embeddings(
            gaussian.mean.to(device), labels, [images.places[i].name for i in kept],
            _by_class(prompts.gaussian, len(task.classes)).to(device), filters, options=options, selection=selection,
            select_data=select_data,
        )  # fmt: skip
    return Outcome(evaluation, gaussian, labels, kept, bad, (prompts.cache, prompts.message), seconds)


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Store the seconds that the block takes under `name`."""
    start = time.monotonic()
    yield
    seconds[name] = time.monotonic() - start


def _by_class(gaussian: Gaussian, n_classes: int) -> Gaussian:
    """(C P, D) -> (C, P, D)."""
    shape = (n_classes, -1, gaussian.shape[-1])
    return Gaussian(gaussian.mean.reshape(shape), gaussian.log_var.reshape(shape))
