"""Engines around the towers: the whole training state on every rank (ZeRO 0), or shared out by DeepSpeed (`zero.py`).

In a step, for each part of the batch `engine(images, tokens)` and `engine.backward(loss)`, which adds up gradients, and
with the last part averages them over the ranks; then `engine.gradient_norm()` and `engine.step(skip, norm, longest)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, repeat
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from probemb import distributed

if TYPE_CHECKING:
    from pretrain.config import Engine as Options
    from probemb.models import DualEncoder

Piece = tuple[slice, slice]  # of a flattened parameter, and where these elements lie in the tensor that is stepped
CHUNK = 8_000_000  # elements of a flat parameter, which is reduced at a time: about as much as DDP's buckets
BUCKET = 50_000_000  # elements that ZeRO reduces or gathers at a time; DeepSpeed's own 5e8 would cost each GPU 4 GB


class Towers(nn.Module):
    """The module that the engine wraps: the model with flat tensors in and out, which every ZeRO stage can hook."""

    def __init__(self, model: DualEncoder, precision: str):
        super().__init__()
        self.model = model
        self.half = precision == "bf16"

    def forward(
        self, images: Tensor | None = None, tokens: Tensor | None = None, *masks: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Means and log-variances of the given inputs, (B, D) each; with both inputs also the means and log-variances
        of the masked copies that `masks`, as in `Masks`, ask for, and last the scalars (3,): inverse temperature, a, b.
        """
        kept, masked_image, masked_text = masks or (None, None, None)
        given = images if images is not None else tokens
        with torch.autocast(given.device.type, dtype=torch.bfloat16, enabled=self.half):
            if images is None or tokens is None:
                g = self.model.encode_text(tokens) if images is None else self.model.encode_image(images)
                return g.mean, g.log_var
            out, masked = self.model(images, tokens, kept), ()
            if masked_image is not None:
                every = len(images) // len(masked_image)
                image = self.model.encode_image(images[::every], kept=masked_image)
                text = self.model.encode_text(tokens[::every], kept=masked_text)
                masked = image.mean, image.log_var, text.mean, text.log_var
        scalars = torch.cat([out.logit_scale, out.scale, out.shift])
        return out.image.mean, out.image.log_var, out.text.mean, out.text.log_var, *masked, scalars

    def compile(self) -> None:
        torch._dynamo.config.recompile_limit = 64  # graphs of a tower: 4 lengths, masked or not, with gradients or not
        for tower in (self.model.image_tower, self.model.text_tower):  # apart, as only texts have several shapes
            tower.compile(dynamic=False)


