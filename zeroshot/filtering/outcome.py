"""Zero-shot evaluation of a model: embed every prompt and image once, then score all filters."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from probemb.cli.device import loader_workers
from probemb.data.image_loader import in_both
from probemb.data.labelled.classes import Classes
from probemb.data.labelled.images import LabelledImages
from probemb.data.labelled.prompts import Templates, prompt_texts
from probemb.data.look_alikes import leave_out, same_picture
from probemb.errors import UserError
from probemb.evaluation.embedding import Embedder
from probemb.gaussian import Gaussian
from probemb.models.dual_encoder import DualEncoder
from probemb.models.inputs import unknown_words
from probemb.reports.text import printable
from zeroshot.filtering.evaluation import evaluate_embeddings
from zeroshot.filtering.filters import FilterOptions, Selection
from zeroshot.filtering.prompts import embed_prompts
from zeroshot.filtering.rows import Evaluation, SelectionData, shots_notice

UNKNOWN = 20  # unknown words that are named


class Scale(NamedTuple):
    """The factor of the cosines in a model's softmax over classes, and what it is in words."""

    value: float | None
    source: str


def softmax_scale(model: DualEncoder) -> Scale:
    """The trained temperature, or 2 a of a trained match probability sigmoid(-a d + b): -a d is 2 a cosine + what the
    classes share, if their variances are left out, as they are in the class vectors.
    """
    if model.trained_temperature is not None:
        return Scale(model.trained_temperature, "logit_scale")
    if model.config["match"] == "distance":
        return Scale(2 * model.match_numbers()[0], "2 a of the match probability (the loss trained no temperature)")
    return Scale(None, "none: the loss trained no temperature")


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
        notices: sentences about pictures that occur twice, and about classes with fewer images than --shots.
        scale: of the softmax over the classes, for the confidence of `all`.
    """

    evaluation: Evaluation
    images: Gaussian
    labels: torch.Tensor
    places: list[int]
    bad: list[tuple[str, str]]
    cache: tuple[str, str]
    seconds: dict[str, float]
    notices: list[str]
    scale: Scale


@dataclass(frozen=True)
class Task:
    """The images to classify, and the classes to choose from.

    Attributes:
        images: N labelled images; labels: for each the index of its class.
        classes: C classes; templates: P prompt templates, or the P prompts of each class.
    """

    images: LabelledImages
    labels: Sequence[int]
    classes: Classes
    templates: Templates


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
        filters: names in FILTERS or REWEIGHTED, in the order of the rows.
        select_images: images with labels to choose on, for selection "train".
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
    device, seconds, notices = embedder.device.name, {}, []
    if select_images is not None:
        with timed(seconds, "selection images"):
            select_images = _without_evaluated(embedder, select_images, images, notices)
    with timed(seconds, "text"):
        texts = prompt_texts(task.classes.names, task.templates)
        if words := unknown_words(embedder.tokenizer, texts):
            named = printable(", ".join(words[:UNKNOWN]))
            notices.append(
                f"{len(words):,} words of the prompts are unknown to the model (such as {named}), which reads them all "
                "alike"
            )
        prompts = embed_prompts(embedder, texts, cache)
    with timed(seconds, "images"):
        gaussian, kept, bad = embedder.images(images)
        labels = torch.tensor([int(task.labels[i]) for i in kept])
        groups = _same_pictures(embedder, images, kept, notices) if selection.folds else None
    select_data: SelectionData | None = None
    if select_images is not None:
        with timed(seconds, "selection images"):
            other, rows, _ = embedder.images(select_images[0], "choosing")
            chosen, names = [int(select_images[1][i]) for i in rows], [select_images[0].places[i].name for i in rows]
            select_data = SelectionData(other.mean.to(device), torch.tensor(chosen), names)
    scale = softmax_scale(embedder.model)
    with timed(seconds, "filters"):
        evaluation = evaluate_embeddings(
            gaussian.mean.to(device), labels, [images.places[i].name for i in kept],
            _by_class(prompts.gaussian, len(task.classes)).to(device), filters, options=options, selection=selection,
            select_data=select_data, groups=groups, temperature=scale.value,
        )  # fmt: skip
    notices += [line] if (line := shots_notice(evaluation.rows)) else []
    cache_state = (prompts.cache, prompts.message)
    return Outcome(evaluation, gaussian, labels, kept, bad, cache_state, seconds, notices, scale)


def _without_evaluated(
    embedder: Embedder,
    select_images: tuple[LabelledImages, Sequence[int]],
    evaluated: LabelledImages,
    notices: list[str],
) -> tuple[LabelledImages, list[int]]:
    """The images to choose K on that show no evaluated picture, and their labels. Raises UserError: too few."""
    images, labels = select_images
    workers = loader_workers(embedder.workers, len(images) + len(evaluated), embedder.device.name)
    rows, notice = leave_out(images, evaluated, workers, embedder.show)
    notices += [notice] * bool(notice)
    places, marks = [images.places[i] for i in rows], [images.marks[i] for i in rows]
    return replace(images, places=places, marks=marks), [int(labels[i]) for i in rows]


def _same_pictures(embedder: Embedder, images: LabelledImages, kept: list[int], notices: list[str]) -> list[int]:
    """For each embedded image the first one that shows the same picture, for folds."""
    workers = loader_workers(embedder.workers, len(images), embedder.device.name)
    leaders = same_picture(images, workers, embedder.show)
    groups = [leaders[i] for i in kept]
    if repeated := [i for i in kept if leaders[i] != i]:
        pair = (images.places[i].name for i in (leaders[repeated[0]], repeated[0]))
        notices.append(
            f"{len(repeated):,} of {len(kept):,} images ({len(repeated) / len(kept):.1%}) show the same picture as "
            f"another one (such as {' and '.join(pair)}), and are in its fold"
        )
    return groups


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
