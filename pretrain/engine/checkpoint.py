"""The training state of an engine, and checkpoints of it that any ZeRO stage and number of ranks can load; no pickles.

    checkpoints/step-N/
        weights.safetensors     NAME: parameters (float32) and buffers of the engine's module, whole
        optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME: Adam's moments (float32), whole; average.NAME: the
                                average of the weights, in runs that keep one
        random.safetensors      RANK.torch, RANK.cuda: random state of every rank
        state.json              everything else: the caller's state, step counts, sizes and SHA-256 of the files

A checkpoint appears under its name only when it is complete and on disk, in a folder that all ranks share.
Resuming at the same stage and number of ranks is exact to the bit on a CPU; otherwise only the order of sums differs.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from pretrain.engine.engine import Engine, Piece
from probemb import distributed
from probemb.distributed import agree, all_of
from probemb.errors import UserError
from probemb.runs.checkpoints import OPTIMIZER, RANDOM, WEIGHTS, Damaged, Snapshot, read_content

MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGE = "average."  # before a parameter's name


class EngineState:
    """Access by name to the weights and the Adam state of an engine with float32 parameters; `stepped` is the tensor
    that the optimizer steps for each trained parameter, and `pieces` this rank's piece of it."""

    def __init__(self, engine: Engine):
        self.engine, self.adam = engine, engine.optimizer
        self.parameters = dict(engine.module.named_parameters())
        entries = engine.module.state_dict(keep_vars=True)  # persistent ones
        self.buffers = {n: t for n, t in entries.items() if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)}
        names = {id(p): name for name, p in self.parameters.items()}
        cut = [(names[id(p)], flat, piece) for p, flat, piece in engine.cut()]
        self.stepped: dict[str, Tensor] = {name: flat for name, flat, _ in cut}
        self.pieces: dict[str, Piece | None] = {name: piece for name, _, piece in cut}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters and buffers before ZeRO cuts them."""
        return {name: tuple(self.engine.shape(t)) for name, t in (self.parameters | self.buffers).items()}

    def weights(self) -> dict[str, Tensor]:
        """A copy of the state dict of `engine.module` on rank 0, {name: whole float32 CPU tensor} (buffers in their own
        type); {} on the others; collective."""
        whole, others = {}, self.parameters | self.buffers
        if self.engine.stage == 3:
            whole = {name: self._assemble(p, *self.engine.own(p)) for name, p in self.parameters.items()}
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
        shape = self.engine.shape(p)
        if self.engine.stage == 0:
            return source.detach().view(-1)[piece[1]].view(shape).clone().cpu() if distributed.is_main() else None
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
            self.engine.put(self.parameters[name], whole)
            stepped = self.stepped.get(name)
            if stepped is not None:  # the optimizer's own copy (at stages 0 and 3 it may be the same memory)
                self.fill(name, stepped, whole)
                for key in MOMENTS:
                    self.fill(name, self._adam_state(stepped)[key], moment(f"{key}.{name}"))
                counts[stepped] = steps[name]  # the same for all that it holds
        for stepped, count in counts.items():
            self.adam.state[stepped]["step"].fill_(count)

    def fill(self, name: str, target: Tensor, whole: Tensor) -> None:
        """Write this rank's piece of a whole tensor into `target`, which is cut like the tensor stepped for it."""
        if piece := self.pieces[name]:
            target.detach().view(-1)[piece[1]] = whole.reshape(-1)[piece[0]]

    @torch.no_grad()
    def publish(self) -> None:
        """Give the module the values of the tensors that the optimizer steps, as after a step; collective."""
        for name, stepped in self.stepped.items() if self.engine.stage else ():
            p = self.parameters[name]
            self.engine.put(p, self._assemble(p, stepped, self.pieces[name], everywhere=True))

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

    def __init__(self, engine: Engine):
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


