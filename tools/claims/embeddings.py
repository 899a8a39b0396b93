"""Embeddings of finished trainings, kept so that `--report` measures again without training.

N images, M captions, D dimensions.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from probemb.errors import UserError
from probemb.files import replace_file
from probemb.gaussian import Gaussian
from probemb.models.encoder import POINT_LOG_VAR

Pair = tuple[Gaussian, Gaussian]  # images (N, D), captions (M, D)


def keep_embeddings(path: Path, parts: dict[str, Pair]) -> None:
    """Write embeddings in float16; log-variances of point models are left out, as they are all the same."""
    held = {}
    for part, both in parts.items():
        for side, gaussian in zip(("image", "text"), both):
            held[f"{part}.{side}.mean"] = gaussian.mean.half().contiguous()
            if not (gaussian.log_var == gaussian.log_var.flatten()[0]).all():
                held[f"{part}.{side}.log_var"] = gaussian.log_var.half().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda aside: save_file(held, aside))


def read_embeddings(path: Path) -> dict[str, Pair]:
    """The inverse of `keep_embeddings`, in float32; means at unit length. Raises UserError: there is no such file."""
    if not path.is_file():
        raise UserError(f"{path} is missing.", f"Remove the training's file in {path.parent.parent}/trainings.")
    held = load_file(path)

    def gaussian(name: str) -> Gaussian:
        mean = torch.nn.functional.normalize(held[f"{name}.mean"].float(), dim=-1)
        log_var = held.get(f"{name}.log_var")
        return Gaussian(mean, torch.full_like(mean, POINT_LOG_VAR) if log_var is None else log_var.float())

    names = dict.fromkeys(name.partition(".")[0] for name in held)
    return {part: (gaussian(f"{part}.image"), gaussian(f"{part}.text")) for part in names}
