"""Zero-shot accuracy while training: every rank takes its share of the images and of the prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pretrain.config import Evaluate
from probemb import Gaussian, UserError, distributed
from probemb.data.image_loader import ImageBatches
from probemb.data.labelled.images import find_images, remarks, resolve_classes
from probemb.data.labelled.prompts import SINGLE_TEMPLATE, imagenet_templates, prompt_texts
from probemb.evaluation.classification import class_vectors, true_ranks


class Evaluator:
    """Top-1 and top-5 accuracy of the engine's model on labelled images.

    Args:
        config: templates, and how many images.
        path: the images: class folders or shards.
        transform: PIL image -> (3, H, W).
        tokenizer: list of n texts -> (n, L).
        device, rank, world_size: of this process.
        exif: turn images as their EXIF orientation says.

    Raises:
        UserError: the images are missing, or their classes do not fit.
    """

    def __init__(
        self,
        config: Evaluate,
        path: str,
        transform: Callable,
        tokenizer: Callable,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        exif: bool = False,
    ):
        self.device, self.batch_size = device, config.batch_size
        images = find_images(path, exif=exif)
        classes, labels = resolve_classes(images, None)
        for line in remarks(labels, classes) if rank == 0 else ():
            print(f"classes {line}", flush=True)
        templates = [SINGLE_TEMPLATE] if config.templates == "single" else imagenet_templates()
        self.shape = (len(classes.names), len(templates))
        self.tokens = tokenizer(prompt_texts(classes.names, templates))  # (C P, L)
        # Spread evenly over the data, as images are often sorted by class.
        n = min(len(images), config.max_images or len(images))
        if n < world_size:
            raise UserError(
                f"There are {n} evaluation images for {world_size} ranks.",
                "Raise evaluate.max_images, name more images, or leave evaluate.classes out.",
            )
        chosen = [i * len(images) // n for i in range(n)][rank::world_size]
        mine = replace(images, places=[images.places[i] for i in chosen], marks=[images.marks[i] for i in chosen])
        self.labels = torch.tensor([labels[i] for i in chosen])
        self.batches = ImageBatches(
            mine, transform, self.batch_size, max_bad=config.max_bad, option="--evaluate.max-bad"
        )
        self.n_batches = -(-n // (world_size * self.batch_size))

    @torch.no_grad()
    def __call__(self, engine) -> dict[str, float]:
        """{"zeroshot_top1", "zeroshot_top5"} in [0, 1], the same on every rank; collective."""
        engine.eval()
        # All ranks call the engine equally often: ZeRO-3 gathers its parameters in every call.
        tokens = engine.module.model.cut_padding(self.tokens)
        prompts = encode_texts(engine, tokens, self.batch_size, self.device)
        image, _ = encode_images(engine, iter(self.batches), self.n_batches, self.device)
        engine.train()
        vectors = class_vectors(prompts.mean.view(*self.shape, -1), torch.ones(self.shape))
        labels = self.labels[self.batches.kept]
        ranks = true_ranks(image, vectors, labels)
        counts = {"n": float(len(labels)), "top1": float((ranks < 1).sum()), "top5": float((ranks < 5).sum())}
        mean = distributed.mean_over_ranks(counts, self.device)
        return {f"zeroshot_{k}": mean[k] / mean["n"] for k in ("top1", "top5")}


def encode_images(engine, batches: Iterator[Tensor], n_calls: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Means and log-variances of this rank's batches, (n, D) on the CPU; all ranks call the engine `n_calls` times."""
    parts, last = [], None
    for batch in batches:
        last = batch.to(device, non_blocking=True)
        parts.append(engine(last, None))
    for _ in range(n_calls - len(parts)):  # other ranks have more batches
        engine(last, None)
    mean, log_var = (torch.cat(part).cpu() for part in zip(*parts))
    return mean, log_var


def encode_texts(engine, tokens: Tensor, batch_size: int, device: torch.device) -> Gaussian:
    """All texts, on the CPU; each rank encodes an equal share."""
    share = -(-len(tokens) // distributed.world_size())
    first = distributed.rank() * share
    index = torch.arange(first, first + share).clamp(max=len(tokens) - 1)
    parts = [engine(None, tokens[i].to(device)) for i in index.split(batch_size)]
    return Gaussian(*(distributed.gather(torch.cat(part))[: len(tokens)].cpu() for part in zip(*parts)))
