"""The training state inside a DeepSpeed engine, by parameter name: read whole on rank 0, written in place, any stage.

ZeRO cuts float32 parameters and Adam's moments into one flat tensor per rank and parameter group (stage 3: subgroup).
Only this file uses private attributes of its optimizers, tested with 0.19.8 (pyproject.toml has the bound):

    stage 0     nothing is cut: every rank has everything
    stage 1, 2  `optimizer.bit16_groups`, `optimizer.single_partition_of_fp32_groups`, `parameter._hp_mapping`
    stage 3     `optimizer.fp16_groups`, `optimizer.fp32_partitioned_groups_flat`, `parameter.ds_tensor`
    1, 2, 3     `optimizer.averaged_gradients`, between the last backward pass of a step and the step
    1, 2, 3     the norms that `leave_norms` replaces

DeepSpeed's own checkpoints use the same names. The public `safe_get_*` and `safe_set_*` functions see Adam's state of
the first group only until it is linked again, need that state to exist, do not change the model's own weights, and
fail at stage 3 if the number of elements is not a multiple of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from probemb import distributed

MOMENTS = ("exp_avg", "exp_avg_sq")


class Piece(NamedTuple):
    """Elements [start, start + numel) of a flattened parameter; they lie at `offset` in this rank's flat tensors."""

    start: int
    numel: int
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """A view of this piece in `flat`: the parameters or a moment."""
        return flat.detach().view(-1).narrow(0, self.offset, self.numel)

    def cut(self, whole: Tensor) -> Tensor:
        """This piece of a whole tensor of the parameter's shape."""
        return whole.reshape(-1).narrow(0, self.start, self.numel)


