"""The training state inside a DeepSpeed engine, by parameter name: read whole on rank 0, written in place, any stage.

ZeRO cuts float32 parameters and Adam's moments into one flat tensor per rank and parameter group (stage 3: subgroup).
Only this file uses private attributes of its optimizers, tested with 0.19.8 (pyproject.toml has the bound):

    stage 0     nothing is cut: every rank has everything
    stage 1, 2  `optimizer.bit16_groups`, `optimizer.single_partition_of_fp32_groups`, `parameter._hp_mapping`
    stage 3     `optimizer.fp16_groups`, `optimizer.fp32_partitioned_groups_flat`, `parameter.ds_tensor`
    1, 2, 3     `optimizer.averaged_gradients`, between the last backward pass of a step and the step
    1, 2, 3     the norms that `leave_norms` replaces

The public `safe_get_*` and `safe_set_*` need Adam's state to exist, see that of the first group only, leave the model's
own weights, and fail at stage 3 if the ranks do not divide the number of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from probemb import distributed

MOMENTS = ("exp_avg", "exp_avg_sq")
Piece = tuple[slice, slice]  # of a flattened parameter, and where these elements lie in this rank's flat tensor


class EngineState:
    """Access by name to the weights and the Adam state of an engine with float32 parameters; `stepped` is the tensor
    that the optimizer steps for each trained parameter, and `pieces` this rank's piece of it."""

    def __init__(self, engine):
        self.engine, self.stage, self.adam = engine, engine.zero_optimization_stage(), _adam(engine)
        self.parameters = {_plain(name): p for name, p in engine.module.named_parameters()}
        entries = {_plain(name): t for name, t in engine.module.state_dict(keep_vars=True).items()}  # persistent ones
        self.buffers = {n: t for n, t in entries.items() if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)}
        names = {id(p): name for name, p in self.parameters.items()}
        cut = [(names[id(p)], flat, piece) for p, flat, piece in self._cut()]
        self.stepped: dict[str, Tensor] = {name: flat for name, flat, _ in cut}
        self.pieces: dict[str, Piece | None] = {name: piece for name, _, piece in cut}

    def _cut(self) -> Iterator[tuple[nn.Parameter, Tensor, Piece | None]]:
        zero = self.engine.optimizer
        if self.stage == 0:
            for p in (p for group in self.adam.param_groups for p in group["params"]):
                yield p, p, _piece(0, p.numel(), 0)
        elif self.stage < 3:  # any piece of a parameter
            for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups):
                for p, at in ((p, p._hp_mapping) for p in group):
                    inside, here = (at.lp_fragment_address, at.hp_fragment_address) if at else (None, None)
                    yield p, flat, _piece(inside.start, inside.numel, here.start) if at else None
        else:
            for group, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat):
                offset = 0
                for p in group:
                    yield p, flat, _partition(p, offset)
                    offset += p.partition_numel()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters and buffers before ZeRO cuts them."""
        return {name: tuple(getattr(t, "ds_shape", t.shape)) for name, t in (self.parameters | self.buffers).items()}

    def weights(self) -> dict[str, Tensor]:
        """A copy of the state dict of `engine.module` on rank 0, {name: whole float32 CPU tensor} (buffers in their own
        type); {} on the others; collective."""
        whole, others = {}, self.parameters | self.buffers
        if self.stage == 3:
            whole = {name: self._assemble(p, p.ds_tensor, _partition(p)) for name, p in self.parameters.items()}
            others = self.buffers
        if not distributed.is_main():
            return {}
        return whole | {name: t.detach().cpu().contiguous().clone() for name, t in others.items()}

    def moments(self) -> dict[str, Tensor]:
        """{"exp_avg.NAME", "exp_avg_sq.NAME"}: whole, float32, CPU, on rank 0; empty on the others. Collective."""
        out = {}
        for key in MOMENTS:
            held = {name: self._adam_state(stepped)[key] for name, stepped in self.stepped.items()}
            out |= {f"{key}.{name}": whole for name, whole in self.gather(held).items()}
        return out

    def steps(self) -> dict[str, int]:
        """Adam's step count of every parameter that is trained."""
        return {name: int(self._adam_state(stepped)["step"]) for name, stepped in self.stepped.items()}

    def gather(self, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`sources` by parameter, cut like the tensors stepped for them, whole on rank 0's CPU; {} on the others;
        collective."""
        found = {n: self._assemble(self.parameters[n], source, self.pieces[n]) for n, source in sources.items()}
        return found if distributed.is_main() else {}

    def _assemble(
        self, p: nn.Parameter, source: Tensor, piece: Piece | None, everywhere: bool = False
    ) -> Tensor | None:
        """All ranks' pieces in `source`, whole, on rank 0's CPU and None on the others, or on every rank's device;
        collective. A sum assembles them; as integers, every bit survives (-0 + 0 is 0)."""
        if self.stage == 0:
            return source.detach().clone().cpu() if distributed.is_main() else None
        shape = getattr(p, "ds_shape", p.shape)
        whole = torch.zeros(shape.numel(), dtype=torch.int32, device=self.engine.device)
        if piece:
            whole[piece[0]] = source.detach().view(-1)[piece[1]].view(torch.int32)
        if distributed.world_size() > 1:
            dist.all_reduce(whole) if everywhere else dist.reduce(whole, 0)
        whole = whole.view(torch.float32).reshape(shape)
        return whole if everywhere else whole.cpu() if distributed.is_main() else None

    @torch.no_grad()
    def load(self, weight: Callable[[str], Tensor], moment: Callable[[str], Tensor], steps: Mapping[str, int]) -> None:
        """Write into the engine, in place, what `weights`, `moments` and `steps` return; every rank reads it."""
        for name, buffer in self.buffers.items():
            buffer.copy_(weight(name))
        counts: dict[Tensor, int] = {}
        for name in self.parameters:
            whole = weight(name)
            self._set(name, whole)
            stepped = self.stepped.get(name)
            if stepped is not None:  # the optimizer's own copy (at stages 0 and 3 it may be the same memory)
                self.fill(name, stepped, whole)
                for key in MOMENTS:
                    self.fill(name, self._adam_state(stepped)[key], moment(f"{key}.{name}"))
                # ZeRO has one count per group; counts differ only if stage 0 skipped parameters without gradient.
                counts[stepped] = max(counts.get(stepped, 0), steps[name])
        for stepped, count in counts.items():
            self.adam.state[stepped]["step"].fill_(count)

    def fill(self, name: str, target: Tensor, whole: Tensor) -> None:
        """Write this rank's piece of a whole tensor into `target`, which is cut like the tensor stepped for it."""
        if piece := self.pieces[name]:
            target.detach().view(-1)[piece[1]] = whole.reshape(-1)[piece[0]]

    def _set(self, name: str, whole: Tensor) -> None:
        """Give the module a parameter's value, without that of the optimizer."""
        p = self.parameters[name]
        if self.stage < 3:
            p.copy_(whole)
            return
        inside, here = _partition(p)
        p.ds_tensor.zero_()  # the padding is uninitialised memory
        p.ds_tensor.detach().view(-1)[here] = whole.reshape(-1)[inside]
        if p.ds_status.name == "AVAILABLE":  # whole in memory
            p.data.copy_(whole)

    @torch.no_grad()
    def publish(self) -> None:
        """Give the module the values of the tensors that the optimizer steps, as after a step; collective."""
        for name, stepped in self.stepped.items() if self.stage else ():
            self._set(name, self._assemble(self.parameters[name], stepped, self.pieces[name], everywhere=True))

    def _adam_state(self, stepped: Tensor) -> dict[str, Tensor]:
        """Adam's state, created as in its first step if missing; never replaced, as ZeRO holds views."""
        state = self.adam.state[stepped]
        if not state:
            on_device = self.adam.defaults.get("fused")
            state["step"] = torch.zeros((), device=stepped.device if on_device else "cpu")
            state |= {key: torch.zeros_like(stepped.detach()) for key in MOMENTS}
        return state


class Average:
    """An exponential moving average of the trained weights, cut among the ranks like Adam's moments: 4 bytes for each
    parameter that a rank steps. Begins as a copy of the weights; buffers and frozen weights are not averaged."""

    def __init__(self, engine):
        self._state = EngineState(engine)
        self._means = {stepped: stepped.detach().clone() for stepped in dict.fromkeys(self._state.stepped.values())}

    @torch.no_grad()
    def add(self, weight: float) -> None:
        """mean + weight (weights - mean), after an optimizer step; not collective."""
        torch._foreach_lerp_(list(self._means.values()), [stepped.detach() for stepped in self._means], weight)

    def whole(self) -> dict[str, Tensor]:
        """{name of a trained parameter: whole float32 CPU tensor} on rank 0, {} on the others; collective."""
        return self._state.gather({name: self._means[t] for name, t in self._state.stepped.items()})

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor]) -> None:
        """Take the average from `read`: name of a trained parameter -> the whole tensor; every rank reads."""
        for name, stepped in self._state.stepped.items():
            self._state.fill(name, self._means[stepped], read(name))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the engine computes with the average; collective at both ends, between two optimizer steps. After an
        error it stays in place: ranks that have not failed could not restore the weights alone."""
        self._swap()
        yield
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for stepped, mean in self._means.items():
            weights = stepped.detach().clone()
            stepped.detach().copy_(mean)
            mean.copy_(weights)
        self._state.publish()


def gradient_norm(engine) -> Tensor:
    """(), of this rank's share of the averaged gradient, between the last backward pass of a step and the step; without
    ZeRO the share of rank 0 is all of it."""
    if engine.zero_optimization_stage():
        groups = engine.optimizer.averaged_gradients.values()
        gradients = [g for group in groups for g in ([group] if isinstance(group, Tensor) else group or ())]
    else:
        gradients = [p.grad for p in engine.module.parameters() if distributed.is_main()]
    gradients = [g for g in gradients if g is not None]
    if not gradients:
        return torch.zeros((), device=engine.device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)).double())  # few kernels


@torch.no_grad()
def optimizer_step(engine, skip: bool, norm: Tensor, longest: float) -> None:
    """`engine.step()`, with the gradient of this `norm` () shortened to `longest` (0: as it is), or, to `skip` on all
    ranks, nothing but dropping the gradients.

    torch's fused AdamW does both, as for `torch.amp.GradScaler`: where `found_inf` is set, weights, moments and counts
    stay as they are, and gradients are divided by `grad_scale`."""
    adam = _adam(engine)
    adam.found_inf = torch.tensor(float(skip), device=engine.device)
    adam.grad_scale = ((norm + 1e-6) / longest).clamp(min=1).float().to(engine.device) if longest else None
    engine.step()


def leave_norms(engine) -> None:
    """Let DeepSpeed step without computing the gradient's norm once more: up to a tenth of a step with few items."""
    stage, zero = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        zero._get_norm_groups = lambda: [torch.zeros(())]
    elif stage:
        zero.scaled_global_norm = lambda *_, **__: 0.0


def _adam(engine) -> torch.optim.Optimizer:
    return engine.optimizer.optimizer if engine.zero_optimization_stage() else engine.optimizer


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")  # torch.compile's wrapper


def _piece(start: int, numel: int, offset: int) -> Piece:
    return slice(start, start + numel), slice(offset, offset + numel)


def _partition(p: nn.Parameter, offset: int = 0) -> Piece:
    """Stage 3: an equal part of every parameter on each rank, the last ones padded."""
    size = p.partition_numel()
    start = min(p.ds_numel, size * dist.get_rank(p.ds_process_group))
    return _piece(start, min(size, p.ds_numel - start), offset)
