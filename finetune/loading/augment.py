"""Augmentation of a batch: Mixup, CutMix and Cutout of its images, SizeAugment and dropped words of its texts.

Drawing is separate from applying: the caller's generator draws a few numbers on the CPU, so that a step can be
repeated; applying runs on any device without synchronising it.
SizeAugment of images is `probemb.models.pooling.size_augment_mask`.

Shapes: B images, L text positions, V tokens of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from probemb.models.architectures import reads_words
from probemb.models.word_tokenizer import FIRST_WORD, UNKNOWN

START_TOKEN, END_TOKEN = 49406, 49407  # of CLIP's vocabulary; all tokens below are words or parts of words
# CLIP has no mask token. This one is a capital M, which its lower-casing tokenizer never produces; as in PCME++'s code.
MASK_TOKEN = 44


class TextIds(NamedTuple):
    """Special ids of a tokenizer; 0 is padding.

    Attributes:
        stop: words, or parts of them, have ids below this one.
        mask: replaces a masked word.
        end: ends a text; None if only padding follows the words.
    """

    stop: int = START_TOKEN
    mask: int = MASK_TOKEN
    end: int | None = END_TOKEN

    @classmethod
    def of(cls, model_config: dict) -> TextIds:
        """The ids of a model's tokenizer."""
        if not reads_words(model_config["architecture"]):
            return cls()
        return cls(FIRST_WORD + len(model_config["architecture"]["text_cfg"]["vocabulary"]), UNKNOWN, None)


class Mix(NamedTuple):
    """Mixing of a batch of images: image i becomes lam_i of itself and 1 − lam_i of image partner_i.

    Attributes:
        lam: (B,) float32, the share of the image itself; 1 where it stays as it is. For CutMix the true share of area.
        use_cutmix: (B,) bool, whether a box is pasted (CutMix) rather than all pixels blended (Mixup).
        boxes: (B, 4) int64, CutMix's boxes: top, bottom, left, right, the ends not included. Zeros elsewhere.
        partner: (B,) int64.
    """

    lam: Tensor
    use_cutmix: Tensor
    boxes: Tensor
    partner: Tensor


def draw_mix(
    batch: int,
    height: int,
    width: int,
    rng: np.random.Generator | np.random.RandomState,
    ratio: float = 0.25,
    mixup_alpha: float = 2.0,
    cutmix_alpha: float = 2.0,
    switch: float = 0.5,
    prob: float = 1.0,
    minmax: tuple[float, float] | None = None,
    mode: str = "element",
) -> Mix:
    """Mixup and CutMix for a batch of images, drawn image by image. Source: PCME++ §2.4, §B.2.

    Image i is mixed with image B−1−i, with probability ratio · prob. CutMix's box has sides √(1 − λ) of the image's
    around a random centre, cropped to the image; λ is then the share of area that is left.

    The order of the draws is part of the interface: for all images CutMix or Mixup, λ of CutMix, λ of Mixup, [mixed or
    not, if ratio < 1], mixed or not by prob; then, for each image with a box, its centre's row and column. With one
    kind alone neither the choice nor the other λ is drawn. With a RandomState these are the numbers of PCME++'s public
    code, except that it ignores the ratio if only one kind is on.

    Args:
        batch, height, width: B and the size of the images in pixels.
        rng: source of all draws.
        ratio: share of the images that is mixed (mode "element").
        mixup_alpha, cutmix_alpha: λ ~ Beta(α, α); 0 turns that kind off.
        switch: probability of CutMix rather than Mixup.
        prob: one more probability of being mixed; of the whole batch in mode "batch".
        minmax: shortest and longest side of CutMix's boxes, as shares of the image's, instead of √(1 − λ); the box then
            lies within the image, and CutMix's λ is drawn from Beta(1, 1) and not used.
        mode: "element"; "pair" (image i and its partner alike); "batch" (one draw for all).

    Raises:
        ValueError: both kinds are off, there is no such mode, or a ratio with another mode than "element".
    """
    if mixup_alpha <= 0 and cutmix_alpha <= 0 and minmax is None:
        raise ValueError("mixup_alpha and cutmix_alpha are both 0: there is nothing to mix")
    if mode not in ("element", "pair", "batch") or (mode != "element" and ratio < 1):
        raise ValueError(f"mode {mode!r} with ratio {ratio}: choose 'element', or 'pair' or 'batch' with ratio 1")
    cutmix_alpha = 1.0 if minmax is not None else cutmix_alpha
    if mode == "batch":
        lam, use_cutmix = _draw_batch(rng, mixup_alpha, cutmix_alpha, switch, prob)
    else:
        n = batch if mode == "element" else batch // 2
        lam, use_cutmix = _draw_elements(n, rng, ratio, mixup_alpha, cutmix_alpha, switch, prob)
    boxes = np.zeros((len(lam), 4), dtype=np.int64)
    for i in np.flatnonzero(use_cutmix & (lam != 1)):
        boxes[i] = top, bottom, left, right = _draw_box(lam[i], height, width, rng, minmax)
        lam[i] = 1 - (bottom - top) * (right - left) / (height * width)
    whole = (np.ones(batch, np.float32), np.zeros(batch, bool), np.zeros((batch, 4), np.int64))
    for all_B, drawn in zip(whole, (lam, use_cutmix, boxes)):
        if mode == "pair":  # an odd batch's middle image stays unmixed
            all_B[: len(drawn)], all_B[batch - len(drawn) :] = drawn, drawn[::-1]
        else:
            all_B[:] = drawn
    return Mix(*map(torch.from_numpy, whole), torch.arange(batch - 1, -1, -1))


