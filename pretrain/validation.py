"""Loss and retrieval on held-out pairs while training: every rank embeds its share of the images and of the texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pretrain.config import Config
from pretrain.evaluation import RankImages, encode_texts
from pretrain.objectives import OBJECTIVES, Pairs
from probemb import Gaussian, UserError, distributed
from probemb.data.captions.find import find_captions
from probemb.evaluation.rankings import KS, RankingOptions, own_captions, retrieval


class Validator:
    """Validation loss, and retrieval by CSD, of the engine's model on images with captions.

    The loss is the objective's on batches of the training's size, or on all pairs if they are fewer: images with their
    first captions, in the data's order; the rest, smaller than a batch, is left out.

    Args:
        config: of the run.
        path, split: of the pairs.
        transform: PIL image -> (3, H, W).
        tokenizer: list of n texts -> (n, L).
        device, rank, world_size: of this process.

    Raises:
        UserError: the pairs are missing or malformed, or fewer than the ranks.
    """

    def __init__(
        self,
        config: Config,
        path: str,
        split: str | None,
        transform: Callable,
        tokenizer: Callable,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
    ):
        given = config.evaluate
        self.device, self.batch_size, self.loss_batch = device, given.batch_size, config.batch_size
        self.objective = OBJECTIVES[config.objective](config.loss)
        captions = find_captions(path, split, exif=config.data.exif)
        n = min(len(captions), given.max_images or len(captions))
        if n < world_size:
            raise UserError(
                f"There are {n} images with captions to evaluate for {world_size} ranks.",
                "Raise evaluate.max_images, name more pairs, or leave evaluate.pairs out.",
            )
        captions = captions.only([i * len(captions) // n for i in range(n)])
        self.captions, self.tokens = captions.captions, tokenizer(captions.flat())  # (M, L)
        self.mine = list(range(rank, n, world_size))
        images = replace(captions.images, places=[captions.images.places[i] for i in self.mine])
        self.images = RankImages(images, transform, config, n, world_size)

    @torch.no_grad()
    def __call__(self, engine, meet: Callable[[], object] = lambda: None) -> dict[str, float]:
        """{"validation_loss", "rsum", and "i2t_r1", … in percent}, the same on every rank; collective.

        `meet`: as `Evaluator`'s.
        """
        engine.eval()
        tokens = engine.module.model.cut_padding(self.tokens)
        texts = encode_texts(engine, tokens, self.batch_size, self.device, meet)
        side = engine.module.model.image_size
        *_, scalars = engine(torch.zeros(1, 3, side, side, device=self.device), tokens[:1].to(self.device))
        mine = self.images.encode(engine, self.device, meet)
        engine.train()
        shares = distributed.all_of(([self.mine[row] for row in self.images.kept], mine.mean, mine.log_var))
        values = self._measure(shares, texts, scalars.cpu()) if distributed.is_main() else None
        return distributed.all_of(values)[0]

    def _measure(self, shares: list[tuple[list[int], Tensor, Tensor]], texts: Gaussian, scalars: Tensor) -> dict:
        """The metrics.

        Args:
            shares: numbers of images, their means and log-variances, of every rank.
            texts: of all captions, image after image.
            scalars: the inverse temperature, a and b.
        """
        numbers = torch.tensor([number for share in shares for number in share[0]])
        order = numbers.argsort()
        kept = numbers[order].tolist()
        images = Gaussian(*(torch.cat([share[part] for share in shares])[order] for part in (1, 2)))
        starts = [0, *torch.tensor([len(texts) for texts in self.captions]).cumsum(0).tolist()]
        own = [list(range(starts[i], starts[i + 1])) for i in kept]
        owner = torch.tensor([row for row, captions in enumerate(own) for _ in captions])
        found = retrieval(
            images,
            texts[[t for captions in own for t in captions]],
            own_captions(owner, len(images)),
            "csd",
            RankingOptions(device=str(self.device)),
        )
        ways = {f"{way}_r{k}": 100 * found[way][f"r@{k}"] for way in ("i2t", "t2i") for k in KS}
        loss = self._loss(images, texts[[captions[0] for captions in own]], scalars)
        return {"validation_loss": loss, "rsum": found["rsum"], **ways}

    def _loss(self, images: Gaussian, texts: Gaussian, scalars: Tensor) -> float:
        """The mean over whole batches; item i of one belongs to item i of the other."""
        n, losses = min(self.loss_batch, len(images)), []
        for start in range(0, len(images) - n + 1, n):
            image, text = images[start : start + n], texts[start : start + n]
            with distributed.pretend(1):
                losses.append(self.objective(Pairs(image, text, *scalars.unbind())).loss)
        return float(torch.stack(losses).mean())
