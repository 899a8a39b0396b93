"""Match labels: (N, M) matrices in [0, 1] for N images and M texts."""

from __future__ import annotations

import torch
from torch import Tensor


def identity(n: int, m: int | None = None, offset: int = 0, device=None, dtype=torch.float32) -> Tensor:
    """Row i matches column offset + i alone, (n, m). `offset` is where this rank's rows start in the gathered batch."""
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
    match_NM = _as_float(match_NM)
    lam = lam_N.reshape(-1, 1).to(match_NM.dtype)
    return lam * match_NM + (1 - lam) * match_NM[partner_N]


def pseudo_positives(distance_NM: Tensor, match_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Pseudo-positives of every row: columns at least as close as the row's positive get the positive's label.

    The positive of a row is its (first) largest label, hard or soft. Call it on transposes for the other direction.
    Returns labels (N, M), and over all rows the number of columns at least as close as the positive, itself not
    counted. Source: PCME++ §2.3.
    """
    match_NM = _as_float(match_NM)
    positive = match_NM.argmax(1, keepdim=True)
    near = distance_NM <= distance_NM.gather(1, positive)
    labels = torch.where(near, match_NM.gather(1, positive), match_NM)
    return labels, near.sum() - len(match_NM)


def _as_float(match: Tensor) -> Tensor:
    """Labels given as booleans or integers, as float32."""
    return match if match.is_floating_point() else match.float()