def mix_images(images: Tensor, mix: Mix, partners: Tensor | None = None) -> Tensor:
    """(B, C, H, W) float, normalised, on any device -> the mixed images; `images` is not changed.

    Args:
        mix: on the CPU, so that the images' device is not synchronised.
        partners: (R, C, H, W), those of the R images whose lam is not 1; None to take them from `images`.
    """
    rows = torch.nonzero(mix.lam != 1).flatten()
    if not len(rows):
        return images
    lam, use_cutmix, boxes, partner, rows = (
        x.to(images.device, non_blocking=True) for x in (*(drawn[rows] for drawn in mix), rows)
    )
    partners = images[partner] if partners is None else partners
    top, bottom, left, right = boxes[:, :, None].unbind(1)  # (R, 1) each, R mixed images
    y, x = (torch.arange(n, device=images.device) for n in images.shape[-2:])
    inside_RHW = ((y >= top) & (y < bottom))[:, :, None] & ((x >= left) & (x < right))[:, None, :]
    own_R11 = lam.to(images.dtype)[:, None, None]
    own_RHW = torch.where(use_cutmix[:, None, None], (~inside_RHW).to(images.dtype), own_R11)[:, None]
    mixed = images[rows] * own_RHW + partners * (1 - own_RHW)
    return images.index_copy(0, rows, mixed)


def size_augment_text(
    tokens_BL: Tensor,
    ratio: float = 0.2,
    masking: float = 0.5,
    replacing: float = 0.1,
    *,
    generator: torch.Generator | None = None,
    word_end_V: Tensor | None = None,
    ids: TextIds = TextIds(),  # noqa: B008 - frozen
) -> Tensor:
    """SizeAugment of texts: a share of the words is masked, replaced or left out, (B, L) int64 -> (B, L) int64.

    A word is chosen with probability `ratio`; a chosen one is masked with probability `masking`, replaced by random
    tokens with probability `replacing`, and otherwise removed. Start and end token stay.
    Source: VSE∞ and PCME++'s public code (0.2, 0.5, 0.1).

    VSE∞ chooses whole words and has BERT's mask token. PCME++'s public code chooses single tokens, masks with
    MASK_TOKEN, and replaces with one of the first 30,522 tokens (as many as BERT has); here replacements are any of
    CLIP's words and parts of words except token 0, the padding.

    Args:
        tokens_BL: as CLIP's tokenizer gives them, on the CPU.
        generator: source of all draws, which are made for the whole (B, L).
        word_end_V: (V,) bool, whether a token ends a word (`Tokenizer.word_ends`), to choose whole words; None to
            choose tokens.
        ids: of the tokenizer; by default CLIP's.
    """
    draw_BL = torch.rand(tokens_BL.shape, generator=generator)
    random_BL = torch.randint(1, ids.stop, tokens_BL.shape, generator=generator)
    after_end_BL = tokens_BL == 0 if ids.end is None else (tokens_BL == ids.end).cumsum(1) > 0
    is_word_BL = (tokens_BL < ids.stop) & ~after_end_BL
    if word_end_V is not None:  # a word's first token draws for all of it
        first_BL = torch.ones_like(is_word_BL)
        first_BL[:, 1:] = (word_end_V[tokens_BL] | ~is_word_BL)[:, :-1]
        position_L = torch.arange(tokens_BL.shape[1])
        draw_BL = draw_BL.gather(1, (position_L * first_BL).cummax(1).values)
    share_BL = torch.where(is_word_BL, draw_BL / ratio if ratio else torch.inf, torch.inf)
    result = torch.where(share_BL < masking + replacing, random_BL, tokens_BL)
    result = torch.where(share_BL < masking, ids.mask, result)
    out_BL = (share_BL >= masking + replacing) & (share_BL < 1)
    order_BL = out_BL.int().argsort(dim=1, stable=True)  # removed tokens become padding at the end
    return result.masked_fill(out_BL, 0).gather(1, order_BL)


