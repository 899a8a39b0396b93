"""One forward and backward pass on fake tensors: bytes and FLOPs of any model, without its memory or its time.

Fake tensors have shapes, types and storage sizes but no values; torch's operators and autograd run on them. They are on
the CPU, so no GPU is needed. `Likeness` adds a GPU's differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from weakref import finalize

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.variable import Variable
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pretrain.config import Config
from pretrain.engine.engine import Towers
from pretrain.masking import Masks, has_copies, masks_of
from pretrain.objectives import MASKED_EVERY, OBJECTIVES, Objective, Pairs
from probemb import Gaussian, distributed
from probemb.errors import UserError
from probemb.models import DualEncoder

# Autocast on a GPU runs these in float32, autocast on a CPU in the type of their input.
FLOAT32_ON_A_GPU = {
    "layer_norm",
    "group_norm",
    "norm",
    "softmax",
    "log_softmax",
    "softplus",
    "exp",
    "log",
    "pow",
    "sum",
}


def build(config: Config) -> DualEncoder:
    """The model of a pretraining configuration with fake weights, in a fraction of a second; draws no random number.

    Raises:
        UserError: the configuration names no model that can be built.
    """
    config = replace(config, model=replace(config.model, pretrained=None, image_weights=None))
    return fake(config.create_model)


@cache
def start_autograd() -> None:
    """Call before a process' first fake mode, or no process that is forked later can compute gradients.

    The first backward pass starts a thread for each kind of device that it finds, and does not do so in forked
    processes. A fake mode feigns a GPU.
    """
    torch.zeros((), requires_grad=True).backward()


def fake(make: Callable[[], nn.Module]) -> nn.Module:
    """The result of `make` with fake weights, and with their `fake_mode` as an attribute."""
    start_autograd()
    with torch.random.fork_rng(devices=[]), init_empty_weights():
        model = make()
    with FakeTensorMode(allow_non_fake_inputs=True) as model.fake_mode:
        return model.to_empty(device="cpu")


@dataclass(frozen=True)
class Setting:
    """A training step, as the ranks share it.

    Attributes:
        world: ranks, W.
        rows: of the batch on each rank.
        text_tokens: length of the longest text of a batch.
        parts: accumulation parts into which a rank cuts its rows.
        half: bfloat16 autocast.
        gpu: on a GPU more operators run in float32, and communication overlaps the backward pass.
        checkpointing: recompute blocks in the backward pass.
        patch_dropout: share of an image's patches that are not read.
        average: whether an average of the weights is kept.
    """

    objective: Objective
    world: int
    rows: int
    text_tokens: int
    parts: int = 1
    zero_stage: int = 1
    half: bool = True
    gpu: bool = True
    checkpointing: bool = False
    patch_dropout: float = 0.0
    average: bool = False

    @classmethod
    def of(cls, config: Config, world: int, text_tokens: int, half: bool, gpu: bool) -> Setting:
        """A step of a run on `world` ranks. If they cannot share its batch, it has a larger one that they can."""
        e = config.engine
        parts = e.accumulation * (MASKED_EVERY if has_copies(config.loss) else 1)
        return cls(
            objective=OBJECTIVES[config.objective](config.loss),
            world=world,
            rows=-(-config.batch_size // (world * parts)) * parts,
            text_tokens=text_tokens,
            parts=e.accumulation,
            zero_stage=e.zero_stage,
            half=half,
            gpu=gpu,
            checkpointing=e.grad_checkpointing,
            patch_dropout=config.model.patch_dropout,
            average=config.ema.half_life_samples > 0,
        )

    @property
    def copies(self) -> int:
        """Items of a rank that have masked copies."""
        return self.rows // MASKED_EVERY if has_copies(self.objective.options) else 0

    def can_have(self, parts: int) -> bool:
        """True if a rank's rows can be cut into so many parts."""
        return self.rows % parts == 0 and (not self.copies or self.copies % parts == 0)


