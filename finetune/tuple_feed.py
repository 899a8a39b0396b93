"""From a batch of composed queries to what the network embeds, and from what it embedded to the `Batch` of all ranks.

Every rank embeds its targets and those parts that are images or texts in its rows, however many; what is gathered is
of one shape everywhere: the target and the k parts of every row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finetune.config import Config
from finetune.loading.augment import TextIds, cut_out, drop_words
from finetune.loading.tuple_samples import TupleBatch
from finetune.methods import Batch
from finetune.pair_feed import Moment, shared_generator
from probemb import distributed
from probemb.data.compositions.dataset import Compositions
from probemb.gaussian import Gaussian
from probemb.models import DualEncoder, Encoded

_LOSS, _CUTOUT, _WORDS = range(3)  # uses of random numbers


class TupleFeed:
    """The trainer's handling of composed queries and their targets."""

    def __init__(self, config: Config, data: Compositions, device: torch.device):
        self.config, self.data, self.device = config, data, device

    def inputs(
        self, batch: TupleBatch, model: DualEncoder, step: int
    ) -> tuple[tuple[Tensor, Tensor, Tensor | None], None]:
        """Augmented images and tokens, on the device; no token mask, and no images are mixed."""
        augment, rank, (b, k) = self.config.augment, distributed.rank(), batch.part_rows.shape
        rows, is_image = slice(rank * b, (rank + 1) * b), batch.part_rows >= 0
        images, tokens = batch.images.to(self.device, non_blocking=True), batch.tokens
        if augment.cutout:
            place = self._draw(step, _CUTOUT, 1 + k, 2)[rows]
            images = model.normalized(images)
            images = cut_out(images, augment.cutout, torch.cat([place[:, 0], place[:, 1:][is_image]]))
        if augment.word_dropping:
            draw = self._draw(step, _WORDS, k, tokens.shape[1])[rows][~is_image]
            ids, used = TextIds.of(model.config), batch.text_used
            dropped = tokens.clone()
            dropped[used] = drop_words(tokens[used], draw, augment.word_dropping, ids)
            tokens = dropped
        return (images, model.cut_padding(tokens, self.device), None), None

    def _draw(self, step: int, what: int, *shape: int) -> Tensor:
        """Uniform numbers for every row of the whole batch, so that none depends on the number of ranks."""
        return torch.rand(self.config.batch_size, *shape, generator=shared_generator(self.config.seed, step, what))

    def gather(self, embedded: tuple[Tensor, ...], batch: TupleBatch, drawn: None, now: Moment) -> Batch:
        """Targets and parts of all ranks, with gradient, and which targets are correct for which query."""
        half, (b, k) = len(embedded) // 2, batch.part_rows.shape
        images, texts = Encoded.of(embedded[:half]).float().gaussian, Encoded.of(embedded[half:]).float().gaussian
        place = batch.part_rows.to(self.device)
        place = torch.where(place >= 0, b + place, len(images) - 1 - place)
        unused = (~batch.text_used).to(self.device, images.mean.dtype)
        both = []
        for image, text in ((images.mean, texts.mean), (images.log_var, texts.log_var)):
            part = torch.cat([image, text])[place.flatten()].unflatten(0, (b, k))
            # A text tower whose only text is no part takes part in the backward pass, as DDP expects.
            both.append(torch.cat([image[:b, None], part + 0 * (text * unused[:, None]).sum()], 1))
        mean, log_var = distributed.gather_together(both)
        numbers = torch.cat([batch.target_index[:, None], batch.example_index[:, None], batch.concepts], 1)
        numbers = distributed.gather_host(numbers)
        positives = self.data.matches(numbers[:, 2:].numpy(), numbers[:, 0].numpy())
        positives = torch.from_numpy(positives).to(self.device)
        targets = Encoded(Gaussian(mean[:, 0], log_var[:, 0]))
        generator = shared_generator(self.config.seed, now.step, _LOSS, self.device)
        return Batch(
            targets, None, positives.to(mean.dtype), numbers[:, 0], numbers[:, 1], now.epoch, now.step, generator,
            now.network, parts=Gaussian(mean[:, 1:], log_var[:, 1:]),
        )  # fmt: skip