class EngineState:
    """Access by name to the weights and the Adam state of an engine with float32 parameters."""

    def __init__(self, engine):
        self.engine, self.stage = engine, engine.zero_optimization_stage()
        self.optimizer, self.parameters = _adam(engine), named_parameters(engine)
        names = {id(p): name for name, p in self.parameters.items()}
        # The tensor that the optimizer steps for a parameter, and this rank's piece of it, or None.
        self.stepped: dict[str, Tensor] = {}
        self.pieces: dict[str, Piece | None] = {}
        for flat, members in self._flat_groups():
            for p, piece in members:
                self.stepped[names[id(p)]], self.pieces[names[id(p)]] = flat, piece

    def _flat_groups(self) -> Iterable[tuple[Tensor, list[tuple[nn.Parameter, Piece | None]]]]:
        zero = self.engine.optimizer
        if self.stage == 0:
            for p in (p for group in self.optimizer.param_groups for p in group["params"]):
                yield p, [(p, Piece(0, p.numel(), 0))]
        elif self.stage < 3:
            for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups):
                yield flat, [(p, _mapped_piece(p)) for p in group]
        else:
            for group, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat):
                offset, members = 0, []
                for p in group:
                    members.append((p, _partition_piece(p, offset)))
                    offset += p.partition_numel()
                yield flat, members

    def moments(self) -> dict[str, Tensor]:
        """{"exp_avg.NAME", "exp_avg_sq.NAME"}: whole, float32, CPU, on rank 0; empty on the others. Collective."""
        out = {}
        for key in MOMENTS:
            held = {name: self._adam_state(stepped)[key] for name, stepped in self.stepped.items()}
            out |= {f"{key}.{name}": whole for name, whole in self.gather(held).items()}
        return out

    def gather(self, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By parameter, `sources` that are cut like the tensors stepped for them: whole, float32, CPU, on rank 0; {} on
        the others; collective."""
        if self.stage == 0:
            return {name: _copy(source) for name, source in sources.items() if distributed.is_main()}
        device, parameters, pieces = self.engine.device, self.parameters, self.pieces
        whole = {name: _whole_on_main(parameters[name], pieces[name], t, device) for name, t in sources.items()}
        return whole if distributed.is_main() else {}

    def fill(self, name: str, target: Tensor, whole: Tensor) -> None:
        """Write this rank's piece of a whole tensor into `target`, which is cut like the tensor stepped for it."""
        if piece := self.pieces[name]:
            piece.of(target).copy_(piece.cut(whole))

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the values of the tensors that the optimizer steps, as after a step; collective."""
        zero = self.engine.optimizer
        if self.stage in (1, 2):
            zero.update_lp_params()
        elif self.stage == 3:
            zero.empty_partition_cache()
            for group in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(group)
            if zero.persistent_parameters:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def steps(self) -> dict[str, int]:
        """Adam's step count of every parameter that is trained."""
        return {name: int(self._adam_state(stepped)["step"]) for name, stepped in self.stepped.items()}

    @torch.no_grad()
    def load(self, weight: Callable[[str], Tensor], moment: Callable[[str], Tensor], steps: Mapping[str, int]) -> None:
        """Write weights, buffers, moments and step counts into the engine, in place; every rank reads.

        Args:
            weight: name of a parameter or buffer -> the whole tensor.
            moment: "exp_avg.NAME" or "exp_avg_sq.NAME" -> the whole tensor.
            steps: as returned by `steps()`.
        """
        for name, buffer in named_buffers(self.engine).items():
            buffer.copy_(weight(name))
        for name, p in self.parameters.items():
            whole = weight(name)
            if self.stage == 3:
                _fill_partition(p, whole)
            else:
                p.copy_(whole)
            if name in self.stepped:  # the optimizer's own copy (at stages 0 and 3 it may be the same memory)
                self.fill(name, self.stepped[name], whole)
        counts: dict[Tensor, int] = {}
        for name, stepped in self.stepped.items():
            # ZeRO has one count per group; counts differ only if stage 0 skipped parameters without gradient.
            counts[stepped] = max(counts.get(stepped, 0), steps[name])
            for key in MOMENTS:
                self.fill(name, self._adam_state(stepped)[key], moment(f"{key}.{name}"))
        for stepped, count in counts.items():
            self.optimizer.state[stepped]["step"].fill_(count)

    def _adam_state(self, stepped: Tensor) -> dict[str, Tensor]:
        """Adam's state, created as in its first step if missing; never replaced, as ZeRO holds views."""
        state = self.optimizer.state[stepped]
        if not state:
            on_device = self.optimizer.defaults.get("fused")
            state["step"] = torch.zeros((), device=stepped.device if on_device else "cpu")
            for key in MOMENTS:
                state[key] = torch.zeros_like(stepped.detach())
        return state


class Average:
    """An exponential moving average of the trained weights, cut among the ranks like Adam's moments: 4 bytes for each
    parameter that a rank steps. Begins as a copy of the weights; buffers and frozen weights are not averaged."""

    def __init__(self, engine):
        self._held = EngineState(engine)
        self._means = {stepped: stepped.detach().clone() for stepped in dict.fromkeys(self._held.stepped.values())}

    @torch.no_grad()
    def add(self, weight: float) -> None:
        """mean + weight (weights - mean), after an optimizer step; not collective."""
        torch._foreach_lerp_(list(self._means.values()), [stepped.detach() for stepped in self._means], weight)

    def whole(self) -> dict[str, Tensor]:
        """{name of a trained parameter: whole float32 CPU tensor} on rank 0, {} on the others; collective."""
        return self._held.gather({name: self._means[t] for name, t in self._held.stepped.items()})

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor]) -> None:
        """Take the average from `read`: name of a trained parameter -> the whole tensor; every rank reads."""
        for name, stepped in self._held.stepped.items():
            self._held.fill(name, self._means[stepped], read(name))

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
            weights = stepped.detach().clone()
            stepped.detach().copy_(mean)
            mean.copy_(weights)
        self._held.publish()


def gradient_norm(engine) -> Tensor:
    """(), of the averaged gradients that this rank holds, between the last backward pass of a step and the step."""
    if engine.zero_optimization_stage() == 0:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    else:
        groups = engine.optimizer.averaged_gradients.values()
        gradients = [g for group in groups for g in ([group] if isinstance(group, Tensor) else group or ())]
    gradients = [g for g in gradients if g is not None]
    if not gradients:
        return torch.zeros((), device=engine.device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)).double())  # few kernels


