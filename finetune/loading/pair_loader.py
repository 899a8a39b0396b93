"""The training pairs of finetuning: every caption with its image once an epoch, in an order that only the seed decides.

    loader = PairLoader(find_captions("data/flickr8k", "train"), transform, tokenizer, batch_size=128, workers=4)
    for epoch in range(25):
        for batch in loader.epoch(epoch):
            ...

The global batches, the random crops and the replacements of unreadable images are functions of the seed, the epoch
and the pair alone: they are the same for every number of workers, and of processes that divides the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
from PIL import Image

from finetune.loading.batch_loader import BatchLoader
from finetune.loading.pair_samples import PairBatch, Pairs
from probemb.data.captions.find import CaptionDataset
from probemb.data.compositions.dataset import Compositions
from probemb.data.failures import Failure
from probemb.errors import UserError


class PairLoader(BatchLoader[PairBatch]):
    """Batches of training pairs for one rank.

    Args:
        dataset: images and captions; each caption is one pair. An incomplete last batch is left out of its epoch.
        transform: PIL image -> (3, H, W) uint8. It may draw from the global random numbers of torch, numpy and
            Python, which are seeded for every pair and restored afterwards.
        tokenizer: list of n captions -> (n, L) int64.
        batch_size: the global batch, over all ranks.
        seed: any integer.
        rank, world, workers, pin_memory, failure_share: see `BatchLoader`.
        positives: "image" or "class", see `groups`.
        unpaired: batches of the same rank whose images and tokens stand behind every batch's own, epoch after epoch.

    Attributes (and those of `BatchLoader`):
        n_pairs: number of captions, those left out of an epoch included.
        groups: (N,) int64, which images match the same captions: a number of their own, or their class'.

    Raises:
        UserError: on construction for settings that do not fit each other or the data, or images that are not here;
            while iterating when too many images cannot be used, or a worker was killed.
    """

    def __init__(
        self,
        dataset: CaptionDataset,
        transform: Callable[[Image.Image], torch.Tensor],
        tokenizer: Callable[[list[str]], torch.Tensor],
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        *,
        pin_memory: bool = False,
        failure_share: float = 0.05,
        positives: str = "image",
        unpaired: PairLoader | None = None,
    ):
        self.n_pairs = dataset.n_captions
        refuse_unusable(dataset, failure_share)
        super().__init__(
            Pairs(dataset, transform, tokenizer, batch_size, seed), dataset.source, "pairs", rank, world, workers,
            pin_memory=pin_memory, failure_share=failure_share,
        )  # fmt: skip
        by_class = positives == "class"
        self.groups = torch.tensor(dataset.class_numbers() if by_class else range(len(dataset)), dtype=torch.int64)
        self._dataset, self.unpaired = dataset, unpaired

    def epoch(self, n: int, start_step: int = 0) -> Iterator[PairBatch]:
        pairs = super().epoch(n, start_step)
        return pairs if self.unpaired is None else self._with_unpaired(pairs, n * self.steps + start_step)

    def _with_unpaired(self, batches: Iterator[PairBatch], step: int) -> Iterator[PairBatch]:
        others = self._unpaired_from(step)
        for pairs in batches:
            other = next(others)
            images, tokens = torch.cat([pairs.images, other.images]), torch.cat([pairs.tokens, other.tokens])
            yield pairs._replace(images=images, tokens=tokens)

    def _unpaired_from(self, step: int) -> Iterator[PairBatch]:
        while True:
            epoch, start = divmod(step, self.unpaired.steps)
            yield from self.unpaired.epoch(epoch, start)
            step += self.unpaired.steps - start

    def close(self) -> None:
        super().close()
        if self.unpaired is not None:
            self.unpaired.close()

    @property
    def failures(self) -> dict[str, Failure]:
        return super().failures | ({} if self.unpaired is None else self.unpaired.failures)

    @property
    def identity(self) -> dict[str, int | str]:
        """Everything that the batches depend on; a run must be resumed with the same."""
        digest = hashlib.sha256()
        for one, texts in zip(self._dataset.image_ids, self._dataset.captions):
            digest.update(f"{one}\0{len(texts)}\0".encode(errors="replace"))
            for text in texts:
                digest.update(f"{text}\0".encode(errors="replace"))
        if self.unpaired is not None:
            digest.update(self.unpaired.identity["pairs"].encode())
        return {"pairs": digest.hexdigest()[:16], "batch_size": self.batch_size, "seed": self.seed}


def refuse_unusable(dataset: CaptionDataset | Compositions, share: float) -> None:
    """Raise UserError if images are missing, or listing found more than this share of samples unusable."""
    bad, total = dataset.images.bad, len(dataset) + len(dataset.images.bad)
    of = f", split '{dataset.split}'," if dataset.split else ""
    if len(bad) > share * total:
        raise UserError(
            f"{len(bad)} of {total} samples of {dataset.source}{of} cannot be used ({bad[0][0]}: {bad[0][1]}).",
            "Repair them or leave their shards out, or allow a larger failure share.",
        )