class Flat(nn.Module):
    """A module whose trained parameters are views of a few flat ones, which the optimizer gets in their place.

    It computes with views that autograd knows: gradients arrive in tens of flat tensors, and what is done for each of
    them, by hooks, collectives, norms and steps, is not done for each of hundreds of parameters."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer):
        super().__init__()
        self.module, self.flats, chunks = module, nn.ParameterList(), []
        for group in optimizer.param_groups:
            first = len(chunks)
            for p in sorted(group["params"], key=lambda p: p.numel() % 32 > 0):  # so that the others stay aligned
                if len(chunks) == first or sum(q.numel() for q in chunks[-1]) + p.numel() > CHUNK:
                    chunks.append([])
                chunks[-1].append(p)
            flats = [nn.Parameter(torch.cat([p.detach().flatten() for p in chunk])) for chunk in chunks[first:]]
            group["params"] = flats
            self.flats.extend(flats)
        self.held = [(chunk, [p.shape for p in chunk], [p.numel() for p in chunk]) for chunk in chunks]
        tables = [m._parameters for m in module.modules()]  # which torch.func.functional_call finds in every call
        trained = {p for chunk in chunks for p in chunk}
        self.uses = [(table, name, p) for table in tables for name, p in table.items() if p in trained]
        for rnn in (m for m in module.modules() if isinstance(m, nn.RNNBase)):
            rnn.flatten_parameters = lambda: None  # on a GPU it moves weights, which views cannot follow
        self.ready: tuple[list[int] | None, dict | None] = None, None  # versions of the flat ones, and views of them
        self.point()

    def point(self) -> None:
        """Let the module's parameters be views of the flat ones, again after these have got other memory."""
        for p, flat, start in self.places():
            p.data = flat.detach()[start : start + p.numel()].view(p.shape)

    def places(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """Every parameter of the module that is trained, the flat one that holds it, and where it starts there."""
        for flat, (chunk, _, sizes) in zip(self.flats, self.held):
            yield from zip(chunk, repeat(flat), accumulate(sizes, initial=0))

    def views(self) -> dict[nn.Parameter, Tensor]:
        views = {}
        for flat, (chunk, shapes, sizes) in zip(self.flats, self.held):
            parts = zip(chunk, shapes, flat.split(sizes))
            views.update((p, part.view(shape) if len(shape) != 1 else part) for p, shape, part in parts)
        return views

    @torch.enable_grad()
    def prepare(self) -> None:
        """Make the next forward pass's views, which takes milliseconds, now: while a GPU is still at work."""
        self.ready = self.versions(), self.views()

    def versions(self) -> list[int]:
        return [flat._version for flat in self.flats]

    def forward(self, *inputs):
        (versions, views), self.ready = self.ready, (None, None)
        if not torch.is_grad_enabled() or versions != self.versions():
            views = self.views()
        try:
            for table, name, p in self.uses:
                table[name] = views[p]
            return self.module(*inputs)
        finally:
            for table, name, p in self.uses:
                table[name] = p


class Engine:
    """Every rank has all weights and steps all of them (ZeRO 0).

    Not torch's DistributedDataParallel: it rebuilds its buckets after the first step, so that a resumed run of
    three ranks or more would add up in another order than one that was not interrupted."""

    stage = 0

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, options: Options, device: torch.device):
        self.module, self.optimizer, self.device = module, optimizer, device
        self.parts, self.left = options.accumulation, options.accumulation  # of a batch, and those to come
        self.kind = torch.bfloat16 if options.gradient_dtype == "bf16" else torch.float32  # of exchanged gradients
        self.sent: list[tuple[dist.Work, Tensor, Tensor]] = []
        self.wrap(options)
        if options.compile:
            self.module.compile()

    def wrap(self, options: Options) -> None:
        self.flat = Flat(self.module, self.optimizer)
        distributed.broadcast(self.module.parameters())  # frozen ones too
        if distributed.world_size() > 1:
            for flat in self.flat.flats:
                flat.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, flat: nn.Parameter) -> None:
        """In the backward pass, while it goes on."""
        if self.left == 1:
            sent = flat.grad.div_(distributed.world_size()).to(self.kind)
            self.sent.append((dist.all_reduce(sent, async_op=True), sent, flat.grad))

    def __call__(self, *inputs):
        return self.flat(*inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for work, sent, gradient in self.sent:
            work.wait()
            if sent is not gradient:
                gradient.copy_(sent)
        self.sent.clear()
        self.left -= 1

    def gradients(self) -> list[Tensor | None]:
        """This rank's share of the averaged gradient, between the last backward pass of a step and the step; where all
        ranks have all of it, rank 0's."""
        return [flat.grad for flat in self.flat.flats] if distributed.is_main() else []

    def gradient_norm(self) -> Tensor:
        """(), of this rank's share of the averaged gradient, before the step."""
        gradients = [g for g in self.gradients() if g is not None]
        if not gradients:
            return torch.zeros((), device=self.device)
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)).double())  # few kernels

    @torch.no_grad()
    def step(self, skip: Tensor, norm: Tensor, longest: float) -> None:
        """Step with the gradient of this `norm` () shortened to `longest` (0: as it is), or, to `skip` () on all ranks,
        only drop it.

        torch's fused AdamW does both, as for `torch.amp.GradScaler`: where `found_inf` is set, weights, moments and
        counts stay as they are, and gradients are divided by `grad_scale`."""
        self.optimizer.found_inf = (skip > 0).float()
        self.optimizer.grad_scale = ((norm + 1e-6) / longest).clamp(min=1).float() if longest else None
        self.apply()
        if self.flat:
            self.flat.prepare()
        self.left = self.parts

    def apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    # ---------------------------------------------------------------------------------------- where the state is

    def cut(self) -> Iterator[tuple[nn.Parameter, Tensor, Piece | None]]:
        """Every trained parameter, the tensor that the optimizer steps for it here, and this rank's piece of it."""
        for p, flat, start in self.flat.places():
            yield p, flat, piece(0, p.numel(), start)

    def shape(self, p: Tensor) -> torch.Size:
        """Of a parameter or buffer of the module, before ZeRO cuts it."""
        return p.shape

    def put(self, p: nn.Parameter, whole: Tensor) -> None:
        """Give the module a parameter's value, without the tensor that the optimizer steps for it."""
        p.copy_(whole)


def piece(start: int, numel: int, offset: int) -> Piece:
    return slice(start, start + numel), slice(offset, offset + numel)


def make_engine(
    module: nn.Module, optimizer: torch.optim.Optimizer, options: Options, batch_size: int, device: torch.device
) -> Engine:
    """An engine around a module, such as `Towers`, in the ranks' process group; collective. `batch_size`: of all."""
    if not options.zero_stage:
        return Engine(module, optimizer, options, device)
    from pretrain.engine.zero import Sharded  # DeepSpeed takes seconds to import

    return Sharded(module, optimizer, options, batch_size, device)


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Inside, float32 matrix products on a GPU are computed in TF32 (10 bits of mantissa), or exactly."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
