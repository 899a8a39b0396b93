"""From a batch of pairs to what the network embeds, and from what it embedded to the `Batch` of all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from finetune.config import Config
from finetune.loading.augment import Mix, TextIds, cut_out, draw_mix, drop_words, mix_images, size_augment_text
from finetune.loading.pair_samples import PairBatch
from finetune.methods import Batch
from finetune.network import of_all_ranks
from probemb import distributed, labels
from probemb.models import DualEncoder
from probemb.models.pooling import size_augment_mask

_TEXT, _IMAGE, _MIX, _LOSS, _CUTOUT, _WORDS = range(6)  # uses of random numbers


class Moment(NamedTuple):
    """Position of a run: epoch from 0, steps since the start of the run, which of the networks is trained."""

    epoch: int
    step: int
    network: int


def shared_generator(seed: int, step: int, what: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Random numbers of one use in one step, the same on all ranks."""
    numbers = np.random.SeedSequence([seed, step, 0, what]).generate_state(2, np.uint32)
    return torch.Generator(device).manual_seed(int(numbers[0]) << 31 | int(numbers[1]) >> 1)


def _places(pairs: PairBatch, rank: int) -> Tensor:
    """Positions of a rank's items in the whole batch, in which the pairs of all ranks precede the unpaired items."""
    n, more = len(pairs.image_index), len(pairs.images) - len(pairs.image_index)
    first = n * distributed.world_size() + more * rank
    return torch.cat([torch.arange(n) + n * rank, torch.arange(more) + first])


class PairFeed:
    """The trainer's handling of pairs of images and captions.

    Args:
        groups: (N,) which images match the same captions, see `PairLoader`.
        wants_words: whether the method reads the captions' tokens.
    """

    def __init__(self, config: Config, groups: Tensor, device: torch.device, wants_words: bool):
        self.config, self.groups, self.device, self.wants_words = config, groups.to(device), device, wants_words

    def inputs(
        self, pairs: PairBatch, model: DualEncoder, step: int
    ) -> tuple[tuple[Tensor, Tensor, Tensor | None], Mix | None]:
        """Augmented images, tokens and the mask of image tokens, on the device, and how the whole batch is mixed."""
        config, rank = self.config, distributed.rank()
        images = pairs.images.to(self.device, non_blocking=True)
        tokens, mask, mix = pairs.tokens, None, None
        rows, whole = _places(pairs, rank), len(images) * distributed.world_size()
        ids = TextIds.of(model.config)
        if config.augment.cutout or config.mix.ratio:
            images = model.normalized(images)  # where grey is 0 and a mix of uint8 is not rounded
        if config.augment.cutout:
            place = torch.rand(whole, 2, generator=self._generator(step, _CUTOUT))[rows]
            images = cut_out(images, config.augment.cutout, place)
        if config.augment.word_dropping:
            draw = torch.rand(whole, tokens.shape[1], generator=self._generator(step, _WORDS))[rows]
            tokens = drop_words(tokens, draw, config.augment.word_dropping, ids)
        if config.mix.ratio:
            images, mix = self._mixed(images, step)
        if config.size_augment:
            everyone = tokens.new_zeros(whole, tokens.shape[1])
            everyone[rows] = tokens
            generator = self._generator(step, _TEXT)
            tokens = size_augment_text(everyone, config.size_augment, generator=generator, ids=ids)[rows]
            mask = size_augment_mask(
                whole, model.image_tower.n_tokens, config.size_augment, self._generator(step, _IMAGE)
            )[rows].to(self.device, non_blocking=True)
        return (images, model.cut_padding(tokens, self.device), mask), mix

    def _mixed(self, images: Tensor, step: int) -> tuple[Tensor, Mix]:
        """This rank's images, mixed, and how the whole batch is. Rank r has the partners of rank W − 1 − r."""
        o, rank, world = self.config.mix, distributed.rank(), distributed.world_size()
        rng = np.random.default_rng([self.config.seed, step, 0, _MIX])
        size = self.config.batch_size, *images.shape[-2:]
        mix = draw_mix(*size, rng, o.ratio, o.mixup, o.cutmix, o.switch, o.prob, mode=o.mode)
        n, other = len(images), world - 1 - rank
        changed, theirs = (torch.nonzero(mix.lam[r * n : (r + 1) * n] != 1).flatten() for r in (rank, other))
        asked = images.index_select(0, (n - 1 - theirs).to(images.device, non_blocking=True))
        partners = distributed.swap(asked, other, len(changed))
        return mix_images(images, Mix(*(x[rank * n : (rank + 1) * n] for x in mix)), partners), mix

    def _generator(self, step: int, what: int) -> torch.Generator:
        """Drawn from for the whole batch, so that no draw depends on the number of ranks."""
        return shared_generator(self.config.seed, step, what)

    def gather(self, embedded: tuple[Tensor, ...], pairs: PairBatch, mix: Mix | None, now: Moment) -> Batch:
        """The pairs of all ranks, with gradient; labels from image numbers and mixing partners."""
        n = len(pairs.image_index)
        every = of_all_ranks(embedded)
        words = distributed.gather(pairs.tokens.to(self.device)) if self.wants_words else None
        images, texts = every
        if unpaired := len(pairs.images) > n:
            order = torch.cat([_places(pairs, rank) for rank in range(distributed.world_size())]).argsort()
            every = [side[order.to(self.device)] for side in every]
            words = None if words is None else words[order.to(self.device)]
            images, texts = (side[: n * distributed.world_size()] for side in every)
        numbers = distributed.gather_host(torch.stack([pairs.image_index, pairs.pair_index], 1))
        image, pair = numbers.T.contiguous()
        group = self.groups[image.to(self.device)]
        match = labels.same_image(group, group)
        if mix is not None:
            match = labels.mixed(match, *(x.to(self.device, non_blocking=True) for x in (mix.lam, mix.partner)))
        match = labels.smooth(match, self.config.mix.smoothing)
        generator = shared_generator(self.config.seed, now.step, _LOSS, self.device)
        batch = Batch(
            images, texts, match, image, pair, now.epoch, now.step, generator, now.network,
            words=words,
        )  # fmt: skip
        if unpaired:
            batch.with_unpaired = replace(batch, images=every[0], texts=every[1])
        return batch
