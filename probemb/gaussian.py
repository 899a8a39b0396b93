"""The one type that flows through the project: a batch of diagonal normal distributions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(mean, diag exp(log_var)), (..., D) each; `log_var` is the natural log of the variance."""

    mean: Tensor
    log_var: Tensor

    def __post_init__(self):
        if self.mean.shape != self.log_var.shape:
            raise ValueError(f"mean {tuple(self.mean.shape)} and log_var {tuple(self.log_var.shape)} differ in shape")

    def __repr__(self) -> str:
        known = self.mean.numel() and not self.mean.is_meta
        u = f"{self.uncertainty().mean().item():.4g}" if known else "unknown"
        return f"Gaussian(shape={tuple(self.shape)}, mean uncertainty={u}, {self.mean.dtype}, {self.mean.device})"

    @property
    def shape(self) -> torch.Size:
        return self.mean.shape

    @property
    def var(self) -> Tensor:
        return self.log_var.exp()

    @property
    def std(self) -> Tensor:
        return (0.5 * self.log_var).exp()

    def uncertainty(self) -> Tensor:
        """Sum of the variances, (...,) in at least float32. Source: PCME++ §3.4."""
        return at_least_float32(self.log_var).exp().sum(-1)

    def log_det(self) -> Tensor:
        """Log-determinant of the covariance, (...,) in at least float32. Source: Probabilistic VSE++ (uncertainty)."""
        return at_least_float32(self.log_var).sum(-1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n reparametrised samples, (..., n, D): gradients reach mean and log_var."""
        shape = (*self.mean.shape[:-1], n, self.mean.shape[-1])
        noise = torch.randn(shape, dtype=self.mean.dtype, device=self.mean.device, generator=generator)
        return self.mean.unsqueeze(-2) + self.std.unsqueeze(-2) * noise

    def __len__(self) -> int:
        return len(self.mean)

    def __getitem__(self, index) -> "Gaussian":
        return Gaussian(self.mean[index], self.log_var[index])

    def to(self, *args, **kwargs) -> "Gaussian":
        return Gaussian(self.mean.to(*args, **kwargs), self.log_var.to(*args, **kwargs))

    def float(self) -> "Gaussian":
        return Gaussian(at_least_float32(self.mean), at_least_float32(self.log_var))

    def detach(self) -> "Gaussian":
        return Gaussian(self.mean.detach(), self.log_var.detach())

    @staticmethod
    def cat(items: Sequence["Gaussian"], dim: int = 0) -> "Gaussian":
        return Gaussian(torch.cat([g.mean for g in items], dim), torch.cat([g.log_var for g in items], dim))

    @staticmethod
    def stack(items: Sequence["Gaussian"], dim: int = 0) -> "Gaussian":
        return Gaussian(torch.stack([g.mean for g in items], dim), torch.stack([g.log_var for g in items], dim))


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