@dataclass(frozen=True)
class Trace:
    """A pass forward and backward.

    Attributes:
        kept: bytes alive after the forward pass, the outputs among them.
        peak: most bytes alive at one moment, without parameters' gradients; `with_gradients`, if they stay.
        forward_flops, backward_flops: recomputation belongs to the backward pass.
    """

    kept: float
    peak: float
    with_gradients: float
    forward_flops: float
    backward_flops: float

    @property
    def flops(self) -> float:
        """Forward and backward."""
        return self.forward_flops + self.backward_flops


class Tracker(TorchDispatchMode):
    """Follows the storages that operators make until they are freed, and counts FLOPs of matrix products.

    Args:
        known: existing tensors, which are not counted.
        parameters: their gradients are counted separately.
    """

    def __init__(self, known: Iterable[Tensor], parameters: Iterable[nn.Parameter] = ()):
        super().__init__()
        self.alive = self.peak = self.with_gradients = self.gradients = self.flops = 0
        self._storages = {t.untyped_storage()._cdata for t in known}
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in parameters]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # most calls are this one
            return torch.device("cpu")
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func._overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self._add(t.untyped_storage())
        return out

    def __exit__(self, *error):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*error)

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self.alive += storage.nbytes()
            self.with_gradients = max(self.with_gradients, self.alive)
            self.peak = max(self.peak, self.alive - self.gradients)
            finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, nbytes: int) -> None:
        self._storages.discard(key)
        self.alive -= nbytes

    def _accumulated(self, parameter: nn.Parameter) -> None:
        self.gradients += parameter.grad.untyped_storage().nbytes()