def take_snapshot(engine, step: int, state: dict[str, Any], average: Average | None = None) -> Snapshot | None:
    """Copy the training state to rank 0's memory (12 bytes a parameter, 4 more with an average), and the caller's own
    `state`, which JSON can hold; collective, between two optimizer steps. None on the other ranks."""
    held = EngineState(engine)
    weights, moments, steps = held.weights(), held.moments(), held.steps()
    means, generators = average.whole() if average else {}, all_of(random_state())
    if not distributed.is_main():
        return None
    content = {"step": step, "adam_steps": steps, "state": state}
    moments |= {f"{AVERAGE}{name}": mean for name, mean in means.items()}
    random = {f"{rank}.{name}": t for rank, own in enumerate(generators) for name, t in own.items()}
    return Snapshot({WEIGHTS: weights, OPTIMIZER: moments, RANDOM: random}, content, weights | means)


def load_checkpoint(engine, path: Path, average: Average | None = None) -> None:
    """Restore an engine from a checkpoint that `find_checkpoint` has verified; collective, between two steps.

    An average begins with the weights if the checkpoint has none; a rank that it does not have gets random states drawn
    from rank 0's and its own number. Raises UserError: damaged, or of another model; on all ranks, and nothing is
    changed."""
    held = EngineState(engine)
    with ExitStack() as stack:
        failure = None
        try:
            content = read_content(path)
            weights, moments = (stack.enter_context(safe_open(path / name, "pt")) for name in (WEIGHTS, OPTIMIZER))
            stored, ours = _shapes_in(weights) | _shapes_in(moments), held.shapes()
            averaged = any(name.startswith(AVERAGE) for name in stored)
            kinds = [f"{moment}." for moment in MOMENTS] + [AVERAGE] * averaged
            ours |= {f"{kind}{name}": ours[name] for name in held.stepped for kind in kinds}
            if found := [name for name in ours | stored if ours.get(name) != stored.get(name)]:
                first = f"{found[0]!r} is {stored.get(found[0], 'missing')} instead of {ours.get(found[0], 'unknown')}"
                what = f"The checkpoint {path} is a checkpoint of another model: {first}, and {len(found) - 1} more."
                raise UserError(
                    what, "Resume with the model of the run (config.yaml in its folder), or start a new run."
                )
            generators = _own_random_state(load_file(path / RANDOM))
        except UserError as error:
            failure = error
        except (OSError, SafetensorError) as error:
            failure = Damaged(path, str(error))
        agree(failure)
        held.load(weights.get_tensor, moments.get_tensor, content["adam_steps"])
        if average:
            average.load(lambda name: moments.get_tensor(f"{AVERAGE}{name}") if averaged else weights.get_tensor(name))
    set_random_state(generators)


def read_exported(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint's module as they are exported: their average, if it has one. Raises Damaged."""
    try:
        weights = load_file(path / WEIGHTS)
        with safe_open(path / OPTIMIZER, "pt") as moments:
            means = [name for name in _shapes_in(moments) if name.startswith(AVERAGE)]
            return weights | {name.removeprefix(AVERAGE): moments.get_tensor(name) for name in means}
    except (OSError, SafetensorError) as error:
        raise Damaged(path, str(error)) from error


def _shapes_in(file) -> dict[str, tuple[int, ...]]:
    return {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}


def random_state() -> dict[str, Tensor]:
    """This process' generators that training draws from: torch's on the CPU and on its GPU."""
    gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"torch": torch.get_rng_state(), **gpu}


def set_random_state(state: dict[str, Tensor]) -> None:
    """Restore a result of `random_state`, without the GPU's part if there is no GPU."""
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _own_random_state(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of {"RANK.GENERATOR": tensor}; for a further rank, one drawn from rank 0's and its number."""
    rank, own = distributed.rank(), f"{distributed.rank()}."
    if f"{own}torch" in stored:
        return {name.removeprefix(own): state for name, state in stored.items() if name.startswith(own)}
    digest = hashlib.sha256(bytes(stored["0.torch"].tolist()) + rank.to_bytes(8, "little")).digest()
    seed, gpu = int.from_bytes(digest[:4], "little"), {"cuda": "cuda"} if torch.cuda.is_available() else {}
    return {name: torch.Generator(on).manual_seed(seed).get_state() for name, on in ({"torch": "cpu"} | gpu).items()}
