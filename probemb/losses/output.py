"""The result of every loss, and what losses share. Labels are (N, M) in [0, 1], of N images and M texts."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from probemb.gaussian import Gaussian, at_least_float32


@dataclass
class LossOutput:
    """The scalar to minimise, and its parts by name, before their weights and detached."""

    loss: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.terms = {name: value.detach() for name, value in self.terms.items()}


def cosine_similarity(image: Gaussian, text: Gaussian) -> Tensor:
    """Cosines of the means, unit rows (N, D) and (M, D), as (N, M) in at least float32, also under autocast."""
    with torch.autocast(image.mean.device.type, enabled=False):
        return at_least_float32(image.mean) @ at_least_float32(text.mean).T


# -------------------------------------------------------------------------------------------------------------- labels


def identity(n: int, m: int | None = None, offset: int = 0, device=None, dtype=torch.float32) -> Tensor:
    """Row i matches column offset + i alone, (n, m)."""
    rows, columns = torch.arange(n, device=device) + offset, torch.arange(n if m is None else m, device=device)
    return (rows[:, None] == columns[None, :]).to(dtype)


def same_image(image_ids_N: Tensor, text_image_ids_M: Tensor, dtype=torch.float32) -> Tensor:
    """An image matches every caption of the same image, (N, M). Source: PCME++, multiple captions in one batch."""
    return (image_ids_N[:, None] == text_image_ids_M[None, :]).to(dtype)


def smooth(match_NM: Tensor, amount: float) -> Tensor:
    """Label smoothing of pairwise labels: 1 becomes 1 - amount, 0 becomes amount (not amount / N)."""
    return match_NM * (1 - 2 * amount) + amount


def mixed(match_NM: Tensor, lam_N: Tensor, partner_N: Tensor) -> Tensor:
    """Labels of mixed images: lam_i of image i's row plus 1 - lam_i of its partner's row. Source: PCME++ §2.4."""
    lam = lam_N.reshape(-1, 1).to(match_NM.dtype)
    return lam * match_NM + (1 - lam) * match_NM[partner_N]


def pseudo_positives(distance_NM: Tensor, match_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Labels (N, M) where columns at least as close as a row's positive get its label, and how many these are in all.

    The positive of a row is its (first) largest label, hard or soft. Call it on transposes for the other direction.
    Source: PCME++ §2.3.
    """
    positive = match_NM.argmax(1, keepdim=True)
    near = distance_NM <= distance_NM.gather(1, positive)
    labels = torch.where(near, match_NM.gather(1, positive), match_NM)
    return labels, near.sum() - len(match_NM)