class Likeness(TorchFunctionMode):
    """Makes a pass on fake CPU tensors like one on real tensors: packed sequences have full or known lengths, and with
    `gpu`, autocast knows the operators that a GPU runs in float32."""

    def __init__(self, gpu: bool):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if self.gpu and name in FLOAT32_ON_A_GPU and torch.is_autocast_enabled("cpu"):
            args = [a.float() if isinstance(a, Tensor) and a.dtype == torch.bfloat16 else a for a in args]
        elif name == "tensor" and isinstance(args[0], list):
            out = func(*args, **kwargs)
            out.values_given = args[0]
            return out
        elif name == "_pack_padded_sequence":
            inputs, lengths, batch_first = args
            inputs = inputs.transpose(0, 1) if batch_first else inputs
            known = getattr(lengths, "values_given", None)  # else all are as long as the longest
            sizes = torch.empty(len(inputs), dtype=torch.int64)
            sizes.whole = inputs.shape[1]
            sizes.batch = -(-sum(known) // len(inputs)) if known else sizes.whole
            return inputs[:, : sizes.batch].flatten(0, 1), sizes
        elif name == "__getitem__" and hasattr(args[0], "batch"):  # nn.GRU reads the first of the sizes
            return args[0].batch
        elif name == "_pad_packed_sequence":
            data, sizes, batch_first, *_ = args
            padded = pad(data.unflatten(0, (len(sizes), -1)), (0, 0, 0, sizes.whole - sizes.batch))
            lengths = torch.full((padded.shape[1],), len(sizes))
            return (padded.transpose(0, 1) if batch_first else padded), lengths
        elif name in ("gru", "lstm", "rnn_tanh", "rnn_relu") and isinstance(args[3], list):  # of a packed sequence
            data, sizes, hidden, weights, *options = args
            out, *last = func(data.unflatten(0, (len(sizes), -1)), hidden, weights, *options, False)  # not batch_first
            return out.flatten(0, 1), *last
        return func(*args, **kwargs)


def trace_part(model: DualEncoder, s: Setting, exact: bool = True) -> Trace:
    """Both towers over one accumulation part of a rank's rows.

    Bytes and FLOPs grow linearly with the rows; the peak may also change its place. If not `exact`, traces of all rows
    and of an eighth give those between, which saves time: the peak is then too large by less than the weights.
    """

    def of(rows: int) -> Trace:
        given = s.patch_dropout, s.copies > 0
        return _trace_towers(model, rows, s.text_tokens, s.half, s.gpu, s.checkpointing, *given)

    rows, few = s.rows // s.parts, s.rows // 8
    few -= few % MASKED_EVERY if s.copies else 0
    if exact or rows in (s.rows, few) or not few:
        return of(rows)
    share = (rows - few) / (s.rows - few)
    return Trace(*(a + share * (b - a) for a, b in zip(astuple(of(few)), astuple(of(s.rows)))))


@cache
def _trace_towers(
    model: DualEncoder,
    rows: int,
    text_tokens: int,
    half: bool,
    gpu: bool,
    checkpointing: bool,
    patch_dropout: float,
    copies: bool,
) -> Trace:
    model.set_grad_checkpointing(checkpointing)
    towers = Towers(model, "bf16" if half else "fp32")
    images, tokens, masks = _inputs(model, rows, text_tokens, patch_dropout, copies)
    given = [images, tokens, *(mask for mask in masks if mask is not None)]
    with model.fake_mode, Likeness(gpu):
        frozen = [p for p in model.parameters() if not p.requires_grad]
        trained = [p for p in model.parameters() if p.requires_grad]
        return trace(lambda: towers(images, tokens, *masks), [*given, *model.buffers(), *frozen], trained)


def _inputs(
    model: DualEncoder, rows: int, text_tokens: int, patch_dropout: float, copies: bool
) -> tuple[Tensor, Tensor, Masks]:
    with model.fake_mode:
        images = torch.empty(rows, 3, model.image_size, model.image_size, dtype=torch.uint8)
        tokens = torch.empty(rows, text_tokens, dtype=torch.int64)
        return images, tokens, masks_of(model, images, tokens, patch_dropout, copies)


def input_bytes(model: DualEncoder, s: Setting) -> tuple[int, int]:
    """Bytes of a rank's images and tokens, and of the masks that are drawn for them."""
    images, tokens, masks = _inputs(model, s.rows, s.text_tokens, s.patch_dropout, s.copies > 0)
    return images.nbytes + tokens.nbytes, sum(mask.nbytes for mask in masks if mask is not None)


def trace_loss(model: DualEncoder, s: Setting) -> Trace:
    """The loss of one rank's rows among all ranks', from the Gaussians on."""
    start_autograd()
    hops = min(s.world, 3) if s.objective.ring(s.world) else s.world  # a ring's memory is that of its second hop
    with FakeTensorMode(), distributed.pretend(hops):
        leaves = [torch.empty(s.rows, model.embed_dim, requires_grad=True) for _ in range(4)]
        leaves.append(torch.empty(3, requires_grad=True))
        copies = [torch.empty(s.copies, model.embed_dim, requires_grad=True) for _ in range(4 * (s.copies > 0))]
        leaves += copies

        def forward() -> list[Tensor]:
            masked = (Gaussian(*copies[:2]), Gaussian(*copies[2:])) if copies else None
            pairs = Pairs(Gaussian(*leaves[:2]), Gaussian(*leaves[2:4]), *leaves[4].unbind(), masked)
            return [s.objective(pairs).loss]

        found = trace(forward, leaves)
    again = s.world / hops
    return replace(found, forward_flops=again * found.forward_flops, backward_flops=again * found.backward_flops)


def trace(
    forward: Callable[[], Sequence[Tensor]], known: list[Tensor], parameters: Sequence[nn.Parameter] = ()
) -> Trace:
    """A forward pass, and the backward pass from all of its outputs; inside a fake mode."""
    with Tracker([*known, *parameters], parameters) as tracker:
        try:
            outputs = tuple(out for out in forward() if out.requires_grad)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(
                f"The plan cannot follow this model: the result of {error.func} depends on the values of a batch.",
                "Measure a short run instead, with pretrain.run --stop-at-step 50.",
            ) from error
        kept, forward_flops = tracker.alive, tracker.flops
        gradients = tuple(torch.empty_like(out) for out in outputs)
        # Not torch.autograd.backward: `Likeness` would handle it as a function, and miss what blocks recompute inside.
        Variable._execution_engine.run_backward(outputs, gradients, False, False, (), True, True)
    for tensor in (*known, *parameters):
        tensor.grad = None
    return Trace(kept, tracker.peak, tracker.with_gradients, forward_flops, tracker.flops - forward_flops)
