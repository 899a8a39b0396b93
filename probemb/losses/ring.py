"""Sums over all pairs of all ranks' items, in a ring: texts and their gradients travel, images stay.

B items of a rank, W ranks. Memory is O(B * block) for the pairs and O(B D) for what travels, whatever W is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from probemb import distributed

BLOCK = 1024  # texts that are compared at a time


def number(x: Tensor | float, like: Tensor) -> Tensor:
    """A number as a tensor (), of the type and on the device of `like`; the host waits for no copy."""
    x = x if isinstance(x, Tensor) else like.new_full((), x)
    return x.to(like.dtype).reshape(())


def sum_over_pairs(
    term: Callable[..., Tensor],
    image: Sequence[Tensor],
    text: Sequence[Tensor],
    scalars: Sequence[Tensor] = (),
    block: int = BLOCK,
) -> Tensor:
    """The sum over this rank's images and all ranks' texts, (), with gradient for the texts of every rank.

    A text's gradient is the sum over the ranks, as with `distributed.gather`. Each rank must have as many items. The
    gradients are computed in the forward pass, so nothing of the size of the pairs is kept; there are none of second
    order.

    `term`: (*image, *at most `block` texts, *scalars) -> the sum over their pairs, (); `image` and `text` are tensors
    of B items each, of one floating type.
    """
    tensors = (*image, *text, *scalars)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return _SumOverPairs.apply(term, block, len(image), len(text), wanted, *tensors)


class _SumOverPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, term, block, n_image, n_text, wanted, *tensors):
        image, text = [x.detach() for x in tensors[:n_image]], [x.detach() for x in tensors[n_image:][:n_text]]
        scalars = [x.detach() for x in tensors[n_image + n_text :]]
        staying = [torch.zeros_like(x) for x in (*image, *scalars)]  # gradients
        travelling = [torch.zeros_like(x) for x in text]
        total = image[0].new_zeros(())
        for visitors in round_trip(text):
            for start in range(0, len(visitors[0]), block):
                rows = slice(start, start + block)
                value, grads = _with_gradients(term, image, [x[rows] for x in visitors], scalars, wanted)
                total = total + value
                if wanted:
                    of_image, of_text, of_scalars = grads[:n_image], grads[n_image:][:n_text], grads[n_image + n_text :]
                    for kept, grad in zip(staying, (*of_image, *of_scalars)):
                        kept += grad
                    for kept, grad in zip(travelling, of_text):
                        kept[rows] += grad
            if wanted:
                travelling = pass_on(travelling)  # the last hop brings them back
        ctx.save_for_backward(*staying[:n_image], *travelling, *staying[n_image:])
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, None, None, None, None, *(grad * kept for kept in ctx.saved_tensors)


def _with_gradients(term, image, text, scalars, wanted: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    if not wanted:
        return term(*image, *text, *scalars), ()
    leaves = [x.detach().requires_grad_() for x in (*image, *text, *scalars)]
    with torch.enable_grad():
        value = term(*leaves)
    grads = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return value.detach(), grads


def round_trip(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """This rank's tensors, then every other rank's; the next ones are under way meanwhile. Collective."""
    for hop in range(distributed.world_size()):
        coming = _Exchange(tensors) if hop + 1 < distributed.world_size() else None
        yield tensors
        if coming:
            tensors = coming.wait()


def pass_on(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The previous rank's tensors for these, which the next rank gets. Collective."""
    return _Exchange(tensors).wait() if distributed.world_size() > 1 else tensors


class _Exchange:
    """Send tensors of one type to the next rank, and receive the previous one's, in one message."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.shapes = [x.shape for x in tensors]
        self.sent = torch.cat([x.flatten() for x in tensors])
        self.received = torch.empty_like(self.sent)
        if distributed.pretending():
            self.received, self.requests = self.sent.clone(), []
            return
        rank, world = distributed.rank(), distributed.world_size()
        there = dist.P2POp(dist.isend, self.sent, (rank + 1) % world)
        back = dist.P2POp(dist.irecv, self.received, (rank - 1) % world)
        self.requests = dist.batch_isend_irecv([there, back])

    def wait(self) -> list[Tensor]:
        """The previous rank's tensors."""
        for request in self.requests:
            request.wait()
        parts = self.received.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]
