"""AdamP, for which the host never waits for a GPU.

timm's asks the device about every matrix in every step whether it is scale-invariant; the answer stays there here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class AdamP(torch.optim.Optimizer):
    """Adam that does not step along weights that look scale-invariant. Its state is that of timm's AdamP.

    A tensor of two dimensions or more looks so if its gradient is nearly orthogonal to it: the largest cosine of its
    rows is below delta / √columns, or else the cosine of the whole is below delta / √elements. Then the part of the
    update along the rows, or along the whole, is taken out, and weight decay is multiplied by wd_ratio.
    Source: Heo et al., "AdamP: Slowing Down the Slowdown for Momentum Optimizers on Scale-invariant Weights",
    Algorithm 2.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "delta": delta, "wd_ratio": wd_ratio, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One step of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step(group, parameters)
        return loss

    def _step(self, group: dict, parameters: list[Tensor]) -> None:
        (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
        grads = [parameter.grad for parameter in parameters]
        states = [self.state[parameter] for parameter in parameters]
        for state, parameter in zip(states, parameters):
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
            state["step"] += 1
        first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, grads, alpha=1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        widths = torch._foreach_sqrt(second)
        torch._foreach_div_(widths, [math.sqrt(1 - beta2 ** state["step"]) for state in states])
        torch._foreach_add_(widths, eps)
        updates = first
        if group["nesterov"]:
            updates = torch._foreach_mul(first, beta1)
            torch._foreach_add_(updates, grads, alpha=1 - beta1)
        updates = torch._foreach_div(updates, widths)
        decay = group["weight_decay"]
        for parameter, grad, update, state in zip(parameters, grads, updates, states):
            keep = 1 - lr * decay
            if parameter.ndim > 1:
                projected = project(parameter, grad, update, group["delta"], eps)
                less = torch.full_like(projected, 1 - lr * decay * group["wd_ratio"], dtype=parameter.dtype)
                keep = torch.where(projected, less, torch.full_like(less, keep))
            if decay:
                parameter.mul_(keep)
            parameter.add_(update, alpha=-lr / (1 - beta1 ** state["step"]))


def project(weight: Tensor, grad: Tensor, update: Tensor, delta: float, eps: float) -> Tensor:
    """Take out of `update`, in place, what goes along weights that look scale-invariant; returns whether, () bool."""
    w, g, u = (x.reshape(len(x), -1) for x in (weight, grad, update))
    ww, gg, gw, uw = ((a * b).sum(1) for a, b in ((w, w), (g, g), (g, w), (u, w)))
    rows = _cosine(gw, ww, gg, eps).max() < delta / math.sqrt(w.shape[1])
    whole = _cosine(gw.sum(), ww.sum(), gg.sum(), eps) < delta / math.sqrt(w.numel())
    along_rows, along_whole = uw / (ww.sqrt() + eps).square(), uw.sum() / (ww.sum().sqrt() + eps).square()
    share = torch.where(rows, along_rows, torch.where(whole, along_whole, 0.0))
    update.addcmul_(weight, share.reshape(-1, *[1] * (weight.ndim - 1)), value=-1)
    return rows | whole


def _cosine(product: Tensor, square_a: Tensor, square_b: Tensor, eps: float) -> Tensor:
    """|cos| of two vectors, from their product and squared lengths."""
    return product.abs() / (square_a.sqrt().clamp(min=eps) * square_b.sqrt().clamp(min=eps))
