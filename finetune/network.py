"""Embed a batch on every rank, and gather it over all ranks with gradient."""

from __future__ import annotations

from torch import Tensor, nn

from finetune.methods import Method
from probemb import distributed
from probemb.models import DualEncoder, Encoded


class Network(nn.Module):
    """The module that DDP wraps, one model and the method's own: their gradients belong to one backward pass.

    What stands in the method's `aside` has gradients and an optimizer of its own, and is not among them.
    """

    def __init__(self, model: DualEncoder, method: Method):
        super().__init__()
        self.model, self.method, self.wants = model, method.module, (method.wants_tokens, method.wants_features)

    def forward(self, images: Tensor, tokens: Tensor, image_mask: Tensor | None) -> tuple[Tensor, ...]:
        """The tensors of both `Encoded`, see `embed`."""
        return embed(self.model, images, tokens, image_mask, self.wants)


def embed(
    model: DualEncoder, images: Tensor, tokens: Tensor, image_mask: Tensor | None, wants: tuple[bool | str, bool]
) -> tuple[Tensor, ...]:
    """The tensors of both towers' `Encoded`, as many of the image as of the text; `wants` tokens and features."""
    return *model.image_tower(images, image_mask, *wants), *model.text_tower(tokens, None, *wants)


def of_all_ranks(embedded: tuple[Tensor, ...]) -> tuple[Encoded, Encoded]:
    """Every rank's `embed` -> images and texts of all ranks, in at least float32."""
    half = len(embedded) // 2
    return distributed.gather_encoded(Encoded.of(embedded[:half]).float(), Encoded.of(embedded[half:]).float())
