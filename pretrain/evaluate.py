"""Evaluation while training: every rank encodes its share of the images and of the texts with the engine.

Labelled images give zero-shot accuracy, images with captions the validation loss, and retrieval by CSD.
Letters: N images, M texts, C classes, P prompts, L tokens, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from pretrain.config import Config
from pretrain.objectives import Pairs
from probemb import distributed
from probemb.data import labelled
from probemb.data.captions.dataset import list_captions
from probemb.data.image_loader import ImageBatches, Images, refuse_too_many
from probemb.distances import csd
from probemb.errors import UserError, nearest
from probemb.evaluation.classification import class_vectors, true_ranks
from probemb.gaussian import Gaussian
from probemb.metrics.retrieval import KS, Positives, mean_metrics, query_metrics, rank_both, rsum
from probemb.options import NamedPath, named_paths


def make_evaluators(
    config: Config, transform: Callable, tokenizer: Callable, rank: int = 0, world: int = 1
) -> list[Evaluator]:
    """Those of `config.evaluate`, in the order in which they are called; the ranks need not have met yet."""
    pairs, splits = named_paths(config.evaluate.pairs, "evaluate.pairs"), config.evaluate.pairs_split
    splits = splits if isinstance(splits, list) else [splits] * len(pairs)
    if len(splits) != len(pairs):
        what = f"There are {len(pairs)} evaluate.pairs and {len(splits)} evaluate.pairs_split."
        raise UserError(what, "Give one split for all of them, or one for each.")
    given = config, transform, tokenizer, rank, world
    found = [Validator(of, split, *given) for of, split in zip(pairs, splits)]
    found += [ZeroShot(of, *given) for of in named_paths(config.evaluate.classes, "evaluate.classes")]
    known, best = [key for evaluator in found for key in evaluator.keys], config.evaluate.best
    if best is not None and best not in known:
        what = f"evaluate.best is {best}, which no evaluation logs.{nearest(best, known)}"
        raise UserError(what, f"Choose {', '.join(known)}.")
    return found


class Evaluator:
    """This rank's images of a set, and encoding with the engine; the subclasses measure.

    `own` are its numbers of those that are `taken`, spread evenly over the data, which is often sorted by class; `keys`
    the names in the log: NAME/METRIC, or METRIC for a set without a name."""

    metrics: ClassVar[tuple[str, ...]]

    def __init__(self, of: NamedPath, images: Images, config: Config, transform: Callable, rank: int, world: int):
        given = config.evaluate
        self.keys = [f"{of.name}/{metric}" if of.name else metric for metric in self.metrics]
        self.batch_size, self.max_bad = given.batch_size, given.max_bad
        n = min(len(images), given.max_images or len(images))
        if n < world:
            what = f"There are {n} images to evaluate in {of.path} for {world} ranks."
            raise UserError(what, "Raise evaluate.max_images, name more images, or leave the set out.")
        self.taken = [i * len(images) // n for i in range(n)]
        self.own = self.taken[rank::world]
        share = replace(images, places=[images.places[i] for i in self.own])
        # Judged over all ranks, so not here.
        self.batches = ImageBatches(share, transform, self.batch_size, config.data.workers, max_bad=1.0)

    @torch.no_grad()
    def __call__(self, engine, meet: Callable[[], object] = lambda: None) -> dict[str, float]:
        """The values by `keys`, the same on every rank; collective. All call `meet` between batches, equally often."""
        engine.module.eval()
        values = self.measure(engine, meet)
        engine.module.train()
        return dict(zip(self.keys, (values[metric] for metric in self.metrics)))

    def encode_images(self, engine, meet: Callable[[], object]) -> Gaussian:
        """This rank's readable ones, numbered by `self.batches.kept`, on the CPU; collective. All call the engine
        equally often, as ZeRO-3 gathers in every call. Raises UserError: too many of all images are unreadable."""
        parts, side = [], engine.module.model.image_size
        with closing(iter(self.batches)) as batches:
            for _ in range(-(-len(self.taken) // (distributed.world_size() * self.batch_size))):
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
        first, parts = distributed.rank() * share, []
        for i in torch.arange(first, first + share).clamp(max=len(tokens) - 1).split(self.batch_size):
            meet()
            parts.append(engine(None, tokens[i].to(engine.device)))
        return Gaussian(*(distributed.gather(torch.cat(part))[: len(tokens)].cpu() for part in zip(*parts)))


class ZeroShot(Evaluator):
    """Top-1 and top-5 accuracy, in [0, 1], on class folders or shards with labels."""

    metrics = ("zeroshot_top1", "zeroshot_top5")

    def __init__(self, of: NamedPath, config: Config, transform: Callable, tokenizer: Callable, rank: int, world: int):
        data = labelled.zero_shot_set(of.path, config.evaluate.templates, config.data.exif)
        super().__init__(of, data.images, config, transform, rank, world)
        for line in labelled.remarks(data.labels, data.classes) if rank == 0 else ():
            print(f"classes {line}", flush=True)
        self.n_classes, self.tokens = len(data.classes), tokenizer(data.prompts)  # C, (C P, L)
        self.labels = torch.tensor([data.labels[i] for i in self.own])

    def measure(self, engine, meet: Callable[[], object]) -> dict[str, float]:
        prompts = self.encode_texts(engine, engine.module.model.cut_padding(self.tokens), meet)
        image = self.encode_images(engine, meet)
        vectors = class_vectors(prompts.mean.unflatten(0, (self.n_classes, -1)))
        ranks = true_ranks(image.mean, vectors, self.labels[self.batches.kept])
        n, *hits = distributed.sum_over_ranks([len(ranks), (ranks < 1).sum(), (ranks < 5).sum()], engine.device)
        return dict(zip(self.metrics, (float(hit / n) for hit in hits)))


class Validator(Evaluator):
    """Recall by CSD in percent, and the objective's loss on images with their first captions, in the data's order and
    in whole batches of the training's size, or in one if they are fewer."""

    metrics = ("validation_loss", "rsum", *(f"{way}_r{k}" for way in ("i2t", "t2i") for k in KS))

    def __init__(
        self, of: NamedPath, split: str | None, config: Config, transform: Callable, tokenizer: Callable, rank: int,
        world: int,
    ):  # fmt: skip
        captions = list_captions(of.path, split, exif=config.data.exif)
        super().__init__(of, captions.images, config, transform, rank, world)
        captions = captions.only(self.taken)
        self.objective, self.loss_batch = config.loss, config.batch_size
        self.owner, self.tokens = torch.tensor(captions.owner()), tokenizer(captions.flat())  # (M,), (M, L)

    def measure(self, engine, meet: Callable[[], object]) -> dict[str, float]:
        tokens, side = engine.module.model.cut_padding(self.tokens), engine.module.model.image_size
        texts = self.encode_texts(engine, tokens, meet)
        # The scalars come with a pair.
        *_, scalars = engine(torch.zeros(1, 3, side, side, device=engine.device), tokens[:1].to(engine.device))
        image = self.encode_images(engine, meet)
        numbers = distributed.rank() + distributed.world_size() * torch.tensor(self.batches.kept, dtype=torch.int64)
        shares, values = distributed.all_of((numbers, image.mean, image.log_var)), None
        if distributed.is_main():
            numbers, *image = map(torch.cat, zip(*shares))
            order = numbers.argsort()
            with distributed.alone():
                values = self._measure(numbers[order], Gaussian(*image)[order], texts, scalars.cpu(), engine.device)
        return distributed.all_of(values)[0]

    def _measure(
        self, numbers: Tensor, images: Gaussian, texts: Gaussian, scalars: Tensor, device: torch.device
    ) -> dict[str, float]:
        """Of all texts (M, D) and the readable images (N, D), with their ascending numbers (N,)."""
        readable = torch.isin(self.owner, numbers)
        texts, owner = texts[readable], torch.searchsorted(numbers, self.owner[readable])
        firsts, batch = texts[torch.searchsorted(owner, torch.arange(len(images)))], min(self.loss_batch, len(images))
        batches = [slice(start, start + batch) for start in range(0, len(images) - batch + 1, batch)]
        losses = [self.objective(Pairs(images[rows], firsts[rows], *scalars.unbind())).loss for rows in batches]
        positives = Positives.from_pairs(owner, torch.arange(len(owner)), len(images), len(texts))
        images, texts = images.to(device), texts.to(device)
        depth = max(*KS, int(positives.counts.max())), max(KS)
        i2t, t2i = rank_both(lambda rows: -csd(images[rows], texts), len(images), len(texts), depth)
        found = {"i2t": mean_metrics(query_metrics(i2t, positives, KS))}
        found["t2i"] = mean_metrics(query_metrics(t2i, positives.transposed(), KS))
        recalls = {f"{way}_r{k}": 100 * found[way][f"r@{k}"] for way in found for k in KS}
        return {"validation_loss": float(torch.stack(losses).mean()), "rsum": rsum(**found), **recalls}
