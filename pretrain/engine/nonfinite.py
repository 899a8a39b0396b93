"""NaN and Inf: detected before the optimizer steps, traced to the samples, reported to all ranks.

Detection is one flag on the device, which the optimizer obeys there; the host reads it when the next step is under way.
Only if a rank sets it do the ranks search for the origin: as one sample's value spreads to every rank's loss through
the gathered embeddings, the report names the first affected stage of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from probemb.errors import UserError

SHOWN = 8  # sample keys in a message
STAGES = ("embedding", "loss", "gradient of the embedding", "gradient")


class Flag:
    """A bool () of the device, on its way to the host."""

    def __init__(self, value: Tensor):
        self.value, self.copied = value, None
        if value.is_cuda:
            self.value = torch.empty((), dtype=torch.bool, pin_memory=True)
            self.value.copy_(value, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def read(self) -> bool:
        """The value; waits for what the device had to do before it, and for nothing after."""
        if self.copied:
            self.copied.synchronize()
        return bool(self.value)


@dataclass
class Queued:
    """A step that the device has been given: its number, the samples, what is known of it, and whether it is skipped.

    samples: seen before it; terms: scalars without gradient.
    """

    step: int
    samples: int
    keys: list[str]
    evidence: Evidence
    terms: dict[str, Tensor | float]
    skipped: Flag


@dataclass
class Evidence:
    """Results of a step before the optimizer steps.

    loss            (), this rank's
    terms           its parts, for the report
    embeddings      (B, D) each: means and log-variances
    gradients       (B, D) each, the gradients of these; None where there are none
    gradient_norm   (), of this rank's share of the averaged gradients
    """

    loss: Tensor
    terms: dict[str, Tensor]
    embeddings: list[Tensor]
    gradients: list[Tensor | None]
    gradient_norm: Tensor

    def nonfinite(self) -> Tensor:
        """() bool on the device: whether the loss or the gradient is NaN or Inf here."""
        return ~(self.loss.detach().isfinite() & self.gradient_norm.isfinite())

    def detached(self) -> Evidence:
        """The same without the graph."""
        embeddings = [embedding.detach() for embedding in self.embeddings]
        return replace(self, loss=self.loss.detach(), embeddings=embeddings)

    def report(self, rank: int, keys: list[str]) -> dict:
        """Report this rank's NaN and Inf: the first stage that has them, the keys of the samples, the terms.

        Args:
            keys: of the B samples.
        """
        everything = list(range(len(self.embeddings[0])))
        bad = (
            _bad_rows(self.embeddings),
            [] if self.loss.detach().isfinite() else everything,
            _bad_rows([g for g in self.gradients if g is not None]),
            [] if self.gradient_norm.isfinite() else everything,
        )
        stage, rows = next(((stage, rows) for stage, rows in zip(STAGES, bad) if rows), ("", []))
        return {
            "rank": rank,
            "stage": stage,
            "keys": [keys[row] for row in rows] if keys else [],
            "terms": {name: float(value) for name, value in self.terms.items()},
        }


def _bad_rows(tensors: list[Tensor]) -> list[int]:
    if not tensors:
        return []
    bad = torch.stack([~t.detach().isfinite().all(dim=1) for t in tensors]).any(dim=0)
    return bad.nonzero().flatten().tolist()


def culprits(reports: list[dict]) -> list[dict]:
    """The reports of the ranks that are affected first."""
    stages = [report["stage"] for report in reports]
    first = next(stage for stage in STAGES if stage in stages)
    return [report for report in reports if report["stage"] == first]


def as_error(step: int, reports: list[dict], where: str) -> UserError:
    """The error made of every rank's report, the same on all ranks; `where` names the file with all reports."""
    found = culprits(reports)
    keys = [key for report in found for key in report["keys"]]
    ranks = ", ".join(str(report["rank"]) for report in found)
    terms = ", ".join(f"{name} {value:.4g}" for name, value in found[0]["terms"].items())
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return UserError(
        f"At step {step} the {found[0]['stage']} is NaN or Inf on rank {ranks} ({terms}), "
        f"for the samples {', '.join(keys[:SHOWN]) or '(unknown)'}{more}; nothing was stepped.",
        f"The full report is in {where}; look at these samples, or lower optimizer.lr, and continue with --resume, "
        "or pass --on-nonfinite skip.",
    )