@torch.no_grad()
def optimizer_step(engine, skip: bool, norm: Tensor, longest: float) -> None:
    """`engine.step()`, or nothing but dropping the gradients.

    torch's fused AdamW does both, as for `torch.amp.GradScaler`: where `found_inf` is set, weights, moments and counts
    stay as they are, and gradients are divided by `grad_scale`.

    Args:
        skip: the same on all ranks.
        norm: () of the whole gradient; one of more than `longest` is shortened to that, unless `longest` is 0.
    """
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
    return engine.optimizer if engine.zero_optimization_stage() == 0 else engine.optimizer.optimizer


def named_parameters(engine) -> dict[str, nn.Parameter]:
    """The module's parameters under their uncompiled names."""
    return {_plain(name): p for name, p in engine.module.named_parameters()}


def count_parameters(engine) -> tuple[int, int]:
    """Elements of all parameters, and of those that are trained."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in engine.module.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)


def named_buffers(engine) -> dict[str, Tensor]:
    """The module's persistent buffers."""
    entries = engine.module.state_dict(keep_vars=True).items()
    return {_plain(name): t for name, t in entries if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)}


def shapes(engine) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters and buffers before ZeRO cuts them."""
    tensors = {**named_parameters(engine), **named_buffers(engine)}
    return {name: tuple(getattr(t, "ds_shape", t.shape)) for name, t in tensors.items()}


def full_state_dict(engine) -> dict[str, Tensor]:
    """A copy of the state dict of `engine.module` on rank 0, {name: whole float32 CPU tensor} (buffers in their own
    type); {} on the others; collective."""
    out = {}
    for name, p in named_parameters(engine).items():
        if hasattr(p, "ds_tensor"):
            out[name] = _whole_on_main(p, _partition_piece(p, 0), p.ds_tensor, engine.device)
        elif distributed.is_main():
            out[name] = _copy(p)
    return out | {n: _copy(t) for n, t in named_buffers(engine).items()} if distributed.is_main() else {}


def _copy(t: Tensor) -> Tensor:
    return t.detach().cpu().contiguous().clone()


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")  # torch.compile's wrapper


def _mapped_piece(p: nn.Parameter) -> Piece | None:
    """Stages 1 and 2: any piece of the parameter; None if this rank has no part of it."""
    if p._hp_mapping is None:
        return None
    inside, here = p._hp_mapping.lp_fragment_address, p._hp_mapping.hp_fragment_address
    return Piece(inside.start, inside.numel, here.start)


def _partition_piece(p: nn.Parameter, offset: int) -> Piece:
    """Stage 3: an equal part of every parameter on each rank, the last ones padded."""
    size = p.partition_numel()
    start = min(p.ds_numel, size * dist.get_rank(p.ds_process_group))
    return Piece(start, min(size, p.ds_numel - start), offset)


def _fill_partition(p: nn.Parameter, whole: Tensor) -> None:
    """Stage 3: fill this rank's part, and the whole parameter if it is in memory."""
    piece = _partition_piece(p, 0)
    p.ds_tensor.zero_()  # the padding is uninitialised memory
    piece.of(p.ds_tensor).copy_(piece.cut(whole))
    if p.ds_status.name == "AVAILABLE":
        p.data.copy_(whole)


def _whole_on_main(p: nn.Parameter, piece: Piece | None, source: Tensor, device: torch.device) -> Tensor | None:
    """A cut tensor, assembled on rank 0's CPU from all ranks' pieces in `source`; collective.

    Every element is on exactly one rank, so a sum assembles them; as integers, every bit survives (-0 + 0 is 0).
    """
    shape = getattr(p, "ds_shape", p.shape)
    whole = torch.zeros(shape.numel(), dtype=torch.int32, device=device)
    if piece:
        whole.narrow(0, piece.start, piece.numel).copy_(piece.of(source).view(torch.int32))
    if distributed.world_size() > 1:
        dist.reduce(whole, 0)
    return whole.view(torch.float32).reshape(shape).cpu() if distributed.is_main() else None
