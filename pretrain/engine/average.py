"""An exponential moving average of the trained weights, cut among the ranks like Adam's moments; any ZeRO stage.

It lies beside the float32 tensors that the optimizer steps, so a rank holds 4 bytes for each parameter that it steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pretrain.engine.state import EngineState


class Average:
    """The average of an engine's weights; begins as a copy of them. Buffers and frozen weights are not averaged."""

    def __init__(self, engine):
        self._held = EngineState(engine)
        self._means = {stepped: stepped.detach().clone() for stepped in dict.fromkeys(self._held.stepped.values())}

    @torch.no_grad()
    def add(self, weight: float) -> None:
        """mean + weight (weights - mean), after an optimizer step; not collective."""
        torch._foreach_lerp_(list(self._means.values()), [stepped.detach() for stepped in self._means], weight)

    def whole(self) -> dict[str, Tensor]:
        """{name of a trained parameter: whole float32 CPU tensor} on rank 0, {} on the others; collective."""
        held = {name: self._held.gather(name, self._means[stepped]) for name, stepped in self._held.stepped.items()}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor]) -> None:
        """Take the average from `read`: name of a trained parameter -> the whole tensor; every rank reads."""
        for name, stepped in self._held.stepped.items():
            self._held.fill(name, self._means[stepped], read(name))

    def restart(self) -> None:
        """Restart from the current weights."""
        for stepped, mean in self._means.items():
            mean.copy_(stepped.detach())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the engine computes with the average; collective at both ends, between two optimizer steps.

        After an error the average stays in place: ranks that have not failed could not restore the weights alone.
        """
        self._swap()
        yield
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for stepped, mean in self._means.items():
            kept = stepped.detach().clone()
            stepped.detach().copy_(mean)
            mean.copy_(kept)
        self._held.publish()
