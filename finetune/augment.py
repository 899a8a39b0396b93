"""Augmentation of a batch: Mixup, CutMix and Cutout of its images, SizeAugment and dropped words of its texts.

The caller's generator draws on the CPU for the batch of all ranks, so that no draw depends on their number; applying
runs on any device without synchronising it. SizeAugment of images is `probemb.models.heads.size_augment_mask`.

Shapes: B images, L text positions.
"""

from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from finetune.config import Mix as MixOptions
from probemb.models.architectures import reads_words
from probemb.models.towers.words import FIRST_WORD, UNKNOWN

START_TOKEN, END_TOKEN = 49406, 49407  # of CLIP's vocabulary; all tokens below are words or parts of words
# CLIP has no mask token. This one is a capital M, which its lower-casing tokenizer never produces; as in PCME++'s code.
MASK_TOKEN = 44
MASKED, REPLACED = 0.5, 0.1  # of the tokens that SizeAugment chooses


class TextIds(NamedTuple):
    """Special ids of a tokenizer; 0 is padding. Words have ids below `stop`; None for `end` if only padding follows."""

    stop: int = START_TOKEN
    mask: int = MASK_TOKEN
    end: int | None = END_TOKEN

    @classmethod
    def of(cls, model_config: dict) -> Self:
        """The ids of a model's tokenizer."""
        if not reads_words(model_config["architecture"]):
            return cls()
        return cls(FIRST_WORD + len(model_config["architecture"]["text_cfg"]["vocabulary"]), UNKNOWN, None)

    def are_words(self, tokens_BL: Tensor) -> Tensor:
        """(B, L) bool, True for words and parts of words."""
        after_end_BL = tokens_BL == 0 if self.end is None else (tokens_BL == self.end).cumsum(1) > 0
        return (tokens_BL < self.stop) & ~after_end_BL


class Mix(NamedTuple):
    """Mixing of a batch of images: image i becomes lam_i of itself and 1 − lam_i of image partner_i."""

    lam: Tensor  # (B,) float32, 1 where the image stays as it is; for CutMix the true share of area
    use_cutmix: Tensor  # (B,) bool: a box is pasted (CutMix) rather than all pixels blended (Mixup)
    boxes: Tensor  # (B, 4) int64, CutMix's: top, bottom, left, right, the ends not included; zeros elsewhere
    partner: Tensor  # (B,) int64


def draw_mix(batch: int, height: int, width: int, rng: np.random.Generator, o: MixOptions) -> Mix:
    """Mixup and CutMix for a batch of images, image i with image B−1−i. Source: PCME++ §2.4, §B.2, Table C.4.

    CutMix's box has sides √(1 − λ) of the image's around a random centre, cropped to the image; λ ~ Beta(α, α) is then
    the share of area that is left. The draws and their order are those of PCME++'s public code, except that it ignores
    the ratio if only one kind is on.
    """
    both = o.mixup > 0 and o.cutmix > 0
    lam, use_cutmix = (_draw_batch if o.mode == "batch" else _draw_elements)(batch, rng, o, both)
    boxes = np.zeros((len(lam), 4), dtype=np.int64)
    for i in np.flatnonzero(use_cutmix & (lam != 1)):
        boxes[i] = top, bottom, left, right = _draw_box(lam[i], height, width, rng)
        lam[i] = 1 - (bottom - top) * (right - left) / (height * width)
    every = (np.ones(batch, np.float32), np.zeros(batch, bool), np.zeros((batch, 4), np.int64))
    for all_B, drawn in zip(every, (lam, use_cutmix, boxes)):
        all_B[:] = drawn
    return Mix(*map(torch.from_numpy, every), torch.arange(batch - 1, -1, -1))


def _draw_elements(n: int, rng, o: MixOptions, both: bool) -> tuple[np.ndarray, np.ndarray]:
    """λ (n,) float32 and CutMix or not (n,), image by image."""
    if both:
        use_cutmix = rng.random(n) < o.switch
        lam_cutmix = rng.beta(o.cutmix, o.cutmix, n)
        lam = np.where(use_cutmix, lam_cutmix, rng.beta(o.mixup, o.mixup, n))
    else:
        use_cutmix = np.full(n, o.mixup <= 0)
        lam = rng.beta(o.mixup or o.cutmix, o.mixup or o.cutmix, n)
    if o.ratio < 1:
        lam = np.where(rng.random(n) < o.ratio, lam, 1.0)
    return np.where(rng.random(n) < o.prob, lam.astype(np.float32), np.float32(1)), use_cutmix


def _draw_batch(n: int, rng, o: MixOptions, both: bool) -> tuple[np.ndarray, np.ndarray]:
    """λ and CutMix or not for a whole batch, (1,) float64 and (1,)."""
    if rng.random() >= o.prob:
        return np.ones(1), np.zeros(1, dtype=bool)
    use_cutmix = rng.random() < o.switch if both else o.mixup <= 0
    alpha = o.cutmix if use_cutmix else o.mixup
    return np.array([rng.beta(alpha, alpha)]), np.array([use_cutmix])


