"""The result of every loss."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class LossOutput:
    """Attributes:
    loss: scalar tensor to minimise.
    terms: the parts by name, detached scalars, before their weights.
    """

    loss: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)