def cut_out(images: Tensor, share: float, place_B2: Tensor) -> Tensor:
    """Normalised (B, C, H, W), on any device, with a grey square over a share of each, wholly inside it. Grey is 0, the
    mean colour.

    Source: Cutout (DeVries and Taylor 2017); PCME §4.1, whose erasing ratio 0.2 is taken as the share of the area.

    Args:
        place_B2: in [0, 1), on the CPU: where the square lies, downwards and to the right, of what is possible.
    """
    height, width = images.shape[-2:]
    h, w = round(height * share**0.5), round(width * share**0.5)
    room = torch.tensor([height - h + 1, width - w + 1])
    top, left = (place_B2 * room).long().to(images.device, non_blocking=True)[:, :, None].unbind(1)  # (B, 1) each
    y, x = (torch.arange(n, device=images.device) for n in (height, width))
    inside_BHW = ((y >= top) & (y < top + h))[:, :, None] & ((x >= left) & (x < left + w))[:, None, :]
    return images.masked_fill(inside_BHW[:, None], 0)


def drop_words(tokens_BL: Tensor, draw_BL: Tensor, probability: float, ids: TextIds = TextIds()) -> Tensor:  # noqa: B008 - frozen
    """Words become the unknown word with a probability, (B, L) int64 -> (B, L) int64; `draw_BL` is uniform in [0, 1).

    CLIP has no unknown word; its parts of words become MASK_TOKEN. Source: Bowman et al. 2016; PCME §4.1 (0.1).
    """
    after_end_BL = tokens_BL == 0 if ids.end is None else (tokens_BL == ids.end).cumsum(1) > 0
    is_word_BL = (tokens_BL < ids.stop) & ~after_end_BL
    return tokens_BL.masked_fill(is_word_BL & (draw_BL < probability), ids.mask)


def _draw_elements(
    n: int, rng, ratio: float, mixup_alpha: float, cutmix_alpha: float, switch: float, prob: float
) -> tuple[np.ndarray, np.ndarray]:
    """λ (n,) float32 and CutMix or not (n,), image by image."""
    if mixup_alpha > 0 and cutmix_alpha > 0:
        use_cutmix = rng.random(n) < switch
        lam_cutmix = rng.beta(cutmix_alpha, cutmix_alpha, n)
        lam = np.where(use_cutmix, lam_cutmix, rng.beta(mixup_alpha, mixup_alpha, n))
    else:
        use_cutmix = np.full(n, mixup_alpha <= 0)
        alpha = cutmix_alpha if mixup_alpha <= 0 else mixup_alpha
        lam = rng.beta(alpha, alpha, n)
    if ratio < 1:
        lam = np.where(rng.random(n) < ratio, lam, 1.0)
    return np.where(rng.random(n) < prob, lam.astype(np.float32), np.float32(1)), use_cutmix


def _draw_batch(
    rng, mixup_alpha: float, cutmix_alpha: float, switch: float, prob: float
) -> tuple[np.ndarray, np.ndarray]:
    """λ and CutMix or not for a whole batch, (1,) float64 and (1,)."""
    if rng.random() >= prob:
        return np.ones(1), np.zeros(1, dtype=bool)
    both = mixup_alpha > 0 and cutmix_alpha > 0
    use_cutmix = rng.random() < switch if both else mixup_alpha <= 0
    alpha = cutmix_alpha if use_cutmix else mixup_alpha
    return np.array([rng.beta(alpha, alpha)]), np.array([use_cutmix])


def _draw_box(
    lam: np.floating, height: int, width: int, rng, minmax: tuple[float, float] | None
) -> tuple[int, int, int, int]:
    """Top, bottom, left, right."""
    integers = rng.integers if hasattr(rng, "integers") else rng.randint  # Generator, RandomState
    if minmax is not None:
        box_h, box_w = (integers(int(size * minmax[0]), int(size * minmax[1])) for size in (height, width))
        top, left = integers(0, height - box_h), integers(0, width - box_w)
        return top, top + box_h, left, left + box_w
    side = np.sqrt(lam.dtype.type(1) - lam)
    box_h, box_w = (int(lam.dtype.type(size) * side) for size in (height, width))
    y, x = integers(0, height), integers(0, width)
    top, bottom = np.clip([y - box_h // 2, y + box_h // 2], 0, height)
    left, right = np.clip([x - box_w // 2, x + box_w // 2], 0, width)
    return top, bottom, left, right
