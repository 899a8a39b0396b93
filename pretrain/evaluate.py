"""Evaluation while training: every rank encodes its share of the images and of the texts with the engine.

Labelled images give zero-shot accuracy, images with captions the validation loss, and retrieval by CSD.
An evaluator is called with the engine, and with a function that all ranks call between batches, equally often, and
whose exceptions end the evaluation. Letters: N images, M texts, C classes, P prompts, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from pretrain.config import ZERO_SHOT, Config, EvaluationSet
from pretrain.objectives import OBJECTIVES, Pairs
from probemb import distributed
from probemb.data.captions.find import find_captions
from probemb.data.image_loader import ImageBatches, Images, refuse_too_many
from probemb.data.labelled.classes import SINGLE_TEMPLATE, imagenet_templates, prompt_texts
from probemb.data.labelled.images import find_images, remarks, resolve_classes
from probemb.distances import csd
from probemb.errors import UserError
from probemb.evaluation.classification import class_vectors, true_ranks
from probemb.gaussian import Gaussian
from probemb.metrics.retrieval import Positives, mean_metrics, query_metrics, rank_both, rsum

KS = (1, 5, 10)


def make_evaluator(config: Config, of: EvaluationSet, *args) -> Evaluator:
    """The evaluator of a set; `args` as `Evaluator` says. Raises UserError: the data is missing or unfit."""
    return (ZeroShot if of.metrics == ZERO_SHOT else Validator)(config, of, *args)


class Evaluator:
    """Common part of both kinds: this rank's images, and encoding with the engine.

    Both are made from (config, set, transform: PIL image -> (3, H, W), tokenizer: n texts -> (n, L), rank, world), by a
    process that has not joined the others yet.
    """

    def share(self, config: Config, of: EvaluationSet, images: Images, transform: Callable, rank: int, world: int):
        """Choose this rank's images, `own`, of those that are `taken`: `evaluate.max_images`, spread evenly over the
        data, which is often sorted by class."""
        given = config.evaluate
        self.set, self.batch_size, self.max_bad = of, given.batch_size, given.max_bad
        n = min(len(images), given.max_images or len(images))
        if n < world:
            raise UserError(
                f"There are {n} images to evaluate in {of.path} for {world} ranks.",
                "Raise evaluate.max_images, name more images, or leave the set out.",
            )
        self.taken = [i * len(images) // n for i in range(n)]
        self.own = self.taken[rank::world]
        share = replace(images, places=[images.places[i] for i in self.own])
        # Judged over all ranks, so not here.
        self.batches = ImageBatches(share, transform, self.batch_size, config.data.workers, max_bad=1.0)

    @torch.no_grad()
    def __call__(self, engine, meet: Callable[[], object] = lambda: None) -> dict[str, float]:
        """The values, by the names of the log, the same on every rank; collective."""
        engine.eval()
        values = self.measure(engine, meet)
        engine.train()
        return dict(zip(self.set.keys, (values[metric] for metric in self.set.metrics), strict=True))

    def measure(self, engine, meet: Callable[[], object]) -> dict[str, float]:
        raise NotImplementedError

    def encode_images(self, engine, meet: Callable[[], object]) -> Gaussian:
        """This rank's readable ones, numbered by `self.batches.kept`, on the CPU; collective.

        All ranks call the engine equally often, also without images: ZeRO-3 gathers its parameters in every call.

        Raises:
            UserError: too many of all ranks' images are unreadable.
        """
        parts, side = [], engine.module.model.image_size
        calls = -(-len(self.taken) // (distributed.world_size() * self.batch_size))
        with closing(iter(self.batches)) as batches:
            for _ in range(calls):
                meet()
                batch = next(batches, None)  # other ranks may have more
                pixels = torch.zeros(1, 3, side, side) if batch is None else batch
                found = engine(pixels.to(engine.device, non_blocking=True), None)
                parts.append([part[: 0 if batch is None else len(batch)] for part in found])
        listed = self.batches.images.bad
        bad = [*listed, *chain(*distributed.all_of(self.batches.bad[len(listed) :]))]
        total = len(self.taken) + len(listed)
        refuse_too_many(bad, total, self.batches.images.source, self.max_bad, "--evaluate.max-bad")
        return Gaussian(*(torch.cat(part).cpu() for part in zip(*parts)))

    def encode_texts(self, engine, tokens: Tensor, meet: Callable[[], object]) -> Gaussian:
        """All texts (M, L), on the CPU; each rank encodes an equal share; collective."""
        share = -(-len(tokens) // distributed.world_size())
        first = distributed.rank() * share
        index = torch.arange(first, first + share).clamp(max=len(tokens) - 1)
        parts = []
        for i in index.split(self.batch_size):
            meet()
            parts.append(engine(None, tokens[i].to(engine.device)))
        return Gaussian(*(distributed.gather(torch.cat(part))[: len(tokens)].cpu() for part in zip(*parts)))


class ZeroShot(Evaluator):
    """Top-1 and top-5 accuracy, in [0, 1], on class folders or shards with labels."""

    def __init__(
        self, config: Config, of: EvaluationSet, transform: Callable, tokenizer: Callable, rank: int = 0, world: int = 1
    ):
        try:
            images = find_images(of.path, exif=config.data.exif)
            classes, labels = resolve_classes(images, None)
        except UserError as error:  # whose remedy may name options of zeroshot.imagenet
            raise UserError(
                error.what,
                "Name images in class folders, or shards with KEY.cls, with --evaluate.classes, or leave them out with "
                "--no-evaluate.classes. docs/data.md (Labelled images) says how to sort ImageNet's.",
            ) from error
        self.share(config, of, images, transform, rank, world)
        for line in remarks(labels, classes) if rank == 0 else ():
            print(f"classes {line}", flush=True)
        templates = [SINGLE_TEMPLATE] if config.evaluate.templates == "single" else imagenet_templates()
        self.shape = (len(classes.names), len(templates))  # C, P
        self.tokens = tokenizer(prompt_texts(classes.names, templates))  # (C P, L)
        self.labels = torch.tensor([labels[i] for i in self.own])

    def measure(self, engine, meet: Callable[[], object]) -> dict[str, float]:
        prompts = self.encode_texts(engine, engine.module.model.cut_padding(self.tokens), meet)
        image = self.encode_images(engine, meet)
        vectors = class_vectors(prompts.mean.view(*self.shape, -1), torch.ones(self.shape))
        ranks = true_ranks(image.mean, vectors, self.labels[self.batches.kept])
        counts = {"n": float(len(ranks)), "top1": float((ranks < 1).sum()), "top5": float((ranks < 5).sum())}
        mean = distributed.mean_over_ranks(counts, engine.device)
        return {f"zeroshot_{k}": mean[k] / mean["n"] for k in ("top1", "top5")}


class Validator(Evaluator):
    """Validation loss, and recall by CSD in percent, on images with captions.

    The loss is the objective's on batches of the training's size, or on all pairs if they are fewer: images with their
    first captions, in the data's order; the rest, smaller than a batch, is left out.
    """

    def __init__(
        self, config: Config, of: EvaluationSet, transform: Callable, tokenizer: Callable, rank: int = 0, world: int = 1
    ):
        captions = find_captions(of.path, of.split, exif=config.data.exif)
        self.share(config, of, captions.images, transform, rank, world)
        captions = captions.only(self.taken)
        self.objective, self.loss_batch = OBJECTIVES[config.objective](config.loss), config.batch_size
        self.captions, self.tokens = captions.captions, tokenizer(captions.flat())  # (M, L)

    def measure(self, engine, meet: Callable[[], object]) -> dict[str, float]:
        tokens, side = engine.module.model.cut_padding(self.tokens), engine.module.model.image_size
        texts = self.encode_texts(engine, tokens, meet)
        # The scalars come with a pair.
        *_, scalars = engine(torch.zeros(1, 3, side, side, device=engine.device), tokens[:1].to(engine.device))
        image = self.encode_images(engine, meet)
        rank, world = distributed.rank(), distributed.world_size()
        shares = distributed.all_of(([rank + world * row for row in self.batches.kept], image.mean, image.log_var))
        values = self._measure(shares, texts, scalars.cpu(), engine.device) if distributed.is_main() else None
        return distributed.all_of(values)[0]

    def _measure(self, shares: list[tuple], texts: Gaussian, scalars: Tensor, device: torch.device) -> dict[str, float]:
        """On rank 0, from every rank's (numbers of its readable images, means, log-variances)."""
        numbers = torch.tensor([number for share in shares for number in share[0]])
        order = numbers.argsort()
        images = Gaussian(*(torch.cat([share[part] for share in shares])[order] for part in (1, 2)))  # (N, D)
        starts = [0, *torch.tensor([len(captions) for captions in self.captions]).cumsum(0).tolist()]
        own = [list(range(starts[i], starts[i + 1])) for i in numbers[order].tolist()]
        firsts = texts[[captions[0] for captions in own]]
        loss = self._loss(images, firsts, scalars)
        texts = texts[[caption for captions in own for caption in captions]]  # (M, D) of readable images
        owner = torch.tensor([row for row, captions in enumerate(own) for _ in captions])
        positives = Positives.from_pairs(owner, torch.arange(len(owner)), len(images), len(texts))
        images, texts = images.to(device), texts.to(device)
        depth = max(*KS, int(positives.counts.max())), max(KS)
        i2t, t2i = rank_both(lambda rows: -csd(images[rows], texts), len(images), len(texts), depth)
        found = {"i2t": mean_metrics(query_metrics(i2t, positives, KS))}
        found["t2i"] = mean_metrics(query_metrics(t2i, positives.transposed(), KS))
        recalls = {f"{way}_r{k}": 100 * found[way][f"r@{k}"] for way in found for k in KS}
        return {"validation_loss": loss, "rsum": rsum(**found), **recalls}

    def _loss(self, images: Gaussian, texts: Gaussian, scalars: Tensor) -> float:
        """The mean over whole batches; item i of one belongs to item i of the other."""
        n, losses = min(self.loss_batch, len(images)), []
        for start in range(0, len(images) - n + 1, n):
            image, text = images[start : start + n], texts[start : start + n]
            with distributed.pretend(1):
                losses.append(self.objective(Pairs(image, text, *scalars.unbind())).loss)
        return float(torch.stack(losses).mean())
