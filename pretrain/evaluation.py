"""Zero-shot accuracy while training: every rank takes its share of the images and of the prompts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from pretrain.config import Config
from probemb import Gaussian, UserError, distributed
from probemb.data.image_loader import ImageBatches, Images, refuse_too_many
from probemb.data.labelled.classes import SINGLE_TEMPLATE, imagenet_templates, prompt_texts
from probemb.data.labelled.images import find_images, remarks, resolve_classes
from probemb.evaluation.classification import class_vectors, true_ranks


class Evaluator:
    """Top-1 and top-5 accuracy of the engine's model on labelled images.

    Args:
        config: of the run.
        path: the images: class folders or shards.
        transform: PIL image -> (3, H, W).
        tokenizer: list of n texts -> (n, L).
        device, rank, world_size: of this process.

    Raises:
        UserError: the images are missing, or their classes do not fit.
    """

    def __init__(
        self,
        config: Config,
        path: str,
        transform: Callable,
        tokenizer: Callable,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
    ):
        given = config.evaluate
        self.device, self.batch_size = device, given.batch_size
        try:
            images = find_images(path, exif=config.data.exif)
            classes, labels = resolve_classes(images, None)
        except UserError as error:  # whose remedy may name options of zeroshot.imagenet
            raise UserError(
                error.what,
                "Name images in class folders, or shards with KEY.cls, with --evaluate.classes, or leave them out with "
                "--no-evaluate.classes. docs/data.md (Labelled images) says how to sort ImageNet's.",
            ) from error
        for line in remarks(labels, classes) if rank == 0 else ():
            print(f"classes {line}", flush=True)
        templates = [SINGLE_TEMPLATE] if given.templates == "single" else imagenet_templates()
        self.shape = (len(classes.names), len(templates))
        self.tokens = tokenizer(prompt_texts(classes.names, templates))  # (C P, L)
        # Spread evenly over the data, as images are often sorted by class.
        n = min(len(images), given.max_images or len(images))
        if n < world_size:
            raise UserError(
                f"There are {n} evaluation images for {world_size} ranks.",
                "Raise evaluate.max_images, name more images, or leave evaluate.classes out.",
            )
        chosen = [i * len(images) // n for i in range(n)][rank::world_size]
        mine = replace(images, places=[images.places[i] for i in chosen], marks=[images.marks[i] for i in chosen])
        self.labels = torch.tensor([labels[i] for i in chosen])
        self.images = RankImages(mine, transform, config, n, world_size)

    @torch.no_grad()
    def __call__(self, engine, meet: Callable[[], object] = lambda: None) -> dict[str, float]:
        """{"zeroshot_top1", "zeroshot_top5"} in [0, 1], the same on every rank; collective.

        All ranks call `meet` between batches, equally often; what it raises ends the evaluation.
        """
        engine.eval()
        # All ranks call the engine equally often: ZeRO-3 gathers its parameters in every call.
        tokens = engine.module.model.cut_padding(self.tokens)
        prompts = encode_texts(engine, tokens, self.batch_size, self.device, meet)
        image = self.images.encode(engine, self.device, meet)
        engine.train()
        vectors = class_vectors(prompts.mean.view(*self.shape, -1), torch.ones(self.shape))
        labels = self.labels[self.images.kept]
        ranks = true_ranks(image.mean, vectors, labels)
        counts = {"n": float(len(labels)), "top1": float((ranks < 1).sum()), "top5": float((ranks < 5).sum())}
        mean = distributed.mean_over_ranks(counts, self.device)
        return {f"zeroshot_{k}": mean[k] / mean["n"] for k in ("top1", "top5")}


class RankImages:
    """This rank's share of `n` evaluation images, which the run's data workers decode.

    Attributes:
        kept: numbers, in the share, of those that were readable.
    """

    def __init__(self, share: Images, transform: Callable, config: Config, n: int, world_size: int):
        size, workers = config.evaluate.batch_size, config.data.workers
        self._batches = ImageBatches(share, transform, size, workers, max_bad=1.0)  # judged over all ranks
        self._n, self._calls, self._max_bad = n, -(-n // (world_size * size)), config.evaluate.max_bad
        self.kept = self._batches.kept

    def encode(self, engine, device: torch.device, meet: Callable[[], object]) -> Gaussian:
        """The readable ones, on the CPU; collective: all ranks call the engine and `meet` equally often.

        Raises:
            UserError: too many of all ranks' images are unreadable.
        """
        parts, side = [], engine.module.model.image_size
        with closing(iter(self._batches)) as batches:
            for _ in range(self._calls):
                meet()
                batch = next(batches, None)  # other ranks may have more
                pixels = torch.zeros(1, 3, side, side) if batch is None else batch
                found = engine(pixels.to(device, non_blocking=True), None)
                parts.append([part[: 0 if batch is None else len(batch)] for part in found])
        images = self._batches.images
        bad = distributed.all_of(self._batches.bad[len(images.bad) :])
        total = self._n + len(images.bad)
        refuse_too_many([*images.bad, *chain(*bad)], total, images.source, self._max_bad, "--evaluate.max-bad")
        return Gaussian(*(torch.cat(part).cpu() for part in zip(*parts)))


def encode_texts(
    engine, tokens: Tensor, batch_size: int, device: torch.device, meet: Callable[[], object] = lambda: None
) -> Gaussian:
    """All texts, on the CPU; each rank encodes an equal share, and calls `meet` before each batch."""
    share = -(-len(tokens) // distributed.world_size())
    first = distributed.rank() * share
    index = torch.arange(first, first + share).clamp(max=len(tokens) - 1)
    parts = []
    for i in index.split(batch_size):
        meet()
        parts.append(engine(None, tokens[i].to(device)))
    return Gaussian(*(distributed.gather(torch.cat(part))[: len(tokens)].cpu() for part in zip(*parts)))