def _draw_box(lam: np.floating, height: int, width: int, rng) -> tuple[int, int, int, int]:
    """Top, bottom, left, right."""
    side = np.sqrt(lam.dtype.type(1) - lam)
    box_h, box_w = (int(lam.dtype.type(size) * side) for size in (height, width))
    y, x = rng.integers(0, height), rng.integers(0, width)
    top, bottom = np.clip([y - box_h // 2, y + box_h // 2], 0, height)
    left, right = np.clip([x - box_w // 2, x + box_w // 2], 0, width)
    return top, bottom, left, right


def mix_images(images: Tensor, mix: Mix, partners: Tensor | None = None) -> Tensor:
    """(B, C, H, W) float, normalised, on any device -> the mixed images; `images` is not changed.

    `mix` is on the CPU, so that no device is synchronised; `partners` (R, C, H, W) are those of the R images whose lam
    is not 1, by default from `images`.
    """
    rows = torch.nonzero(mix.lam != 1).flatten()
    if not len(rows):
        return images
    lam, use_cutmix, boxes, partner, rows = (
        x.to(images.device, non_blocking=True) for x in (*(drawn[rows] for drawn in mix), rows)
    )
    partners = images[partner] if partners is None else partners
    inside_RHW = _inside(images, *boxes[:, :, None].unbind(1))
    own_R11 = lam.to(images.dtype)[:, None, None]
    own_RHW = torch.where(use_cutmix[:, None, None], (~inside_RHW).to(images.dtype), own_R11)[:, None]
    mixed = images[rows] * own_RHW + partners * (1 - own_RHW)
    return images.index_copy(0, rows, mixed)


def _inside(images: Tensor, top: Tensor, bottom: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """(R, H, W) bool, True inside R boxes, (R, 1) each."""
    y, x = (torch.arange(n, device=images.device) for n in images.shape[-2:])
    return ((y >= top) & (y < bottom))[:, :, None] & ((x >= left) & (x < right))[:, None, :]


def cut_out(images: Tensor, share: float, place_B2: Tensor) -> Tensor:
    """Normalised (B, C, H, W) with a grey square (0, the mean colour) over a share of each, wholly inside it.

    Source: Cutout (DeVries and Taylor 2017); PCME §4.1, whose erasing ratio 0.2 is taken as the share of the area.
    `place_B2` in [0, 1), on the CPU: where the square lies, downwards and to the right, of what is possible.
    """
    height, width = images.shape[-2:]
    h, w = round(height * share**0.5), round(width * share**0.5)
    room = torch.tensor([height - h + 1, width - w + 1])
    top, left = (place_B2 * room).long().to(images.device, non_blocking=True)[:, :, None].unbind(1)  # (B, 1) each
    return images.masked_fill(_inside(images, top, top + h, left, left + w)[:, None], 0)


def size_augment_text(tokens_BL: Tensor, ratio: float, generator: torch.Generator | None, ids: TextIds) -> Tensor:
    """SizeAugment of texts, (B, L) int64 -> (B, L) int64, on the CPU.

    A token is chosen with probability `ratio`; a chosen one is MASKED, REPLACED by a random one, or else removed. Start
    and end token stay.
    Source: VSE∞ and PCME++'s public code, which replaces with one of BERT's first 30,522 ids; here any of CLIP's words.
    """
    draw_BL = torch.rand(tokens_BL.shape, generator=generator)
    random_BL = torch.randint(1, ids.stop, tokens_BL.shape, generator=generator)
    share_BL = torch.where(ids.are_words(tokens_BL), draw_BL / ratio if ratio else torch.inf, torch.inf)
    result = torch.where(share_BL < MASKED + REPLACED, random_BL, tokens_BL)
    result = torch.where(share_BL < MASKED, ids.mask, result)
    out_BL = (share_BL >= MASKED + REPLACED) & (share_BL < 1)
    order_BL = out_BL.int().argsort(dim=1, stable=True)  # removed tokens become padding at the end
    return result.masked_fill(out_BL, 0).gather(1, order_BL)


def drop_words(tokens_BL: Tensor, draw_BL: Tensor, probability: float, ids: TextIds) -> Tensor:
    """Words become the unknown word with a probability, (B, L) int64 -> (B, L) int64; `draw_BL` is uniform in [0, 1).

    CLIP has no unknown word; its parts of words become MASK_TOKEN. Source: Bowman et al. 2016; PCME §4.1 (0.1).
    """
    return tokens_BL.masked_fill(ids.are_words(tokens_BL) & (draw_BL < probability), ids.mask)
