"""Sums over all pairs of all ranks' items, in a ring: texts and their gradients travel, images stay.

B items of a rank, W ranks. Memory is O(B * block) for the pairs and O(B D) for what travels, whatever W is.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from probemb import distributed

BLOCK = 1024  # texts that are compared at a time


def number(x: Tensor | float, like: Tensor) -> Tensor:
    """A number as a tensor () like another one; the host waits for no copy."""
    x = x if isinstance(x, Tensor) else like.new_full((), x)
    return x.to(like.dtype).reshape(())


def sum_over_pairs(
    term: Callable[..., Tensor], image: Sequence[Tensor], text: Sequence[Tensor], scalars: Sequence[Tensor] = (),
    block: int = BLOCK,
) -> Tensor:  # fmt: skip
    """The sum over this rank's images and all ranks' texts, (); a text's gradient is the sum over the ranks.

    `term`: (*image, *at most `block` texts, *scalars) -> the sum over their pairs, (); `image` and `text` are tensors
    of B items each, as many on every rank, of one floating type. The gradients are computed in the forward pass, so
    nothing of the size of the pairs is kept; there are none of second order.
    """
    tensors = (*image, *text, *scalars)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return _SumOverPairs.apply(term, block, len(image), len(text), wanted, *tensors)


class _SumOverPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, term, block, n_image, n_text, wanted, *tensors):
        tensors = [x.detach() for x in tensors]
        image, text, scalars = tensors[:n_image], tensors[n_image:][:n_text], tensors[n_image + n_text :]
        of_image, of_text, of_scalars = ([torch.zeros_like(x) for x in group] for group in (image, text, scalars))
        total = image[0].new_zeros(())
        for visitors in round_trip(text):
            for rows in blocks(len(visitors[0]), block):
                given = *image, *(x[rows] for x in visitors), *scalars
                if not wanted:
                    total = total + term(*given)
                    continue
                leaves = [x.detach().requires_grad_() for x in given]
                with torch.enable_grad():
                    value = term(*leaves)
                total = total + value.detach()
                sums = *of_image, *(x[rows] for x in of_text), *of_scalars
                for x, grad in zip(sums, torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)):
                    x += grad
            if wanted:
                of_text = pass_on(of_text)  # the last hop brings them back
        ctx.save_for_backward(*of_image, *of_text, *of_scalars)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, None, None, None, None, *(grad * kept for kept in ctx.saved_tensors)


def blocks(n: int, block: int) -> Iterator[slice]:
    return (slice(start, start + block) for start in range(0, n, block))


def round_trip(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """This rank's tensors, then every other rank's; the next ones are under way meanwhile. Collective."""
    for _ in range(distributed.world_size() - 1):
        coming = _exchange(tensors)
        yield tensors
        tensors = coming()
    yield tensors


def pass_on(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The previous rank's tensors for these, which the next rank gets. Collective."""
    return _exchange(tensors)() if distributed.world_size() > 1 else tensors


def _exchange(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Send tensors of one type to the next rank, in one message; the result waits for the previous rank's."""
    sent = torch.cat([x.flatten() for x in tensors])
    buffers = sent, torch.empty_like(sent)
    rank, world = distributed.rank(), distributed.world_size()
    ends = (dist.isend, (rank + 1) % world), (dist.irecv, (rank - 1) % world)
    requests = dist.batch_isend_irecv([dist.P2POp(way, x, other) for x, (way, other) in zip(buffers, ends)])

    def wait() -> list[Tensor]:
        for request in requests:
            request.wait()
        parts = buffers[1].split([x.numel() for x in tensors])
        return [part.view(x.shape) for part, x in zip(parts, tensors)]

    return wait
